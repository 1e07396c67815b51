"""The two ends of a border: an activation becomes a payload, and the payload an activation; gradients likewise.

A payload is a pair of tensors. *values*, fp32 ``[words]``, are bytes viewed as fp32, because
torch.distributed.pipelining returns gradients for floating-point tensors only, of the same shape and dtype. Many read
as NaN, and nothing computes with them between the two autograd functions here. *positions*, uint8, have no gradient:
backward returns the entries that forward has sent, which the sender remembers. The size of the gradient sets the number
of words. Values of the activations that do not fit follow the positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dct.activations import Split
from lightning_dct.pipeline.borders import Border


class Crossing:
    """A border at this step, and the split that compresses what crosses."""

    def __init__(self, split: Split, border: Border) -> None:
        self.split = split
        self.border = border
        self.layout = split.layout(border.shape)

    @property
    def sizes(self) -> tuple[int, int]:
        """Words of values, the same both ways, and bytes of positions with the values that do not fit."""
        left_over = max(0, self.layout.forward_values_bytes - 4 * self.layout.wire_floats)
        return self.layout.wire_floats, self.layout.forward_positions_bytes + left_over

    def payload(self) -> tuple[Tensor, Tensor]:
        """A payload's shapes and dtypes, on the meta device."""
        words, num_bytes = self.sizes
        return (
            torch.empty(words, device="meta", requires_grad=True),
            torch.empty(num_bytes, dtype=torch.uint8, device="meta"),
        )


def send(crossing: Crossing, activation: Tensor) -> tuple[Tensor, Tensor]:
    """Encode an activation for the next piece: values, fp32 ``[words]``, and positions, uint8 ``[bytes]``."""
    return _Send.apply(activation, crossing)


def receive(crossing: Crossing, values: Tensor, positions: Tensor) -> Tensor:
    """Decode what the previous piece has sent; zero where it has sent nothing."""
    return _Receive.apply(values, positions, crossing)


def as_floats(payload: Tensor, num_floats: int) -> Tensor:
    """View bytes as ``num_floats`` fp32 numbers, padded with zeros. They may be NaN: do no arithmetic with them."""
    padded = payload.new_zeros(4 * num_floats)
    padded[: payload.numel()] = payload
    return padded.view(torch.float32)


def as_bytes(floats: Tensor, num_bytes: int) -> Tensor:
    """Undo :func:`as_floats`."""
    return floats.detach().contiguous().view(torch.uint8)[:num_bytes]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, crossing: Crossing) -> tuple[Tensor, Tensor]:
        with crossing.split.timed():
            encoded = crossing.split.encode_forward(activation)
            words = crossing.layout.wire_floats
            values = as_floats(encoded.values_payload[: 4 * words], words)
            positions = torch.cat([encoded.positions_payload, encoded.values_payload[4 * words :]])
        ctx.crossing, ctx.positions = crossing, encoded.positions
        ctx.mark_non_differentiable(positions)
        crossing.split.count(crossing.layout, 4 * words + positions.numel(), encoded.positions)
        return values, positions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        crossing: Crossing = ctx.crossing
        with crossing.split.timed():
            payload = as_bytes(grad_outputs[0], crossing.layout.backward_bytes)
            dtype = crossing.border.dtype
            return crossing.split.decode_backward(crossing.layout, payload, ctx.positions, dtype), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, positions: Tensor, crossing: Crossing) -> Tensor:
        layout = crossing.layout
        with crossing.split.timed():
            positions, left_over = positions.tensor_split([layout.forward_positions_bytes])
            payload = torch.cat([as_bytes(values, layout.forward_values_bytes), left_over])
            dtype = crossing.border.dtype
            activation, ctx.positions = crossing.split.decode_forward(layout, positions, payload, dtype)
        ctx.crossing, ctx.seed = crossing, crossing.split.rounding_seed
        return activation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        crossing: Crossing = ctx.crossing
        with crossing.split.timed():
            payload = crossing.split.encode_backward(crossing.layout, grad_outputs[0], ctx.positions, ctx.seed)
            values = as_floats(payload, crossing.layout.wire_floats)
        crossing.split.count(crossing.layout, 4 * values.numel(), ctx.positions)
        return values, None, None
