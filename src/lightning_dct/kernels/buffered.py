"""Selects into a buffer of fixed capacity on a GPU, so that the host does not wait for a count.

``select_into_buffer(gradient, residual, segments, numbers)`` changes the residual as
:mod:`lightning_dct.kernels.plain` describes. The shape of its result does not depend on data, and the number of
filled slots stays on the device:

- each segment has its own slots, which are filled from the first one on, in ascending order of positions;
- of a segment with infinite or NaN sums only those are selected, up to the number of slots;
- of a segment with more selected entries than slots, every ``entries / slots``-th is kept: a regular sample.

``numbers``, shape ``[1 + T]`` in the residual's dtype, has the factor on the gradient and one threshold a segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class BufferedSelection(NamedTuple):
    """The selected entries in ``R`` slots of ``T`` segments."""

    positions: Tensor  # shape `[R]`, int64: indices into the flattened bucket; anything in empty slots
    values: Tensor  # shape `[R]`, the residual's dtype: gradient plus residual there; anything in empty slots
    counts: Tensor  # shape `[T]`, int64: selected entries of each segment, possibly more than its slots
    broken: Tensor  # shape `[T]`, bool: whether the segment has infinite or NaN sums


class Segments:
    """The bounds and slots of ``T`` segments, with ``R`` slots and ``N`` entries in all; computed once for a device.

    ``bounds`` are ranges of the bucket, not empty; ``capacities`` are the slots of each, at least one.

    Attributes:
        edges: Shape ``[T + 1]``, int64: the first of the ``N`` entries of each segment, and the end of the last.
        slots: Shape ``[T]``, int64: slots of each.
        begins: Shape ``[T]``, int64: the first slot of each.
        segment: Shape ``[R]``, int64: the segment of each slot.
        numbers: Shape ``[R]``, int64: each slot's number in its segment.
        table: Shape ``[T, 3]``, int64: slots, last entry and offset in the bucket of each.
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


def select_into_buffer(gradient: Tensor, residual: Tensor, segments: Segments, numbers: Tensor) -> BufferedSelection:
    """Select in all segments at once; see the module's docstring."""
    if not segments.bounds:
        empty = residual.new_empty(0)
        return BufferedSelection(empty.long(), empty, empty.long(), empty.bool())
    residuals = [residual[start:stop] for start, stop in segments.bounds]
    old = torch.cat(residuals)
    # Two operations, because a fused one would round once instead of twice.
    fresh = torch.cat([gradient[start:stop] for start, stop in segments.bounds]).to(old.dtype).mul(numbers[0]).add_(old)
    magnitudes = fresh.abs()
    finite = magnitudes < math.inf
    broken = _set_before(finite)[segments.edges].diff() < segments.edges.diff()
    # "Not below" instead of "at or above", because it is true for NaN. Only infinite and NaN sums reach infinity.
    thresholds = torch.where(broken, math.inf, numbers[1:]).unbind()
    spread = [threshold.expand(size) for threshold, size in zip(thresholds, segments.sizes, strict=True)]
    ranks = _set_before((magnitudes < torch.cat(spread)).logical_not_())
    at_edges = ranks[segments.edges]
    counts = at_edges.diff()
    # A slot gets the selected entry with its number, or, of too many, the last one of its share.
    shares = torch.where(broken, segments.slots, torch.maximum(counts, segments.slots))[segments.segment]
    slots, last, shift = segments.table[segments.segment].unbind(1)
    wanted = (segments.numbers * shares + shares + slots - 1).div(slots, rounding_mode="floor")
    indices = (torch.searchsorted(ranks, wanted + at_edges[segments.segment]) - 1).minimum(last)
    torch._foreach_copy_(residuals, torch.where(finite, fresh, old).split(segments.sizes))
    return BufferedSelection(indices + shift, fresh[indices], counts, broken)


def _set_before(flags: Tensor) -> Tensor:
    """The number of set flags (shape ``[N]``, bool) before each entry and in all: shape ``[N + 1]``, int64."""
    return torch.cat([flags.new_zeros(1), flags]).cumsum(0)
