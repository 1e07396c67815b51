"""Which row of an embedding table a category value gets: counts values, orders them by frequency, looks them up.

Frequent values come first: what compresses embeddings later on likes small ids to be the hot ones. The memory taken is
bounded by the number of distinct values, never by the number of rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MISSING_ID = 0
RARE_ID = 1
"""Stands for values that were cut off as too rare, and for those never seen in training."""
NUM_RESERVED = 2

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

_HALF = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)
_MIN_PENDING = 2**20


def _starts(ordered: npt.NDArray) -> npt.NDArray[np.int64]:
    """Say where each run of equal entries begins."""
    is_start = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def _sum_counts(packed: UInt64Array) -> UInt64Array:
    """Sort words ``value << 32 | count`` in place and add up the counts of equal values."""
    packed.sort()
    values = packed >> _HALF
    starts = _starts(values)
    return (values[starts] << _HALF) | np.add.reduceat(packed & _LOW_HALF, starts)


class ValueCounter:
    """Counts how often each 32-bit value comes, fewer than 2**32 values in all.

    What is added is counted by itself first, and merged into the total only once there is as much of it as of the
    total: merging takes time in proportion to the values added, and at its peak about 50 bytes a distinct value.
    """

    def __init__(self) -> None:
        self._total = np.empty(0, dtype=np.uint64)
        self._pending: list[UInt64Array] = []
        self._num_pending = 0

    def add(self, values: UInt32Array) -> None:
        """Count some more values ``[n]``."""
        ordered = np.sort(values)
        starts = _starts(ordered)
        counts = np.diff(starts, append=len(ordered)).astype(np.uint64)
        self._pending.append(ordered[starts].astype(np.uint64) << _HALF | counts)
        self._num_pending += len(starts)
        if self._num_pending >= max(_MIN_PENDING, len(self._total)):
            self._merge()

    def _merge(self) -> None:
        joined = np.concatenate([self._total, *self._pending])
        self._pending.clear()
        self._num_pending = 0
        self._total = joined[:0]
        self._total = _sum_counts(joined)

    def result(self) -> tuple[UInt32Array, UInt32Array]:
        """Give the distinct values in ascending order, and their counts: uint32 ``[v]`` each."""
        self._merge()
        return (self._total >> _HALF).astype(np.uint32), (self._total & _LOW_HALF).astype(np.uint32)


def choose_values(values: UInt32Array, counts: UInt32Array, min_count: int, max_rows: int | None) -> UInt32Array:
    """Choose the values that get a table row of their own, and order them.

    Args:
        values: Distinct values ``[v]``.
        counts: How often each comes, ``[v]``.
        min_count: Values that come less often get none.
        max_rows: The most rows the table may have, the reserved ones included; None for no bound.

    Returns:
        uint32 ``[kept]``, the most frequent first, equally frequent ones by value: entry ``i`` gets the id ``i + 2``.

    Example:
        >>> choose_values(np.uint32([3, 5, 7, 9]), np.uint32([1, 2, 8, 2]), min_count=2, max_rows=None)
        array([7, 5, 9], dtype=uint32)
    """
    frequent = counts >= min_count
    keys = ((_LOW_HALF - counts[frequent].astype(np.uint64)) << _HALF) | values[frequent]
    keys.sort()
    kept = len(keys) if max_rows is None else max(0, min(len(keys), max_rows - NUM_RESERVED))
    return (keys[:kept] & _LOW_HALF).astype(np.uint32)


class Vocabulary:
    """Looks up ids of one table; takes 8 bytes a value.

    Args:
        values: Values with a row of their own in the order of their ids, as :func:`choose_values` gives them.
    """

    def __init__(self, values: UInt32Array) -> None:
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._ids = (order + NUM_RESERVED).astype(np.int32)

    def __len__(self) -> int:
        """Rows of the table, the reserved ones included."""
        return len(self._values) + NUM_RESERVED

    def look_up(self, values: UInt32Array, missing: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """Give the ids ``[n]`` of fewer than 2**32 values ``[n]``, those ``missing`` ``[n]`` included."""
        ids = np.full(len(values), RARE_ID, dtype=np.int32)
        if len(self._values):
            # Each distinct value once and in ascending order: neighbouring searches walk the same cache lines.
            packed = values.astype(np.uint64) << _HALF | np.arange(len(values), dtype=np.uint64)
            packed.sort()
            ordered = (packed >> _HALF).astype(np.uint32)
            starts = _starts(ordered)
            wanted = ordered[starts]
            places = np.minimum(np.searchsorted(self._values, wanted), len(self._values) - 1)
            found = np.where(self._values[places] == wanted, self._ids[places], np.int32(RARE_ID))
            ids[packed & _LOW_HALF] = np.repeat(found, np.diff(starts, append=len(ordered)))
        ids[missing] = MISSING_ID
        return ids
