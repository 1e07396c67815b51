"""The loops of :mod:`lightning_dct.kernels.plain`, compiled for this CPU by numba (extra ``fast``).

Selecting reads the weights once, and adding the mean reads and writes them once. All else works on what is sent: flags,
64 to a word, and values. A loop over the set flags of a word costs as little as the flags are few, and needs no
temporary tensor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lightning_dct.kernels.numba_words import (
    ONE,
    WORD,
    flags_before,
    prefetch,
    set_window,
    trailing_zeros,
    window,
    words_of,
)
from lightning_dct.kernels.plain import Selection, Sent

# Entries that fit the first-level cache.
BLOCK = 1024
# Bytes that the memory delivers at once.
LINE = 64
# With fewer entries a second thread costs more than it saves.
ENTRIES_PER_THREAD = 1 << 18
# Multiplied with eight bytes of 0 or 1, this collects them in the highest byte.
GATHER = np.uint64(0x0102040810204080)

Result = TypeVar("Result")


class _Piece(NamedTuple):
    """Entries ``start`` to ``stop`` of a tensor; the first has the flag number ``bit``."""

    tensor: int
    start: int
    stop: int
    bit: int


def select(
    news: Sequence[Tensor],
    bases: Sequence[Tensor],
    first: Sequence[int],
    thresholds: Sequence[float],
    scale: float | None,
    flags: Tensor,
) -> Selection:
    """See :func:`lightning_dct.kernels.plain.select`."""
    words, nothing = words_of(flags), bases[0][:0] if bases else torch.empty(0)
    dtype = nothing.numpy().dtype
    # numba does not support bfloat16.
    arrays = [(new.to(base.dtype).numpy(), base.numpy()) for new, base in zip(news, bases, strict=True)]
    limits = [dtype.type(threshold) for threshold in thresholds]

    def select_pieces(pieces: list[_Piece]) -> tuple[Tensor, list[int]]:
        found = _scratch(sum([stop - start for _, start, stop, _ in pieces]), nothing.dtype)
        values, count, counts = found.numpy(), 0, []
        for tensor, start, stop, bit in pieces:
            new, base = arrays[tensor][0][start:stop], arrays[tensor][1][start:stop]
            if scale is None:
                stopped = _select_difference(new, base, limits[tensor], words, bit, values, count)
            else:
                stopped = _select_sum(new, base, dtype.type(scale), limits[tensor], words, bit, values, count)
            counts.append(stopped - count)
            count = stopped
        # A helping thread may take another share and then use its array again.
        return found[:count] if pieces is shares[0] else found[:count].clone(), counts

    shares, found, counts = _shares(news, first), [nothing], [0] * len(news)
    for share, (values, reached) in zip(shares, _in_threads(select_pieces, shares), strict=True):
        found.append(values)
        for piece, count in zip(share, reached, strict=True):
            counts[piece.tensor] += count
    return Selection(found[-1] if len(found) <= 2 else torch.cat(found), counts)


def thin(flags: Tensor, begin: int, size: int, values: Tensor, target: int, limit: float) -> Tensor:
    """See :func:`lightning_dct.kernels.plain.thin`."""
    array = values.numpy()
    return values[: _thin(words_of(flags), begin, size, array, target, array.dtype.type(limit))]


def subtract(tensors: Sequence[Tensor], first: Sequence[int], sent: Sent) -> None:
    """See :func:`lightning_dct.kernels.plain.subtract`."""
    words, values = words_of(sent.flags)[0], sent.values.numpy()

    def subtract_pieces(pieces: list[_Piece]) -> None:
        cursor = flags_before(words, pieces[0].bit)
        for tensor, start, stop, bit in pieces:
            cursor = _subtract(tensors[tensor].numpy()[start:stop], words, bit, values, cursor)

    _in_threads(subtract_pieces, _shares(tensors, first))


def decay(news: Sequence[Tensor], bases: Sequence[Tensor], first: Sequence[int], sent: Sent, lost: float) -> None:
    """See :func:`lightning_dct.kernels.plain.decay`."""
    words, values = words_of(sent.flags)[0], sent.values.numpy()

    def decay_pieces(pieces: list[_Piece]) -> None:
        cursor = flags_before(words, pieces[0].bit)
        for tensor, start, stop, bit in pieces:
            new, base = news[tensor].numpy()[start:stop], bases[tensor].numpy()[start:stop]
            cursor = _decay(new, base, new.dtype.type(lost), words, bit, values, cursor)

    _in_threads(decay_pieces, _shares(news, first))


def add_sums(
    totals: Sequence[Tensor],
    owns: Sequence[Tensor] | None,
    first: Sequence[int],
    sent: Sent,
    weights: Tensor,
    mine: int = -1,
) -> None:
    """See :func:`lightning_dct.kernels.plain.add_sums`."""
    words, values = words_of(sent.flags), sent.values.numpy()
    starts = np.array([*accumulate(sent.counts, initial=0)][:-1], np.int64)
    by_count, nothing = weights.numpy(), weights.numpy()[:0]

    def add_pieces(pieces: list[_Piece]) -> None:
        cursors = starts + np.array([flags_before(row, pieces[0].bit) for row in words])
        for tensor, start, stop, bit in pieces:
            total = totals[tensor].numpy()[start:stop]
            own_weights = nothing if owns is None else owns[tensor].numpy()[start:stop]
            _add_sums(total, own_weights, words, bit, values, cursors, mine, by_count)

    _in_threads(add_pieces, _shares(totals, first))


_scratch_tensors = threading.local()


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor that a thread reuses, of ``count`` entries or more."""
    # The system maps pages only when they are written, and few are. A new tensor would have it clear them in each call.
    tensor = vars(_scratch_tensors).get(str(dtype))
    if tensor is None or tensor.numel() < count:
        tensor = vars(_scratch_tensors)[str(dtype)] = torch.empty(count, dtype=dtype)
    return tensor


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _collect(reached: Any, block: Any, length: int, words: Any, bit: int, values: Any, count: int) -> int:
    """Set the flags of a block, given as bytes of 0 or 1, and append its flagged entries to the values."""
    eights = reached.view(np.uint64)
    reached[length:] = 0
    for start in range(0, length, 64):
        flags = np.uint64(0)
        for byte in range(8):
            flags |= ((eights[start // 8 + byte] * GATHER) >> np.uint64(56)) << np.uint64(8 * byte)
        if flags:
            set_window(words, bit + start, flags)
        while flags:
            values[count] = block[start + trailing_zeros(flags)]
            flags &= flags - ONE
            count += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _select_difference(new: Any, base: Any, limit: Any, words: Any, bit: int, values: Any, count: int) -> int:
    block, reached = np.empty(BLOCK, base.dtype), np.empty(BLOCK, np.uint8)
    for start in range(0, new.size, BLOCK):
        # Indices into slices start at zero, so the compiler knows that none is negative.
        ours, theirs = new[start : start + BLOCK], base[start : start + BLOCK]
        for i in range(ours.size):
            block[i] = ours[i] - theirs[i]
            # "Not below" instead of "at or above", because it is true for NaN.
            reached[i] = not (abs(block[i]) < limit)
        count = _collect(reached, block, ours.size, words, bit + start, values, count)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _select_sum(new: Any, base: Any, scale: Any, limit: Any, words: Any, bit: int, values: Any, count: int) -> int:
    old, block, reached = np.empty(BLOCK, base.dtype), np.empty(BLOCK, base.dtype), np.empty(BLOCK, np.uint8)
    for start in range(0, new.size, BLOCK):
        addends, sums, before = new[start : start + BLOCK], base[start : start + BLOCK], count
        for i in range(addends.size):
            old[i] = sums[i]
            block[i] = old[i] + scale * addends[i]
            sums[i] = block[i]
            reached[i] = not (abs(block[i]) < limit)
        count = _collect(reached, block, addends.size, words, bit + start, values, count)
        broken = False
        for number in range(before, count):
            broken |= not np.isfinite(values[number])
        if broken:
            for i in range(addends.size):
                if not np.isfinite(block[i]):
                    sums[i] = old[i]
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _thin(words: Any, begin: int, size: int, values: Any, target: int, limit: Any) -> int:
    large = 0
    for number in range(values.size):
        large += not abs(values[number]) < limit
    # Of `large` entries number n is left if n * wanted // large is another number than for the one before it.
    cursor, count, remainder, wanted = 0, 0, 0, min(target, large)
    for bit in range(begin, begin + size, 64):
        flags = window(words, bit, begin + size - bit)
        while flags:
            lowest = flags & (~flags + ONE)
            flags ^= lowest
            is_large = not abs(values[cursor]) < limit
            remainder += wanted * is_large
            if is_large and remainder >= large:
                remainder -= large
                values[count] = values[cursor]
                count += 1
            else:
                place = bit + np.int64(trailing_zeros(lowest))
                words[place >> 6] ^= ONE << (np.uint64(place) & WORD)
            cursor += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _subtract(tensor: Any, words: Any, bit: int, values: Any, cursor: int) -> int:
    for start in range(0, tensor.size, 64):
        part = tensor[start : start + 64]
        flags = window(words, bit + start, part.size)
        while flags:
            i = trailing_zeros(flags)
            flags &= flags - ONE
            left = part[i] - values[cursor]
            if np.isfinite(left):
                part[i] = left
            cursor += 1
    return cursor


@njit(nogil=True, cache=True, error_model="numpy")
def _decay(new: Any, base: Any, lost: Any, words: Any, bit: int, values: Any, cursor: int) -> int:
    left = np.empty(64, new.dtype)
    for start in range(0, new.size, 64):
        ours, theirs = new[start : start + 64], base[start : start + 64]
        flags = window(words, bit + start, ours.size)
        for i in range(ours.size):
            left[i] = ours[i] - theirs[i]
        while flags:
            left[trailing_zeros(flags)] -= values[cursor]
            flags &= flags - ONE
            cursor += 1
        for i in range(ours.size):
            ours[i] -= lost * left[i]
    return cursor


@njit(nogil=True, cache=True, error_model="numpy")
def _add_sums(total: Any, own: Any, words: Any, bit: int, values: Any, cursors: Any, mine: int, weights: Any) -> None:
    sums, senders, summed = np.zeros(64, total.dtype), np.zeros(64, np.int64), weights.size - 1
    for start in range(0, total.size, 64):
        part, ours = total[start : start + 64], own[start : start + 64]
        union = np.uint64(0)
        # With few flags the processor does not see that lines follow one another, and would wait for each.
        for entry in range(start + BLOCK, start + BLOCK + 64, LINE // total.itemsize):
            prefetch(total, entry)
            if own.size:
                prefetch(own, entry)
        for sender in range(words.shape[0]):
            flags, cursor = window(words[sender], bit + start, part.size), cursors[sender]
            if sender < summed:
                union |= flags
            while flags:
                i = trailing_zeros(flags)
                flags &= flags - ONE
                value = values[cursor]
                cursor += 1
                if sender == mine and (sender < summed or sums[i] != 0):
                    ours[i] -= value
                if sender < summed:
                    sums[i] += value
                    senders[i] += value != 0
            cursors[sender] = cursor
        while union:
            i = trailing_zeros(union)
            union &= union - ONE
            mean = weights[senders[i]] * sums[i]
            part[i] += mean
            if ours.size:
                ours[i] += mean
            sums[i], senders[i] = 0, 0


def _shares(tensors: Sequence[Tensor], first: Sequence[int]) -> list[list[_Piece]]:
    """Divide tensors among threads, about the same number of entries each. No two threads share a word of flags."""
    entries = sum(map(Tensor.numel, tensors))
    share = max(-(-entries // torch.get_num_threads()), ENTRIES_PER_THREAD)
    shares: list[list[_Piece]] = []
    pieces: list[_Piece] = []
    capacity = share
    for number, (tensor, begin) in enumerate(zip(tensors, first, strict=True)):
        start, size = 0, tensor.numel()
        while start < size:
            # Rounded up to a whole word.
            stop = min(size, start + capacity + -(begin + start + capacity) % 64)
            pieces.append(_Piece(number, start, stop, begin + start))
            capacity -= stop - start
            start = stop
            if capacity <= 0 and (begin + start) % 64 == 0:
                shares.append(pieces)
                pieces, capacity = [], share
            capacity = max(capacity, 1)
    return [*shares, pieces] if pieces else shares


def _in_threads(work: Callable[[list[_Piece]], Result], shares: list[list[_Piece]]) -> list[Result]:
    helping = [_threads(os.getpid()).submit(work, share) for share in shares[1:]] if len(shares) > 1 else []
    return [*map(work, shares[:1]), *map(Future.result, helping)]


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process, by its id, because forks do not inherit their parent's threads."""
    return ThreadPoolExecutor(max_workers=max(torch.get_num_threads(), os.cpu_count() or 1), thread_name_prefix="dct")
