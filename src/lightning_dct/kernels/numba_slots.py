"""The search of :class:`~lightning_dct.embedding.cache.SlotIndex`, row by row, compiled by numba (extra ``fast``).

``table``, of ``2 ** (64 - shift)`` entries, has slots, or -1 where it is free. A row is looked for from its home on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True, error_model="numpy")
def find(table: Any, shift: int, rows: Any, row_at: Any, slots: Any) -> None:
    """Write the slots of rows, -1 for missing rows, to ``slots``."""
    for i in range(rows.size):
        place = np.int64((np.uint64(rows[i]) * GOLDEN) >> np.uint64(shift))
        while table[place] >= 0 and row_at[table[place]] != rows[i]:
            place = (place + 1) & (table.size - 1)
        slots[i] = table[place]


@njit(nogil=True, cache=True, error_model="numpy")
def put(table: Any, shift: int, rows: Any, slots: Any) -> None:
    """Insert new rows in these slots."""
    for i in range(rows.size):
        place = np.int64((np.uint64(rows[i]) * GOLDEN) >> np.uint64(shift))
        while table[place] >= 0:
            place = (place + 1) & (table.size - 1)
        table[place] = slots[i]
