"""The contract of all kernels, which they keep to the last bit, and the kernel in plain torch.

``select(gradient, residual, segments, thresholds, gradient_scale)`` has the arguments

    gradient        shape [n], any floating dtype: the flattened bucket; not changed
    residual        shape [n], fp32 or fp64, finite; changed in place
    segments        ascending ranges (start, stop) of the bucket, one for each compressed tensor
    thresholds      one positive threshold for each segment
    gradient_scale  factor on the gradient: one over the loss scale of mixed-precision training

In the segments it leaves ``residual + gradient_scale * gradient`` in the residual, with product and sum each rounded
once in the residual's dtype. It selects, in ascending order, the entries whose magnitude is not below the threshold of
their segment. If a sum is infinite or NaN, the residual keeps its old value, and the entry is always selected.

The torch kernel works chunk by chunk, so that intermediate results stay in the processor's cache. On tensors of
millions of entries this is several times faster than one operation after the other on all of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17
# On a GPU a chunk costs a kernel launch, and memory is fast.
GPU_CHUNK = 1 << 62


class Selection(NamedTuple):
    """The entries whose magnitude reaches the threshold of their tensor."""

    positions: Tensor  # shape `[count]`, int64: ascending indices into the flattened bucket
    values: Tensor  # shape `[count]`, the residual's dtype: gradient plus residual there, not necessarily finite
    counts: list[int]  # the number of them in each segment


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float = 1.0,
) -> Selection:
    """Select in cache-sized chunks; see the module's docstring."""
    chunk = CHUNK if gradient.device.type == "cpu" else GPU_CHUNK
    longest = min(chunk, max((stop - start for start, stop in segments), default=0))
    sums, magnitudes = residual.new_empty(longest), residual.new_empty(longest)
    positions, values, counts = [residual.new_empty(0).long()], [residual.new_empty(0)], []
    for (start, stop), threshold in zip(segments, thresholds, strict=True):
        count = 0
        for low in range(start, stop, chunk):
            high = min(low + chunk, stop)
            old, accumulated, magnitude = residual[low:high], sums[: high - low], magnitudes[: high - low]
            scaled = gradient[low:high].to(old.dtype)
            if gradient_scale != 1.0:
                scaled = torch.mul(scaled, gradient_scale, out=magnitude)
            torch.add(old, scaled, out=accumulated)
            picked, nonfinite = _pick(torch.abs(accumulated, out=magnitude), threshold)
            picked_values = accumulated[picked]
            if nonfinite:
                broken = picked[~picked_values.isfinite()]
                accumulated[broken] = old[broken]
            old.copy_(accumulated)
            positions.append(picked.add_(low))
            values.append(picked_values)
            count += picked.numel()
        counts.append(count)
    return Selection(torch.cat(positions), torch.cat(values), counts)


def weights_by_senders(ranks: int, total: Tensor) -> Tensor:
    """The weight of an entry by the number of ranks that have sent it: shape ``[ranks + 1]``, the total's dtype."""
    senders = torch.arange(ranks + 1, dtype=torch.float64, device=total.device).clamp_(min=1)
    return (ranks / senders).sqrt().to(total.dtype)


def sum_entries(
    total: Tensor,
    segments: Sequence[tuple[int, int]],
    entries: Sequence[tuple[Tensor, Tensor]],
    factor: float,
    by_senders: bool = False,
) -> None:
    """See :func:`lightning_dct.kernels.sum_entries`."""
    for start, stop in segments:
        total[start:stop].zero_()
    if by_senders:
        counts = torch.zeros(total.numel(), dtype=torch.int32, device=total.device)
        for positions, values in entries:
            counts.index_add_(0, positions, (values != 0).int())
        weights = weights_by_senders(len(entries), total)
        entries = [(positions, values * weights[counts[positions]]) for positions, values in entries]
    for positions, values in entries:
        # index_add_'s own factor may round product and sum together.
        total.index_add_(0, positions, values.to(total.dtype).mul(factor))


def _pick(magnitudes: Tensor, threshold: float) -> tuple[Tensor, bool]:
    """Indices of magnitudes that are not below the threshold, and whether any of these is infinite or NaN."""
    # "Not below" instead of "at or above", because it is true for NaN.
    if magnitudes.device.type != "cpu":
        picked = magnitudes.lt(threshold).logical_not_().nonzero().squeeze(1)
        return picked, not bool(magnitudes[picked].isfinite().all())
    # numpy compares and searches several times faster than torch.
    array = magnitudes.numpy()
    below = np.less(array, array.dtype.type(threshold))
    found = np.flatnonzero(np.logical_not(below, out=below))
    return torch.from_numpy(found), not np.isfinite(array[found]).all()
