"""The border between two pieces: the shape of the activation, traced on fake tensors, and both ends
that compress it.

A payload is sent as two tensors. *words*, fp32 ``[words]``, are bytes viewed as fp32, because
torch.distributed.pipelining returns gradients for floating-point tensors only, of the same shape
and dtype. Many are NaN, and nothing computes with them. There are as many words as the gradient's
payload needs. *tail*, uint8, has the bytes that do not fit, and no gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_map

from lightning_dct.activations.codec import (
    ActivationLayout,
    decode_backward,
    decode_forward,
    encode_backward,
)
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.kernels.bits import as_bytes
from lightning_dct.pipeline.placement import Piece
from lightning_dct.pipeline.sequential import NetworkCall, context_of


class Border(NamedTuple):
    """The activation between two pieces, and the split point that compresses it."""

    split: SplitPoint
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def layout(self) -> ActivationLayout:
        """The layout of its payloads."""
        return self.split.layout(self.shape)

    def empty(
        self, device: torch.device | str, requires_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Uninitialised tensors for words and left-over bytes."""
        words, num_bytes = self.layout.on_the_wire
        tail = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # Lightning's contexts of steps change the default dtype.
        return (
            torch.empty(words, dtype=torch.float32, device=device, requires_grad=requires_grad),
            tail,
        )


def trace_borders(
    pieces: Sequence[Piece],
    call: NetworkCall,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> list[Border]:
    """Find the borders in a call of the network, one fewer than pieces.

    The pieces run on fake tensors, which have shapes but no memory, in forward's context
    ``precision`` (autocast). So every rank finds all borders, and no state, random number or
    gradient changes.

    Raises:
        ValueError: A piece returns something other than one floating-point tensor to the next.
        RuntimeError: A piece cannot run on fake tensors.
    """
    borders = []
    eager = torch.compiler.set_stance("force_eager")  # pieces may be compiled
    with eager, FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), precision():
        value, context = tree_map(
            lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, call
        )
        for piece in pieces[:-1]:
            modules = piece.modules
            named = chain(modules.named_parameters(), modules.named_buffers())
            state = {
                name: torch.empty(one.shape, dtype=one.dtype, device=device) for name, one in named
            }
            try:
                value = functional_call(modules, state, (value,), context_of(modules, context))
            except Exception as error:
                raise RuntimeError(
                    f"Piece {piece.index} of the pipeline cannot be run on fake tensors."
                    " `DCTPipelineStrategy` needs this to find the shapes of what stages send. The"
                    " piece's forward must not read values of tensors (`.item()`, `.numpy()`). The"
                    f" error was: {error}"
                ) from error
            if not isinstance(value, Tensor) or not value.is_floating_point():
                found = (
                    f"a tensor of {value.dtype}"
                    if isinstance(value, Tensor)
                    else f"a {type(value).__name__}"
                )
                raise ValueError(
                    f"Piece {piece.index} of the pipeline returns {found}; a SplitPoint must send"
                    " one tensor of real numbers. Stack what the next piece needs into one tensor."
                )
            assert piece.split is not None
            borders.append(Border(piece.split, tuple(value.shape), value.dtype))
    return borders


def as_floats(payload: Tensor, num_floats: int) -> Tensor:
    """View bytes as ``num_floats`` fp32 numbers, padded with zeros.

    They may be NaN: do not compute with them.
    """
    spare = 4 * num_floats - payload.numel()
    return (functional.pad(payload, (0, spare)) if spare else payload).view(torch.float32)


class Send(torch.autograd.Function):
    """Encodes an activation for the next piece; backward decodes its gradient."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, border: Border) -> tuple[Tensor, Tensor]:
        """Words, fp32, and left-over bytes, uint8."""
        split = border.split
        layout = border.layout
        words, num_bytes = layout.on_the_wire
        with split.timed():
            payload, kept = split.encode(layout, activation)
            tail = (
                payload[4 * words :]
                if payload.numel() > 4 * words
                else payload.new_zeros(num_bytes)
            )
            sent = as_floats(payload[: 4 * words], words)
        ctx.border = border
        ctx.kept = kept
        ctx.mark_non_differentiable(tail)
        split.count(layout, 4 * words + num_bytes, kept)
        return sent, tail

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """The gradient of the activation, zero where nothing was sent."""
        border: Border = ctx.border
        with border.split.timed():
            payload = as_bytes(grad_outputs[0].detach())[: border.layout.backward_bytes]
            return decode_backward(border.layout, payload, ctx.kept, border.dtype), None


class Receive(torch.autograd.Function):
    """Decodes an activation of the previous piece; backward encodes its gradient."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, tail: Tensor, border: Border) -> Tensor:
        """The activation, zero where nothing was sent."""
        layout = border.layout
        with border.split.timed():
            payload = torch.cat([as_bytes(words.detach()), tail])[: layout.forward_bytes]
            activation, ctx.kept = decode_forward(
                layout, payload, border.dtype, border.split.awaited
            )
        ctx.border = border
        ctx.seed = border.split.rounding_seed
        return activation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """The gradient's payload as the gradient of the words."""
        border: Border = ctx.border
        with border.split.timed():
            payload = encode_backward(border.layout, grad_outputs[0], ctx.kept, ctx.seed)
            words = as_floats(payload, border.layout.on_the_wire[0])
        border.split.count(border.layout, 4 * words.numel(), ctx.kept)
        return words, None, None
