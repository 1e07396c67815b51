"""What every kernel returns, and the contract that all of them keep to the last bit.

A kernel takes ``select(gradient, residual, segments, thresholds, gradient_scale)``:

    gradient        shape [n], any floating dtype: the flattened bucket; not changed
    residual        shape [n], fp32 or fp64, finite; changed in place
    segments        ascending ranges (start, stop) of the bucket, one for each compressed tensor
    thresholds      one positive threshold for each segment
    gradient_scale  factor on the gradient: one over the loss scale of mixed-precision training

and leaves ``residual + gradient_scale * gradient`` (product and sum each rounded once, in the residual's dtype) in the
residual of the segments; what is sent has still to be taken out of it. It picks the entries whose magnitude is not
below their segment's threshold, in ascending order. Where the sum is infinite or NaN the old residual stays and the
entry is picked in any case, so that the caller sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


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


Kernel = Callable[[Tensor, Tensor, Sequence[tuple[int, int]], Sequence[float], float], Selection]


def nothing(residual: Tensor, counts: list[int]) -> Selection:
    """The selection from no segments, or from empty ones."""
    return Selection(residual.new_empty(0).long(), residual.new_empty(0), counts)
