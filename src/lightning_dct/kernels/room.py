"""Select into a room of fixed size, for GPUs, where nobody waits to hear how much was picked: contract, and in torch.

``select_into_room(gradient, residual, segments, rooms, numbers)`` does to the residual what
:mod:`lightning_dct.kernels.selection` says. But its result has the same shape whatever the numbers are, and how much of
it is filled stays on the device:

- each segment has slots of its own, as many as ``rooms`` says, filled from the first one on, in ascending order;
- of a segment with infinite or NaN sums only those are picked; they fill the slots until there are no more;
- of a segment with more picks than slots every ``picks / slots``-th goes into a slot: a regular sample of them.

Thresholds are tensors too: ``numbers`` holds the factor on the gradient and then one threshold a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.kernels import fastest_kernel

# Slots for each entry that may go. Sorting them is the larger part of what compression costs after the selection.
ROOM_FACTOR = 2


class InRoom(NamedTuple):
    """What was picked. ``R`` slots of ``T`` segments, one segment's behind the other's.

    Attributes:
        positions: Shape ``[R]``, int64: places in the flattened bucket; anything in a slot that was not filled.
        values: Shape ``[R]``, the residual's dtype: gradient plus residual there; likewise.
        counts: Shape ``[T]``, int64: how many entries of each segment were picked, possibly more than it has slots.
        broken: Shape ``[T]``, bool: whether there were infinite or NaN sums in the segment.
    """

    positions: Tensor
    values: Tensor
    counts: Tensor
    broken: Tensor


RoomKernel = Callable[[Tensor, Tensor, Sequence[tuple[int, int]], Sequence[int], Tensor], InRoom]


def room_kernel(name: str, device_type: str) -> RoomKernel:
    """The kernel of a name: triton's, or else torch's; ``"auto"`` takes the fastest that is installed for a device."""
    if name == "auto":
        name = fastest_kernel(device_type)
    if name == "triton":
        kernel: RoomKernel = import_module("lightning_dct.kernels.triton_cuda").select_into_room
        return kernel
    return select_into_room


def select_into_room(
    gradient: Tensor, residual: Tensor, segments: Sequence[tuple[int, int]], rooms: Sequence[int], numbers: Tensor
) -> InRoom:
    """Add the gradient to the residual and pick the entries at or above the threshold, one segment after the other.

    Args:
        gradient: Shape ``[n]``, any floating dtype: the flattened bucket. Not changed.
        residual: Shape ``[n]``, fp32 or fp64, finite. Changed in place.
        segments: ``T`` ascending ranges ``(start, stop)`` of the bucket, none of them empty.
        rooms: Slots of each, at least one.
        numbers: Shape ``[1 + T]``, the residual's dtype: the factor on the gradient, and the thresholds.
    """
    positions, values, counts, broken = [], [], [], []
    for (start, stop), room, threshold in zip(segments, rooms, numbers[1:], strict=True):
        old = residual[start:stop]
        # Two operations, because a fused one would round once where the other kernels round twice.
        fresh = gradient[start:stop].to(old.dtype).mul(numbers[0]).add_(old)
        nonfinite = fresh.isfinite().logical_not_()
        is_broken = nonfinite.any()
        # "Not below" instead of "at or above": it is true for NaN.
        picked = torch.where(is_broken, nonfinite, (fresh.abs() < threshold).logical_not_())
        ranks = picked.cumsum(0)
        count = ranks[-1]
        samples = (ranks * room).div(count.clamp(min=1), rounding_mode="floor")
        is_sample = samples > ((ranks - 1) * room).div(count.clamp(min=1), rounding_mode="floor")
        kept = picked & torch.where(is_broken | (count <= room), ranks <= room, is_sample)
        places = torch.nonzero_static(kept, size=room, fill_value=0).squeeze(1)
        positions.append(places + start)
        values.append(fresh[places])
        counts.append(count)
        broken.append(is_broken)
        old.copy_(torch.where(nonfinite, old, fresh))
    if not positions:
        return no_segments(residual)
    return InRoom(torch.cat(positions), torch.cat(values), torch.stack(counts), torch.stack(broken))


def no_segments(residual: Tensor) -> InRoom:
    """What is picked where there is nothing to pick from."""
    empty = residual.new_empty(0)
    return InRoom(empty.long(), empty, empty.long(), empty.bool())


def room_for(size: int, target: int) -> int:
    """Slots for a tensor. More picks than that are rare: it is where the guard takes another threshold at once."""
    return min(size, ROOM_FACTOR * target)
