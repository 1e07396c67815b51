"""Finds distinct ids and the slots of rows, compiled for this CPU by numba (extra ``fast``).

:mod:`lightning_dct.embedding.cache` and :mod:`lightning_dct.embedding.bags` have the same in numpy,
with the same results.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lightning_dct.kernels.numba_cpu import ONE, WORD, ones, trailing_zeros, window
from lightning_dct.kernels.numba_rows import GOLDEN

# Bits that a pass of the radix sort looks at.
DIGIT = 11
# A bit for each possible key is faster than a sort, up to so many bits a key.
MOST_BITS = 1 << 10
# Of the hash of a row, as in :mod:`lightning_dct.embedding.cache`.
PEER_FACTOR = np.uint64(0xD6E8FEB86659FD93)


@njit(nogil=True, cache=True)
def are_inside(rows: Any, tables: Any, last: Any) -> bool:
    """Whether each row, ``[n]``, is from 0 to the last one of its table."""
    inside = True
    for i in range(rows.size):
        inside &= 0 <= rows[i] <= last[tables[i]]
    return inside


def distinct(
    keys: NDArray[np.int64], number: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``np.unique(keys, return_inverse=True)`` of keys from 0, ``[n]``, below ``number`` if it is
    known.
    """
    if not keys.size:
        return keys, np.empty(0, np.int64)
    if number is not None and number <= MOST_BITS * keys.size:
        return _marked(keys, number)
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
def _marked(keys: Any, number: int) -> Any:
    """The distinct keys, ascending, and the number of each key among them, by a bit for each
    possible key.
    """
    marks = np.zeros(number // 64 + 1, dtype=np.uint64)
    for key in keys:
        marks[key >> 6] |= ONE << (np.uint64(key) & WORD)
    before = np.empty(marks.size, dtype=np.int32)
    found = np.empty(keys.size, dtype=np.int64)
    count = 0
    for word in range(marks.size):
        before[word] = count
        bits = marks[word]
        while bits:
            found[count] = 64 * word + np.int64(trailing_zeros(bits))
            bits &= bits - ONE
            count += 1
    inverse = np.empty(keys.size, dtype=np.int64)
    for i in range(keys.size):
        key = keys[i]
        lower = (ONE << (np.uint64(key) & WORD)) - ONE
        inverse[i] = before[key >> 6] + ones(marks[key >> 6] & lower)
    return found[:count].copy(), inverse


@njit(nogil=True, cache=True, inline="always")
def _home(row: Any, peer: Any, bits: Any) -> Any:
    return ((np.uint64(row) ^ np.uint64(peer) * PEER_FACTOR) * GOLDEN) >> np.uint64(64 - bits)


@njit(nogil=True, cache=True)
def find(table: Any, bits: int, row_at: Any, peer_at: Any, rows: Any, peers: Any) -> Any:
    """The slots of rows, ``[k]``, -1 for missing rows: of a hash table with linear probing, whose
    size is a power of two. ``peers`` and ``peer_at`` are empty if rows have no peers.
    """
    slots = np.empty(rows.size, dtype=np.int64)
    has_peers = peers.size > 0
    for i in range(rows.size):
        row = rows[i]
        peer = peers[i] if has_peers else 0
        at = np.int64(_home(row, peer, bits))
        while True:
            slot = table[at]
            if slot < 0 or (row_at[slot] == row and (not has_peers or peer_at[slot] == peer)):
                break
            at = (at + 1) & (table.size - 1)
        slots[i] = slot
    return slots


@njit(nogil=True, cache=True)
def put(table: Any, bits: int, row_at: Any, peer_at: Any, slots: Any) -> None:
    """Insert slots, ``[k]``, with their rows into the hash table."""
    for i in range(slots.size):
        slot = slots[i]
        at = np.int64(_home(row_at[slot], peer_at[slot] if peer_at.size else 0, bits))
        while table[at] >= 0:
            at = (at + 1) & (table.size - 1)
        table[at] = slot


@njit(nogil=True, cache=True)
def note(last_used: Any, counts: Any, slots: Any, time: int) -> int:
    """Note a request at this time in slots, ``[k]``, and return how many are missing: -1."""
    missing = 0
    for i in range(slots.size):
        slot = slots[i]
        if slot < 0:
            missing += 1
        else:
            last_used[slot] = time
            counts[slot] += 1
    return missing


@njit(nogil=True, cache=True)
def grouped(rows: Any, groups: Any, numbers: Any, num_groups: int, places: Any) -> Any:
    """As :func:`lightning_dct.embedding.messages._grouped`."""
    group = np.empty(places.size, dtype=np.int64)
    number = np.empty(places.size, dtype=np.int64)
    counts = np.zeros(num_groups, dtype=np.int64)
    low = 0
    for i in range(places.size):
        place = places[i]
        # Both ascend, so the search goes on from where the last one ended, in steps that double.
        step = 1
        while low + step < rows.size and rows[low + step] < place:
            low += step
            step *= 2
        high = min(low + step, rows.size)
        while low < high:
            middle = (low + high) >> 1
            if rows[middle] < place:
                low = middle + 1
            else:
                high = middle
        if low < rows.size and rows[low] == place:
            group[i] = groups[low]
            number[i] = numbers[low]
        else:
            group[i] = num_groups - 1
            number[i] = place
        counts[group[i]] += 1
    starts = np.zeros(num_groups, dtype=np.int64)
    for one in range(1, num_groups):
        starts[one] = starts[one - 1] + counts[one - 1]
    found = np.empty(places.size, dtype=np.int64)
    for i in range(places.size):
        found[starts[group[i]]] = number[i]
        starts[group[i]] += 1
    return found, counts


@njit(nogil=True, cache=True)
def merged(rows: Any, order: Any, starts: Any, numbers: Any, ends: Any) -> Any:
    """As :func:`lightning_dct.embedding.messages._merged`."""
    marks = np.zeros(rows.size // 64 + 1, dtype=np.uint64)
    for group in range(ends.size - 2):
        for i in range(ends[group], ends[group + 1]):
            row = order[starts[group] + numbers[i]]
            marks[row >> 6] |= ONE << (np.uint64(row) & WORD)
    found = np.empty(numbers.size, dtype=np.int64)
    count = 0
    other = ends[-2]
    for word in range(marks.size):
        bits = marks[word]
        while bits:
            place = rows[64 * word + np.int64(trailing_zeros(bits))]
            bits &= bits - ONE
            while other < numbers.size and numbers[other] < place:
                found[count] = numbers[other]
                other += 1
                count += 1
            found[count] = place
            count += 1
    found[count:] = numbers[other:]
    return found


@njit(nogil=True, cache=True)
def write_codes(words: Any, table: Any, numbers: Any) -> None:
    """Write positions in the code of :mod:`lightning_dct.wire.positions`, one group after the
    other, into words that are zero. The table has for each group: the bit at which its code
    begins, its last possible position, the number of positions, and the numbers of flags, 0 without
    a code, and of low bits.
    """
    first = 0
    for group in range(table.shape[0]):
        begin = table[group, 0]
        count = table[group, 2]
        num_flags = table[group, 3]
        low_bits = table[group, 4]
        for i in range(count if num_flags else 0):
            position = numbers[first + i]
            place = begin + (position if low_bits == 0 else (position >> low_bits) + i)
            words[place >> 6] |= ONE << (np.uint64(place) & WORD)
            place = begin + num_flags + i
            for plane in range(low_bits):
                bit = np.uint64((position >> plane) & 1)
                words[place >> 6] |= bit << (np.uint64(place) & WORD)
                place += count
        first += count


@njit(nogil=True, cache=True)
def read_codes(words: Any, table: Any, numbers: Any) -> Any:
    """Undo :func:`write_codes`.

    Returns:
        Of each group, how many positions are marked, less than zero if they do not ascend up to
        the last possible one. If that is another number than there should be, what is read is
        undefined.
    """
    found = np.zeros(table.shape[0], dtype=np.int64)
    first = 0
    for group in range(table.shape[0]):
        begin = table[group, 0]
        end = table[group, 1]
        count = table[group, 2]
        num_flags = table[group, 3]
        low_bits = table[group, 4]
        if num_flags == 0:
            for i in range(count):
                numbers[first + i] = i
            found[group] = count
            first += count
            continue
        marked = 0
        last = np.int64(-1)
        ascends = True
        for start in range(begin, begin + num_flags, 64):
            flags = window(words, start, begin + num_flags - start)
            while flags:
                position = start - begin + np.int64(trailing_zeros(flags))
                flags &= flags - ONE
                if marked < count:
                    if low_bits:
                        position = (position - marked) << low_bits
                        place = begin + num_flags + marked
                        for plane in range(low_bits):
                            bit = (words[place >> 6] >> (np.uint64(place) & WORD)) & ONE
                            position |= np.int64(bit) << plane
                            place += count
                    ascends &= last < position <= end
                    numbers[first + marked] = position
                    last = position
                marked += 1
        found[group] = marked if ascends else -marked
        first += count
    return found
