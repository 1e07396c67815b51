"""`SplitPoint` marks a border between ranks, and sends only the largest activations across it.

`subspace` puts one between two layers that send few numbers per token, and the receiver adds a
learned vector for it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dct.activations import codec
from lightning_dct.activations.module import CompressedModule
from lightning_dct.compress.awaited import Awaited
from lightning_dct.compress.threshold import (
    GUARD_RESELECT,
    entries_at,
    keep_largest,
    kth_magnitude,
    nudge,
)
from lightning_dct.config import check_choice, check_density, check_integer
from lightning_dct.kernels.bits import nonzero_indices
from lightning_dct.traffic import FP32_BYTES

RowFormat = Literal["fp32", "bf16", "int8", "int4"]
ROW_FORMATS: tuple[str, ...] = get_args(RowFormat)
# The payload's capacity is the target, and an overflow costs a selection. So the guard aims a
# little lower.
GUARD_AIM = 0.97
# Adam's steps have the same size for all weights, and that is too small for the table: see
# docs/history/tables.md.
ANCHOR_GAIN = 5.0


class SplitPoint(CompressedModule):
    """Sets all but the largest activations to zero, and all gradients but those of the largest
    activations.

    ``M = |h| >= threshold``. Forward gives ``h * M`` and backward gives ``M * gradient``, both as
    read from the wire (Gupta et al., KDD 2021, section 3.2). In one process the module computes
    what both ends of a pipeline's border compute, bit for bit, and counts the same bytes.

    The threshold is constant during an optimizer step, for all micro-batches and for a forward that
    activation checkpointing repeats. Evaluation masks and rounds too: a model trained with the mask
    is worse without it.

    Args:
        density: Share of the activations that is sent, in (0, 1]. 1.0 sends every entry and no
            positions.
        refresh_every: Optimizer steps between two exact selections of the threshold. In between, a
            guard nudges it, to keep the number of entries above it near its target. 1 sends exactly
            the largest in every step.
        forward_format: Of the activations: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``, the
            last two with one scale per row (the last dimension), rounded stochastically in training
            and to nearest in evaluation.
        backward_format: Of their gradients.
        seed: Seeds the rounding, which depends only on it, on the step and on the data. So a
            resumed run and a recomputed forward repeat it.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> split = SplitPoint(density=0.5, forward_format="fp32")
        >>> split(torch.tensor([[1.0, -3.0], [0.5, 2.0]]))
        tensor([[ 0., -3.],
                [ 0.,  2.]])
    """

    agreed = ("density", "refresh_every", "forward_format", "backward_format", "seed")

    def __init__(
        self,
        density: float = 0.05,
        *,
        refresh_every: int = 1000,
        forward_format: RowFormat = "bf16",
        backward_format: RowFormat = "bf16",
        seed: int = 0,
    ) -> None:
        super().__init__(refresh_every)
        check_density("density", density)
        check_choice("forward_format", forward_format, ROW_FORMATS)
        check_choice("backward_format", backward_format, ROW_FORMATS)
        check_integer("seed", seed, minimum=0)
        self.density = density
        self.seed = seed
        self.forward_format = forward_format
        self.backward_format = backward_format
        # Entries of a row of activations, if codes of rows are sent instead.
        self.width: int | None = None
        # Training forwards in which more entries reached the threshold than fit into the payload.
        self.overflows = 0
        # The thresholds of this step and of the next one; None before the first selection.
        self.threshold: float | None = None
        self._next: float | None = None
        # Headers of payloads that GPUs have not reported yet.
        self.awaited = Awaited()
        # In this step: entries that have reached the threshold, the capacity, and all entries.
        self._counts = (0, 0, 0)

    def layout(self, shape: torch.Size | tuple[int, ...]) -> codec.ActivationLayout:
        """The layout of payloads for activations of a shape."""
        capacity = entries_at(self.density, math.prod(shape))
        return _layout(tuple(shape), capacity, self.forward_format, self.backward_format)

    @property
    def rounding_seed(self) -> int | None:
        """Seeds this step's rounding; None in evaluation, which rounds to nearest."""
        return codec.mixed_seed(self.seed, self.completed_steps) if self.training else None

    # it would compile anew for each threshold and seed
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, activations: Tensor) -> Tensor:
        """Compress floating-point activations of any shape, and their gradients on the way back."""
        return _Crossing.apply(activations, self, self.layout(getattr(activations, "shape", ())))

    def encode(
        self, layout: codec.ActivationLayout, activations: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Select and encode activations: the payload, and the positions for
        :func:`decode_backward`.
        """
        positions = self.select(layout, activations)
        return codec.encode_forward(layout, activations, positions, self.rounding_seed), positions

    def select(self, layout: codec.ActivationLayout, activations: Tensor) -> Tensor | None:
        """The positions of the entries that are sent, ascending in the flattened tensor: int64;
        None for everything.

        In training this selects and nudges the threshold.

        Raises:
            TypeError: The activations are not a tensor of floating-point numbers.
        """
        if not isinstance(activations, Tensor) or not activations.is_floating_point():
            raise TypeError(
                f"{self.name}: a SplitPoint compresses one tensor of floating-point activations and"
                f" was given {getattr(activations, 'dtype', type(activations).__name__)}. Convert"
                " it, or pass it beside."
            )
        if layout.sends_everything:
            return None
        magnitudes = activations.detach().abs().reshape(-1).to(torch.float32)
        threshold = self.threshold if self.training else self._next
        if threshold is None or (self.training and self.refresh_requested):
            # An evaluation before the first training step uses the threshold of its own batch.
            threshold = kth_magnitude(magnitudes, layout.capacity)
            if self.training:
                self.threshold = self._next = threshold
                self._counts = (0, 0, 0)
                self.refreshed()
        # "Not below" instead of "at or above": NaN is sent too, so that users notice it.
        positions = nonzero_indices((magnitudes < threshold).logical_not_())
        reached = positions.numel()
        smallest = math.inf
        if reached > layout.capacity:
            found = magnitudes[positions].nan_to_num_(nan=math.inf, posinf=math.inf)
            kept, smallest = keep_largest(found, layout.capacity)
            positions = positions[nonzero_indices(kept)]
        # A forward that activation checkpointing repeats within backward has been counted.
        if self.training and torch._C._current_graph_task_id() < 0:
            self.overflows += reached > layout.capacity
            count, target, size = self._counts
            self._counts = count + reached, target + layout.capacity, size + layout.numel
            is_far = reached > GUARD_RESELECT * layout.capacity and math.isfinite(smallest)
            self._next = smallest if is_far else nudge(threshold, *self._counts, GUARD_AIM)
        return positions

    def advance(self, completed_steps: int) -> None:
        """Start the step after ``completed_steps`` optimizer steps, with the nudged threshold.

        Raises:
            PayloadError: On a GPU: a payload of an earlier step was corrupt.
        """
        self.awaited.poll()
        if completed_steps != self.completed_steps:
            self.threshold = self._next
            self._counts = (0, 0, 0)
        super().advance(completed_steps)

    def count(self, layout: codec.ActivationLayout, bytes_sent: int, kept: Tensor | None) -> None:
        """Count one direction's payload, in training only."""
        if self.training:
            sent = layout.numel if kept is None else kept.numel()
            due = (
                layout.numel
                if self.width is None
                else layout.numel // max(layout.row_length, 1) * self.width
            )
            self.traffic.add(
                bytes_sent=bytes_sent, bytes_dense=FP32_BYTES * due, entries_sent=sent, entries=due
            )

    def timed(self) -> AbstractContextManager[None]:
        """Count the time spent encoding or decoding, in training only."""
        return self.traffic.timed() if self.training else nullcontext()

    def thresholds_in_use(self) -> list[float]:
        """The threshold, once it is selected."""
        return [] if self._next is None else [self._next]

    def get_extra_state(self) -> dict[str, Any]:
        """The clock, the thresholds of this step and the next, and the density that they were
        selected for.
        """
        thresholds = {
            "threshold": self._next,
            "density": float(self.density),
            "step": (self.threshold, self._counts),
        }
        return {**super().get_extra_state(), **thresholds}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the clock and the thresholds; request a selection if the density differs."""
        super().set_extra_state(state)
        self._next = state["threshold"]
        # A step of several micro-batches goes on with its own. Older checkpoints do not have it.
        self.threshold, self._counts = state.get("step", (self._next, (0, 0, 0)))
        self.refresh_requested |= float(state["density"]) != self.density

    def compression_state(self) -> dict[str, Any]:
        """The state in the model's ``state_dict``: Lightning's file has only that of rank 0.

        Waits for a GPU.
        """
        self.awaited.synchronize()
        return self.get_extra_state()

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's threshold, or that of the first rank that has selected one."""
        for state in states:
            if state["threshold"] is not None:
                self.set_extra_state(dict(state))
                return

    def extra_repr(self) -> str:
        """The settings, for ``print(model)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.agreed_settings().items())


# A layout computes its sizes once.
_layout = lru_cache(codec.ActivationLayout)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activations: Tensor, split: SplitPoint, layout: codec.ActivationLayout
    ) -> Tensor:
        with split.timed():
            payload, _ = split.encode(layout, activations)
            received, kept = codec.decode_forward(layout, payload, activations.dtype, split.awaited)
        # Not by `save_for_backward`: activation checkpointing would give backward the positions of
        # the second forward.
        ctx.crossing = split, layout, kept, split.rounding_seed
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        split, layout, kept, seed = ctx.crossing
        with split.timed():
            payload = codec.encode_backward(layout, grad_outputs[0], kept, seed)
            gradient = codec.decode_backward(layout, payload, kept, grad_outputs[0].dtype)
        # Here, because a forward may run twice.
        words, tail = layout.on_the_wire
        split.count(layout, 4 * words + tail, kept)
        split.count(layout, 4 * words, kept)
        return gradient, None, None


class Anchored(nn.Module):
    """The receiving end, ``U c + A[token]``, with a fixed basis ``U`` and a learned table ``A``.

    ``A`` is ``ANCHOR_GAIN`` times the weights of ``anchor``. So Adam's step for it is that many
    times as large.
    """

    def __init__(self, basis: nn.Linear, num_tokens: int) -> None:
        super().__init__()
        self.basis = basis
        self.anchor = nn.Embedding(num_tokens, basis.out_features)
        nn.init.normal_(self.anchor.weight, std=basis.out_features**-0.5 / ANCHOR_GAIN)

    def forward(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """Map codes ``[..., rank]`` and the ids of their tokens, integers ``[...]``, to ``[...,
        width]``.

        Raises:
            ValueError: The ids are not those of the tokens that the codes stand for.
        """
        if tokens.is_floating_point() or tokens.shape != codes.shape[:-1]:
            raise ValueError(
                f"`tokens` must be an integer for each of the {list(codes.shape[:-1])} codes that"
                f" have crossed; it is {tokens.dtype} of shape {list(tokens.shape)}. Give the ids"
                " that the first stage gets, as in `network(ids, tokens=ids)`, or make the"
                " `subspace` without `num_tokens` if the network's input is not a sequence of"
                " tokens."
            )
        return torch.add(self.basis(codes), self.anchor(tokens), alpha=ANCHOR_GAIN)


def subspace(
    width: int,
    rank: int,
    num_tokens: int | None = None,
    *,
    forward_format: RowFormat = "int8",
    backward_format: RowFormat = "int4",
    seed: int = 0,
) -> tuple[nn.Linear, SplitPoint, nn.Module]:
    """Three modules in place of one :class:`SplitPoint` between two stages.

    ::

        forward     c = U^T h is sent;          the next module gets U c + A[token]
        backward    dL/dc = U^T g is sent

    ``U [width, rank]`` is orthonormal, drawn once from ``seed``, and fixed. ``A [num_tokens,
    width]`` is a table on the receiving stage, which trains it. Ids are not sent: every rank of a
    pipeline reads the batch, and the network is a :class:`~lightning_dct.SplitSequential` that is
    called with ``tokens=``. Backward is the exact gradient of forward, except for rounding. So the
    layers before the border learn to put into the subspace what does not follow from the token.
    Components outside the subspace are not sent.

    This changes the model, as a bottleneck does: train it with the three modules in place, in one
    process or in two. The subspace is that of Ramasinghe et al., *Protocol Models*, 2025 (arXiv
    2506.01260), without constraints on the weights and with a learned table. A fixed random basis
    and an anchor are from MAPL (arXiv 2606.05484), whose sender also subtracts the anchor. That
    changes only coordinates that the sender can write as well.

    Args:
        width: Entries per token, the last dimension of the activations.
        rank: Numbers per token that are sent, each way; at most ``width``.
        num_tokens: Number of different tokens. None where the network's input is not a sequence of
            tokens: then the receiver learns a mean instead of ``A[token]``, and the network needs
            no ``tokens=``.
        forward_format: Of the coordinates, as for :class:`~lightning_dct.SplitPoint`.
        backward_format: Of their gradients.
        seed: For the basis and for rounding, the same on every rank.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> network = nn.Sequential(nn.Linear(8, 16), *subspace(16, rank=4), nn.Linear(16, 2))
        >>> network(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    check_integer("width", width, minimum=1)
    check_integer("rank", rank, minimum=1)
    if rank > width:
        raise ValueError(
            f"`rank` is {rank} and the activations have a `width` of {width}: a subspace cannot"
            f" have more dimensions. Choose a `rank` below {width}; a fifth of the width is a good"
            " start."
        )
    point = SplitPoint(
        1.0, forward_format=forward_format, backward_format=backward_format, seed=seed
    )
    point.width = width
    # Frozen parameters instead of buffers, which DistributedDataParallel would send in every step.
    into = nn.Linear(width, rank, bias=False).requires_grad_(False)
    back = nn.Linear(rank, width, bias=num_tokens is None)
    nn.init.orthogonal_(into.weight, generator=torch.Generator().manual_seed(seed))
    back.weight.requires_grad_(False).copy_(into.weight.t())
    if num_tokens is None:
        nn.init.zeros_(back.bias)
        return into, point, back
    check_integer("num_tokens", num_tokens, minimum=1)
    return into, point, Anchored(back, num_tokens)
