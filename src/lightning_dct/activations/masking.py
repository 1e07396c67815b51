"""Which activations are sent: those that reach their group's threshold, the largest where there are too many.

All tensors have the shape ``[groups, group_size]`` (see
:meth:`~lightning_dct.activations.layout.ActivationLayout.by_group`). On a GPU nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.threshold import SMALLEST_THRESHOLD
from lightning_dct.wire.bits import nonzero_indices

# If fewer than one in this many entries of a group reached the threshold, the cut reads only those.
COMPACT_BELOW = 4


class Selected(NamedTuple):
    """The entries of one tensor that are sent because of their magnitude.

    Attributes:
        mask: Shape ``[groups, group_size]``, bool; at most the capacity of each group is set.
        reached: Shape ``[groups]``, int64: entries that reached the threshold, sent or not.
        cutoffs: Shape ``[groups]``, fp32: the smallest magnitude that is sent where too many entries reached the
            threshold, else the threshold; infinite where that many entries are infinite or NaN.
    """

    mask: Tensor
    reached: Tensor
    cutoffs: Tensor


def magnitudes_of(grouped: Tensor) -> Tensor:
    """Magnitudes as fp32."""
    return grouped.detach().abs().to(torch.float32)


def select_thresholds(magnitudes: Tensor, k: int) -> Tensor:
    """The thresholds ``[groups]`` that keep ``k`` entries of each group, ``1 <= k <= group_size``.

    Infinite and NaN entries count as zero. A threshold is never below the smallest normal float, so zeros are not sent.
    """
    return _kth_largest(magnitudes.nan_to_num(nan=0.0, posinf=0.0), k).clamp_(min=SMALLEST_THRESHOLD)


def select(magnitudes: Tensor, thresholds: Tensor, k: int) -> Selected:
    """The entries at or above their group's threshold, the ``k`` largest where there are more.

    Of entries that tie for the last places, those that are sent are spread evenly over the group, so that selection
    does not favour the first samples.

    Args:
        magnitudes: Shape ``[groups, group_size]``, fp32; NaN counts as infinite, so that it is sent and seen.
        thresholds: Shape ``[groups]``, fp32, positive.
        k: Capacity of a group, ``1 <= k < group_size``.
    """
    if magnitudes.device.type != "cpu":
        return select_at_once(magnitudes, thresholds, k)
    mask = _reaching(magnitudes, thresholds)
    # numpy counts bools several times faster than torch.
    reached = torch.from_numpy(np.count_nonzero(mask.numpy(), axis=1))
    groups = nonzero_indices(reached > k)
    if groups.numel() == 0:
        return Selected(mask, reached, thresholds)
    if int(reached[groups].max()) * COMPACT_BELOW > magnitudes.shape[1]:
        mask[groups], smallest = _largest(magnitudes[groups], k)
    else:
        smallest = _cut_compact(mask, magnitudes, groups, reached[groups], k)
    return Selected(mask, reached, thresholds.index_copy(0, groups, smallest))


def select_at_once(magnitudes: Tensor, thresholds: Tensor, k: int) -> Selected:
    """:func:`select` for a GPU: it cuts every group, because a look at the counts would wait for the device."""
    mask = _reaching(magnitudes, thresholds)
    reached = mask.sum(dim=1)
    overflowed = reached > k
    largest, smallest = _largest(magnitudes, k)
    return Selected(
        torch.where(overflowed.unsqueeze(1), largest, mask), reached, torch.where(overflowed, smallest, thresholds)
    )


def explore(uniform: Tensor, numel: int) -> Tensor:
    """Random positions below ``numel``: one from each of ``count`` strata of (nearly) equal size, so none twice.

    ``uniform`` has shape ``[count]``, fp32 in [0, 1), ``count <= numel``. The positions are int64 and ascend.
    """
    count = uniform.numel()
    bounds = torch.arange(count + 1, device=uniform.device) * numel // max(count, 1)
    starts, sizes = bounds[:-1], bounds.diff()
    # The product may round up to the size itself.
    return starts + torch.minimum((uniform.to(torch.float64) * sizes).to(torch.int64), sizes - 1)


def _cut_compact(mask: Tensor, magnitudes: Tensor, groups: Tensor, reached: Tensor, k: int) -> Tensor:
    """Cut ``groups`` of the mask, in place, to ``k`` entries each, and return the smallest magnitudes left.

    It reads only the ``reached`` entries of each group: a selection among a twentieth of them takes a twentieth of the
    time.
    """
    everything = groups.numel() == mask.shape[0]
    parts, part_magnitudes = (mask, magnitudes) if everything else (mask[groups], magnitudes[groups])
    found = nonzero_indices(parts.view(-1))
    widest = int(reached.max())
    group = torch.repeat_interleave(torch.arange(groups.numel()), reached)
    column = torch.arange(found.numel()) - (reached.cumsum(0) - reached)[group]
    # -1 is below every magnitude, so the padding is never among the largest.
    table = magnitudes.new_full((groups.numel(), widest), -1.0)
    table[group, column] = part_magnitudes.view(-1)[found]
    largest, smallest = _largest(table, k)
    parts.view(-1)[found] = largest[group, column]
    if not everything:
        mask[groups] = parts
    return smallest


def _reaching(magnitudes: Tensor, thresholds: Tensor) -> Tensor:
    # "Not below" instead of "at or above": it is true for NaN.
    return magnitudes.lt(thresholds.unsqueeze(1)).logical_not_()


def _largest(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A mask of the ``k`` largest entries of each row, ties spread evenly over the row, and the smallest of them."""
    magnitudes = magnitudes.nan_to_num(nan=math.inf, posinf=math.inf)
    smallest = _kth_largest(magnitudes, k)
    mask = magnitudes > smallest.unsqueeze(1)
    ties = magnitudes == smallest.unsqueeze(1)
    remaining = k - mask.sum(dim=1, keepdim=True)
    rank = ties.cumsum(dim=1)
    # The r-th of m ties is sent when floor(r * remaining / m) is a new number: that happens `remaining` times.
    number = rank[:, -1:].clamp(min=1)
    return mask | (ties & (rank * remaining // number > (rank - 1) * remaining // number)), smallest


def _kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    """The k-th largest entry of each row."""
    if magnitudes.device.type == "cpu":
        # kthvalue counts from the smallest; it selects without sorting.
        return torch.kthvalue(magnitudes, magnitudes.shape[1] - k + 1, dim=1).values
    return torch.topk(magnitudes, k, dim=1, sorted=False).values.amin(dim=1)
