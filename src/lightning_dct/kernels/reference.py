"""Select and compact in plain torch, a cache-sized chunk at a time.

Naive torch walks all of memory once per operation. Walking chunk by chunk keeps the intermediate results in the
processor's cache, so memory is read and written about once: three times faster on tensors of millions of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.wire.bits import places

CHUNK = 1 << 17
# On a GPU a chunk costs a kernel launch and memory is fast: one piece is best.
GPU_CHUNK = 1 << 62


class Selection(NamedTuple):
    """The entries whose magnitude reaches their tensor's threshold.

    Attributes:
        positions: Shape ``[count]``, int64: ascending places in the flattened bucket.
        values: Shape ``[count]``, the residual's dtype: gradient plus residual there, not necessarily finite.
        counts: For each segment, how many of them lie in it.
    """

    positions: Tensor
    values: Tensor
    counts: list[int]


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float = 1.0,
) -> Selection:
    """Add the gradient to the residual and pick the entries at or above the threshold.

    Afterwards ``residual`` holds ``residual + gradient_scale * gradient`` within the segments (what is sent has still
    to be taken out of it), except that entries where this is infinite or NaN keep their old residual. Those entries
    are always picked, so that they reach the caller.

    Args:
        gradient: Shape ``[n]``, any floating dtype: the flattened bucket. Not changed.
        residual: Shape ``[n]``, fp32 or fp64, finite. Changed in place.
        segments: Ascending ranges ``(start, stop)`` of the bucket, one for each compressed tensor.
        thresholds: One positive threshold for each segment.
        gradient_scale: Factor on the gradient: one over the loss scale of mixed-precision training.
    """
    chunk = CHUNK if gradient.device.type == "cpu" else GPU_CHUNK
    positions, values, counts = [], [], []
    for (start, stop), threshold in zip(segments, thresholds, strict=True):
        count = 0
        for low in range(start, stop, chunk):
            high = min(low + chunk, stop)
            old = residual[low:high]
            accumulated = torch.add(old, gradient[low:high].to(old.dtype), alpha=gradient_scale)
            # "Not below" instead of "at or above": it is true for NaN.
            picked = places(accumulated.abs().lt(threshold).logical_not_())
            picked_values = accumulated[picked]
            finite = picked_values.isfinite()
            if not bool(finite.all()):
                nonfinite = picked[~finite]
                accumulated[nonfinite] = old[nonfinite]
            old.copy_(accumulated)
            positions.append(picked.add_(low))
            values.append(picked_values)
            count += picked.numel()
        counts.append(count)
    if not positions:
        return Selection(gradient.new_empty(0, dtype=torch.int64), residual.new_empty(0), counts)
    return Selection(torch.cat(positions), torch.cat(values), counts)
