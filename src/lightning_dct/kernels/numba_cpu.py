"""Selects and sums in one pass over memory, compiled for this CPU by numba (extra ``fast``).

Each block that fits the first-level cache is read twice. The first loop writes the sums, one flag an entry, and a copy
of the old residual in case a sum is infinite or NaN. It has no branches and compiles to vector instructions. The second
loop reads the flags, eight at a time; at 1% density 92% of these words are zero.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lightning_dct.kernels.reference import Selection, weights_by_senders

BLOCK = 1024
# With fewer entries a second thread costs more than it saves.
ENTRIES_PER_THREAD = 1 << 18
LARGEST_INT32 = np.iinfo(np.int32).max

Result = TypeVar("Result")


class _Piece(NamedTuple):
    """Entries ``start`` to ``stop`` of a segment."""

    segment: int
    start: int
    stop: int


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    gradient_scale: float = 1.0,
) -> Selection:
    """Select on as many threads as torch has; see :mod:`lightning_dct.kernels.reference`."""
    if len(thresholds) != len(segments):
        raise ValueError(f"{len(thresholds)} thresholds for {len(segments)} segments")
    sums = residual.numpy()
    # numba does not support bfloat16.
    addends = gradient.to(residual.dtype).numpy()
    limits = np.array(thresholds, dtype=sums.dtype)
    scale = sums.dtype.type(gradient_scale)

    def select_pieces(pieces: list[_Piece]) -> tuple[Tensor, Tensor, NDArray[Any]]:
        positions, values = _scratch(sum(piece.stop - piece.start for piece in pieces), sums.size, sums.dtype)
        counts = np.empty(len(pieces), np.int64)
        count = _select(addends, sums, np.array(pieces, np.int64), limits, scale, positions, values, counts)
        return torch.tensor(positions[:count], dtype=torch.int64), torch.tensor(values[:count]), counts

    shares = list(_shares(segments, torch.get_num_threads()))
    positions, values, counts = [residual.new_empty(0).long()], [residual.new_empty(0)], [0] * len(segments)
    for share, (places, found, reached) in zip(shares, _in_threads(select_pieces, shares), strict=True):
        positions.append(places)
        values.append(found)
        for piece, count in zip(share, reached.tolist(), strict=True):
            counts[piece.segment] += count
    return Selection(torch.cat(positions), torch.cat(values), counts)


def sum_entries(
    total: Tensor,
    segments: Sequence[tuple[int, int]],
    entries: Sequence[tuple[Tensor, Tensor]],
    factor: float,
    by_senders: bool = False,
) -> None:
    """See :func:`lightning_dct.kernels.sum_entries`. A block is cleared and filled while it is in the cache."""
    if not entries:
        for start, stop in segments:
            total[start:stop].zero_()
        return
    sums = total.numpy()
    positions = [part.numpy() for part, _ in entries]
    ends = np.cumsum([0, *map(len, positions)])
    values = [part.numpy() for _, part in entries]
    positions_in_turn, values_in_turn = _scratch(int(ends[-1]), sums.size, np.result_type(*values))
    np.concatenate(positions, out=positions_in_turn[: ends[-1]], casting="same_kind")
    np.concatenate(values, out=values_in_turn[: ends[-1]])
    weights = weights_by_senders(len(entries), total).numpy() if by_senders else np.empty(0, sums.dtype)
    weight = sums.dtype.type(factor)

    def sum_pieces(pieces: list[_Piece]) -> None:
        first = [end + np.searchsorted(part, pieces[0].start) for end, part in zip(ends, positions, strict=False)]
        cursors, runs = np.array(first, np.int64), np.array(pieces, np.int64)
        _sum(sums, runs, positions_in_turn, values_in_turn, cursors, ends[1:], weight, weights)

    _in_threads(sum_pieces, list(_shares(segments, torch.get_num_threads())))


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """See :func:`lightning_dct.kernels.add_rows`."""
    _add_rows(total.numpy(), indices.numpy(), rows.contiguous().numpy())


_arrays = threading.local()


def _scratch(count: int, size: int, dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Arrays that a thread reuses: positions below ``size`` in the narrowest dtype, and values, ``count`` or more."""
    # The system maps pages only when they are written, and few are. New arrays would have it clear them in each call.
    found = []
    for use, kind in (("positions", np.dtype(np.int32 if size <= LARGEST_INT32 else np.int64)), ("values", dtype)):
        array = vars(_arrays).get(f"{use} {kind}")
        if array is None or array.size < count:
            array = vars(_arrays)[f"{use} {kind}"] = np.empty(count, kind)
        found.append(array)
    return found[0], found[1]


@njit(nogil=True, cache=True, error_model="numpy")
def _select(
    addends: Any, sums: Any, pieces: Any, limits: Any, scale: Any, positions: Any, values: Any, counts: Any
) -> int:
    old = np.empty(BLOCK, sums.dtype)
    flags = np.empty(BLOCK, np.uint8)
    words = flags.view(np.uint64)
    total = 0
    for piece in range(pieces.shape[0]):
        limit, stop, before = limits[pieces[piece, 0]], pieces[piece, 2], total
        for start in range(pieces[piece, 1], stop, BLOCK):
            end = min(start + BLOCK, stop)
            # Indices into slices start at zero, so the compiler knows that none is negative.
            addend, block = addends[start:end], sums[start:end]
            for i in range(end - start):
                old[i] = block[i]
                fresh = old[i] + scale * addend[i]
                block[i] = fresh
                # "Not below" instead of "at or above", because it is true for NaN.
                flags[i] = not (abs(fresh) < limit)
            flags[end - start :] = 0
            for word in range(words.shape[0]):
                if words[word]:
                    # Without branches, because a processor cannot predict which of eight entries are selected.
                    for i in range(8 * word, min(8 * word + 8, end - start)):
                        positions[total] = start + i
                        values[total] = block[i]
                        total += flags[i]
                        if not np.isfinite(block[i]):
                            block[i] = old[i]
        counts[piece] = total - before
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _sum(
    sums: Any, pieces: Any, positions: Any, values: Any, cursors: Any, ends: Any, weight: Any, weights: Any
) -> None:
    senders = np.empty(BLOCK, np.int32)
    for piece in range(pieces.shape[0]):
        stop = pieces[piece, 2]
        for start in range(pieces[piece, 1], stop, BLOCK):
            end = min(start + BLOCK, stop)
            sums[start:end] = 0
            if weights.size:
                senders[:] = 0
                for sender in range(ends.shape[0]):
                    cursor = cursors[sender]
                    while cursor < ends[sender] and positions[cursor] < end:
                        senders[positions[cursor] - start] += values[cursor] != 0
                        cursor += 1
            for sender in range(ends.shape[0]):
                cursor = cursors[sender]
                while cursor < ends[sender] and positions[cursor] < end:
                    value = values[cursor]
                    if weights.size:
                        value = weights[senders[positions[cursor] - start]] * value
                    sums[positions[cursor]] += weight * value
                    cursor += 1
                cursors[sender] = cursor


@njit(nogil=True, cache=True)
def _add_rows(total: Any, indices: Any, rows: Any) -> None:
    for i in range(indices.size):
        sums, addends = total[indices[i]], rows[i]
        for j in range(sums.size):
            sums[j] += addends[j]


def _shares(segments: Sequence[tuple[int, int]], most: int) -> Iterator[list[_Piece]]:
    """Divide the segments into at most ``most`` lists of pieces with about the same number of entries."""
    entries = sum(stop - start for start, stop in segments)
    share = max(-(-entries // most), ENTRIES_PER_THREAD)
    pieces: list[_Piece] = []
    capacity = share
    for segment, (start, stop) in enumerate(segments):
        while start < stop:
            end = min(stop, start + capacity)
            pieces.append(_Piece(segment, start, end))
            capacity -= end - start
            start = end
            if not capacity:
                yield pieces
                pieces, capacity = [], share
    if pieces:
        yield pieces


def _in_threads(work: Callable[[list[_Piece]], Result], shares: list[list[_Piece]]) -> list[Result]:
    helping = [_threads(os.getpid()).submit(work, share) for share in shares[1:]]
    return [*map(work, shares[:1]), *(future.result() for future in helping)]


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process, by its id, because forks do not inherit their parent's threads."""
    return ThreadPoolExecutor(max_workers=max(torch.get_num_threads(), os.cpu_count() or 1), thread_name_prefix="dct")
