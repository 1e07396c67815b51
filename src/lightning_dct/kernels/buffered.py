"""Selects into a buffer of fixed capacity, for GPUs, whose host must not wait for a count: the contract, and in torch.

``select_into_buffer(gradient, residual, segments, numbers)`` treats the residual as
:mod:`lightning_dct.kernels.reference` says. Its result has the same shape whatever the data, and how much of it is
filled stays on the device:

- each segment has slots of its own, as many as its capacity, which fill from the first one on, in ascending order;
- of a segment with infinite or NaN sums, only those are picked, until its slots are full;
- of a segment with more picks than slots, every ``picks / slots``-th goes into a slot: a regular sample of them.

Thresholds are tensors too: ``numbers``, shape ``[1 + T]`` in the residual's dtype, holds the factor on the gradient and
then one threshold a segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Slots for each entry that may be sent. To sort them is the larger part of the cost after the selection.
CAPACITY_FACTOR = 2
# Entries of a block.
BLOCK = 2048


class BufferedSelection(NamedTuple):
    """What was picked: ``R`` slots of ``T`` segments, one segment's after the other's."""

    positions: Tensor  # shape `[R]`, int64: indices into the flattened bucket; anything in a slot that was not filled
    values: Tensor  # shape `[R]`, the residual's dtype: gradient plus residual there; likewise
    counts: Tensor  # shape `[T]`, int64: picked entries of each segment, possibly more than it has slots
    broken: Tensor  # shape `[T]`, bool: whether the segment has infinite or NaN sums


class Blocks(NamedTuple):
    """Where each block begins and ends, and its segment. Shape ``[blocks]``, int64."""

    starts: Tensor
    stops: Tensor
    segments: Tensor


class Segments:
    """Where to pick and into how many slots; computed once for a device.

    ``T`` segments with ``R`` slots and ``N`` entries in all, counted one segment after the other.

    Args:
        bounds: Ranges ``(start, stop)`` of the bucket, none of them empty.
        capacities: Slots of each, at least one.
        device: Where the bucket is.

    Attributes:
        edges: Shape ``[T + 1]``, int64: where each segment's entries begin, and where the last one's end.
        slots: Shape ``[T]``, int64: slots of each.
        begins: Shape ``[T]``, int64: the first slot of each.
        segment: Shape ``[R]``, int64: the segment of each slot.
        numbers: Shape ``[R]``, int64: each slot's number in its segment.
        table: Shape ``[T, 3]``, int64: slots, last entry and shift of each.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]], capacities: Sequence[int], device: torch.device) -> None:
        self.bounds, self.capacities, self.device = tuple(bounds), tuple(capacities), device
        self.sizes = [stop - start for start, stop in bounds]
        edges, slot_edges = (torch.tensor([0, *accumulate(parts)]) for parts in (self.sizes, capacities))
        segment = torch.arange(len(capacities)).repeat_interleave(slot_edges.diff())
        self.edges, self.begins, self.slots = edges.to(device), slot_edges[:-1].to(device), slot_edges.diff().to(device)
        shifts = torch.tensor([start for start, _ in bounds], dtype=torch.int64) - edges[:-1]
        self.table = torch.stack([slot_edges.diff(), edges[1:] - 1, shifts], dim=1).to(device)
        self.segment = segment.to(device)
        self.numbers = (torch.arange(sum(capacities)) - slot_edges[segment]).to(device)

    @cached_property
    def blocks(self) -> Blocks:
        """The segments cut into blocks of at most ``BLOCK`` entries, for kernels that work by the block."""
        starts = [torch.arange(start, stop, BLOCK) for start, stop in self.bounds]
        ends = [(part + BLOCK).clamp(max=stop) for part, (_, stop) in zip(starts, self.bounds, strict=True)]
        segments = [torch.full_like(part, index) for index, part in enumerate(starts)]
        return Blocks(*(torch.cat(parts).to(self.device) for parts in (starts, ends, segments)))

    def cut(self, bucket: Tensor) -> list[Tensor]:
        """The segments of a bucket."""
        return [bucket[start:stop] for start, stop in self.bounds]

    def before(self, flags: Tensor) -> Tensor:
        """How many flags (shape ``[N]``, bool) are set before each entry and in all: shape ``[N + 1]``, int64."""
        return torch.cat([flags.new_zeros(1), flags]).cumsum(0)


def select_into_buffer(gradient: Tensor, residual: Tensor, segments: Segments, numbers: Tensor) -> BufferedSelection:
    """Select in all segments at once; the module's docstring has the contract."""
    if not segments.bounds:
        return no_segments(residual)
    residuals = segments.cut(residual)
    old = torch.cat(residuals)
    # Two operations, because a fused one would round once where the other kernels round twice.
    fresh = torch.cat(segments.cut(gradient)).to(old.dtype).mul(numbers[0]).add_(old)
    magnitudes = fresh.abs()
    finite = magnitudes < math.inf
    broken = segments.before(finite)[segments.edges].diff() < segments.edges.diff()
    # "Not below" instead of "at or above": it is true for NaN. Infinite and NaN sums alone are not below infinity.
    thresholds = torch.where(broken, math.inf, numbers[1:]).unbind()
    spread = [threshold.expand(size) for threshold, size in zip(thresholds, segments.sizes, strict=True)]
    ranks = segments.before((magnitudes < torch.cat(spread)).logical_not_())
    at_edges = ranks[segments.edges]
    counts = at_edges.diff()
    # Which pick goes into a slot: the one of its number, or, of too many, the last of each slot's share.
    shares = torch.where(broken, segments.slots, torch.maximum(counts, segments.slots))[segments.segment]
    slots, last, shift = segments.table[segments.segment].unbind(1)
    wanted = (segments.numbers * shares + shares + slots - 1).div(slots, rounding_mode="floor")
    indices = (torch.searchsorted(ranks, wanted + at_edges[segments.segment]) - 1).minimum(last)
    torch._foreach_copy_(residuals, torch.where(finite, fresh, old).split(segments.sizes))
    return BufferedSelection(indices + shift, fresh[indices], counts, broken)


def no_segments(residual: Tensor) -> BufferedSelection:
    """The selection from no segments."""
    empty = residual.new_empty(0)
    return BufferedSelection(empty.long(), empty, empty.long(), empty.bool())


def buffer_capacity(size: int, target: int) -> int:
    """Slots for a tensor. A guard that sees more picks than that selects another threshold at once."""
    return min(size, CAPACITY_FACTOR * target)
