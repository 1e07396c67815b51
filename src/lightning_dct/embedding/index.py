"""Where a row is kept: a hash table over slots, searched and filled for whole arrays of rows at a time.

The table holds slots alone; the row at a slot says whether it is the one that is sought. So nothing has to be taken out
when a row is evicted: its entry leads to a slot with another row, and the search goes on. Entries are cleared, and room
is made, when the table is half full, so an insertion costs the same however many rows there are.
"""

from __future__ import annotations

import numpy as np

from lightning_dct.embedding.placement import Int64Array

# Of multiplicative hashing: 2 ** 64 over the golden ratio, odd (Knuth, The Art of Computer Programming, vol. 3, 6.4).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SMALLEST_BITS = 6


class SlotIndex:
    """Finds slots by rows.

    Args:
        row_at: Shape ``[slots]``: the rows there are now, -1 where a slot is free.
    """

    def __init__(self, row_at: Int64Array) -> None:
        self._fill(row_at)

    def find(self, rows: Int64Array, row_at: Int64Array) -> Int64Array:
        """The slots of rows (shape ``[k]``), -1 where there is none."""
        slots = np.full(rows.size, -1, dtype=np.int64)
        if not row_at.size:
            return slots
        places, sought = self._homes(rows), np.arange(rows.size)
        while sought.size:
            found = self._table[places]
            used = found >= 0
            right = used & (row_at[found] == rows[sought])
            slots[sought[right]] = found[right]
            on = used & ~right
            places, sought = (places[on] + 1) & (self._table.size - 1), sought[on]
        return slots

    def insert(self, rows: Int64Array, slots: Int64Array, row_at: Int64Array) -> None:
        """Note where rows are that were not there before, shape ``[k]`` each; ``row_at`` says so already."""
        if 2 * (self._entries + rows.size) > self._table.size:
            self._fill(row_at)
        else:
            self._put(rows, slots)

    def _fill(self, row_at: Int64Array) -> None:
        slots = np.flatnonzero(row_at >= 0)
        self._bits = max(_SMALLEST_BITS, (4 * slots.size).bit_length())
        self._table = np.full(1 << self._bits, -1, dtype=np.int64)
        self._entries = 0
        self._put(row_at[slots], slots)

    def _put(self, rows: Int64Array, slots: Int64Array) -> None:
        self._entries += rows.size
        places = self._homes(rows)
        while slots.size:
            free = self._table[places] < 0
            self._table[places[free]] = slots[free]
            # Of several that want one place, one has it now.
            on = self._table[places] != slots
            places, slots = (places[on] + 1) & (self._table.size - 1), slots[on]

    def _homes(self, rows: Int64Array) -> Int64Array:
        return ((rows.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - self._bits)).astype(np.int64)
