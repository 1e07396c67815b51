"""Finds distinct ids and the slots of rows, compiled for this CPU by numba (extra ``fast``).

:mod:`lightning_dct.embedding.cache` and :mod:`lightning_dct.embedding.bags` have the same in numpy,
with the same results.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Bits that a pass of the radix sort looks at.
DIGIT = 11


def distinct(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``np.unique(keys, return_inverse=True)`` of keys from 0, ``[n]``."""
    if not keys.size:
        return keys, np.empty(0, np.int64)
    largest = int(keys.max())
    order, ascending = _sorted(keys, max(-(-largest.bit_length() // DIGIT), 1))
    return _numbered(order, ascending)


@njit(nogil=True, cache=True)
def _sorted(keys: Any, passes: int) -> Any:
    """Radix sort: the order of keys, and they in it."""
    order = np.arange(keys.size, dtype=np.int32)
    ascending = keys.copy()
    next_order = np.empty_like(order)
    next_keys = np.empty_like(ascending)
    for number in range(passes):
        shift = number * DIGIT
        starts = np.zeros((1 << DIGIT) + 1, dtype=np.int64)
        for key in ascending:
            starts[((key >> shift) & ((1 << DIGIT) - 1)) + 1] += 1
        for digit in range(1 << DIGIT):
            starts[digit + 1] += starts[digit]
        for i in range(keys.size):
            key = ascending[i]
            digit = (key >> shift) & ((1 << DIGIT) - 1)
            at = starts[digit]
            starts[digit] = at + 1
            next_keys[at] = key
            next_order[at] = order[i]
        order, next_order = next_order, order
        ascending, next_keys = next_keys, ascending
    return order, ascending


@njit(nogil=True, cache=True)
def _numbered(order: Any, ascending: Any) -> Any:
    found = np.empty_like(ascending)
    inverse = np.empty(ascending.size, dtype=np.int64)
    count = 0
    for i in range(ascending.size):
        if i == 0 or ascending[i] != ascending[i - 1]:
            found[count] = ascending[i]
            count += 1
        inverse[order[i]] = count - 1
    return found[:count].copy(), inverse


@njit(nogil=True, cache=True)
def find(table: Any, homes: Any, row_at: Any, peer_at: Any, rows: Any, peers: Any) -> Any:
    """The slots of rows, ``[k]``, -1 for missing rows: of a hash table with linear probing, whose
    size is a power of two. ``peers`` and ``peer_at`` are empty if rows have no peers.
    """
    slots = np.empty(rows.size, dtype=np.int64)
    for i in range(rows.size):
        at = homes[i]
        while True:
            slot = table[at]
            if slot < 0 or (
                row_at[slot] == rows[i] and (peers.size == 0 or peer_at[slot] == peers[i])
            ):
                break
            at = (at + 1) & (table.size - 1)
        slots[i] = slot
    return slots


@njit(nogil=True, cache=True)
def put(table: Any, homes: Any, slots: Any) -> None:
    """Insert slots, ``[k]``, into the hash table."""
    for i in range(slots.size):
        at = homes[i]
        while table[at] >= 0:
            at = (at + 1) & (table.size - 1)
        table[at] = slots[i]
