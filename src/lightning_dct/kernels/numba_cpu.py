"""The loops of :mod:`lightning_dct.kernels.plain`, compiled for this CPU by numba (extra ``fast``).

Selecting reads the weights once, and adding the mean reads and writes them once. All else works on the sent entries:
flags, 64 to a word, and values. A loop over the set flags of a word costs little if the flags are few, and needs no
temporary tensor.

All of it is in one file, because numba keeps what it has compiled of a function until that function's own file changes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from lightning_dct.kernels.bits import num_bytes
from lightning_dct.kernels.plain import Sent, Tensors

# Entries that fit the first-level cache.
BLOCK = 1024
# Bytes that the memory delivers at once.
LINE = 64
# With fewer entries a second thread costs more than it saves.
ENTRIES_PER_THREAD = 1 << 18
# Multiplied with eight bytes of 0 or 1, this collects them in the highest byte.
GATHER = np.uint64(0x0102040810204080)
trailing_zeros: Any = numbers.trailing_zeros
ONE, WORD = np.uint64(1), np.uint64(63)
# The largest fp32 number of which twice is finite.
LARGEST_HALF = torch.finfo(torch.float32).max / 2

Result = TypeVar("Result")


class _Span(NamedTuple):
    """Entries ``start`` to ``stop`` of a tensor; the first has the flag number ``bit``."""

    tensor: int
    start: int
    stop: int
    bit: int


def select(
    news: Tensors, bases: Tensors, first: Sequence[int], thresholds: Sequence[float], scale: float | None, flags: Tensor
) -> tuple[Tensor, list[int]]:
    """See :func:`lightning_dct.kernels.plain.select`."""
    words, nothing = _words(flags), bases[0][:0] if bases else torch.empty(0)
    dtype = nothing.numpy().dtype
    # numba does not support bfloat16.
    arrays = [(new.to(base.dtype).numpy(), base.numpy()) for new, base in zip(news, bases, strict=True)]
    limits = [dtype.type(threshold) for threshold in thresholds]

    def select_spans(spans: list[_Span]) -> tuple[Tensor, NDArray[np.int64]]:
        found = _scratch(sum([stop - start for _, start, stop, _ in spans]), nothing.dtype)
        values, count, counts = found.numpy(), 0, np.zeros(len(news), np.int64)
        for tensor, start, stop, bit in spans:
            new, base = arrays[tensor][0][start:stop], arrays[tensor][1][start:stop]
            before = count
            if scale is None:
                count = _select_difference(new, base, limits[tensor], words, bit, values, count)
            else:
                count = _select_sum(new, base, dtype.type(scale), limits[tensor], words, bit, values, count)
            counts[tensor] = count - before
        # A helping thread may take another share and then use its array again.
        return found[:count] if spans is shares[0] else found[:count].clone(), counts

    shares = _shares(news, first)
    found = _in_threads(select_spans, shares)
    values = [values for values, _ in found] or [nothing]
    counts = sum((counts for _, counts in found), np.zeros(len(news), np.int64))
    return values[0] if len(values) == 1 else torch.cat(values), counts.tolist()


def thin(flags: Tensor, begin: int, size: int, values: Tensor, target: int, limit: float) -> Tensor:
    """See :func:`lightning_dct.kernels.plain.thin`."""
    array = values.numpy()
    return values[: _thin(_words(flags), begin, size, array, target, array.dtype.type(limit))]


def subtract(tensors: Tensors, first: Sequence[int], sent: Sent) -> None:
    """See :func:`lightning_dct.kernels.plain.subtract`."""
    words, values = _words(sent.flags)[0], sent.values.numpy()

    def subtract_spans(spans: list[_Span]) -> None:
        cursor = _flags_before(words, spans[0].bit)
        for tensor, start, stop, bit in spans:
            cursor = _subtract(tensors[tensor].numpy()[start:stop], words, bit, values, cursor)

    _in_threads(subtract_spans, _shares(tensors, first))


def decay(news: Tensors, bases: Tensors, first: Sequence[int], sent: Sent, lost: float) -> None:
    """See :func:`lightning_dct.kernels.plain.decay`."""
    words, values = _words(sent.flags)[0], sent.values.numpy()

    def decay_spans(spans: list[_Span]) -> None:
        cursor = _flags_before(words, spans[0].bit)
        for tensor, start, stop, bit in spans:
            new, base = news[tensor].numpy()[start:stop], bases[tensor].numpy()[start:stop]
            cursor = _decay(new, base, new.dtype.type(lost), words, bit, values, cursor)

    _in_threads(decay_spans, _shares(news, first))


def add_sums(
    totals: Tensors, owns: Tensors | None, first: Sequence[int], sent: Sent, weights: Tensor, mine: int = -1
) -> None:
    """See :func:`lightning_dct.kernels.plain.add_sums`."""
    words, values = _words(sent.flags), sent.values.numpy()
    starts = np.array([*accumulate(sent.counts, initial=0)][:-1], np.int64)
    by_count, nothing = weights.numpy(), weights.numpy()[:0]

    def add_spans(spans: list[_Span]) -> None:
        cursors = starts + np.array([_flags_before(row, spans[0].bit) for row in words])
        for tensor, start, stop, bit in spans:
            total = totals[tensor].numpy()[start:stop]
            own_weights = nothing if owns is None else owns[tensor].numpy()[start:stop]
            _add_sums(total, own_weights, words, bit, values, cursors, mine, by_count)

    _in_threads(add_spans, _shares(totals, first))


def encode_scaled(values: Tensor, counts: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """The bytes and scales of ``1bit`` or ``2bit``, as in :func:`lightning_dct.wire.values.encode_values`."""
    words, scales = np.zeros(bits * values.numel() // 64 + 1, np.uint64), torch.empty(len(counts), dtype=torch.float32)
    codes, given = words.view(np.uint8), (values.numpy(), np.array(counts, np.int64))
    if bits == 1:
        _encode_signs(*given, words, scales.numpy())
    else:
        _encode_levels(*given, codes, scales.numpy())
    return torch.from_numpy(codes[: num_bytes(bits * values.numel())]), scales


def decode_scaled(codes: Tensor, counts: Sequence[int], scales: Tensor, values: Tensor, bits: int) -> None:
    """Undo :func:`encode_scaled`, into ``values``: shape ``[sum(counts)]``, fp32."""
    words, size = np.zeros(bits * values.numel() // 64 + 1, np.uint64), num_bytes(bits * values.numel())
    words.view(np.uint8)[:size] = codes.numpy()[:size]
    _decode_scaled(words, bits, np.array(counts, np.int64), scales.numpy(), values.numpy())


def count_flags(flags: Tensor, sizes: Sequence[int]) -> list[int]:
    """See :func:`lightning_dct.wire.positions.count_flags`."""
    return _count_flags(_words(flags), np.array(sizes, np.int64)).tolist()


def positions_of(flags: Tensor, count: int) -> Tensor:
    """See :func:`lightning_dct.kernels.positions_of`."""
    positions = torch.empty(count, dtype=torch.int64)
    _write_positions(_words(flags), positions.numpy())
    return positions


def encode_elias_fano(flags: Tensor, num_bits: int, num_flags: int, low_bits: int, capacity: int) -> Tensor:
    """The positions of set flags in the code of :mod:`lightning_dct.wire.positions`: uint8, ``num_bits`` bits."""
    message = np.zeros(num_bits // 64 + 2, np.uint64)
    if not _encode_elias_fano(_words(flags), message, num_flags, low_bits, capacity):
        raise ValueError(f"More than {capacity} positions do not fit.")
    return torch.from_numpy(message.view(np.uint8)[: num_bytes(num_bits)])


def decode_elias_fano(
    message: Tensor, universe: int, num_flags: int, low_bits: int, capacity: int, flags: Tensor
) -> int:
    """Undo :func:`encode_elias_fano`, into ``flags``, which are zero before.

    Returns:
        The number of positions, or -1 if they are not ascending, not below ``universe``, or more than ``capacity``.
    """
    words = np.zeros(message.numel() // 8 + 3, np.uint64)
    words.view(np.uint8)[: message.numel()] = message.numpy()
    return int(_decode_elias_fano(words, universe, num_flags, low_bits, capacity, _words(flags)))


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """See :func:`lightning_dct.kernels.add_rows`."""
    # Read where they lie: the gradient of a part of a concatenation is no contiguous tensor.
    groups = rows if rows.ndim == 3 else rows.unsqueeze(0)
    groups = groups if groups.stride(2) == 1 else groups.contiguous()
    entries = groups.untyped_storage().nbytes() // groups.itemsize - groups.storage_offset()
    memory = groups.as_strided((max(entries, 0),), (1,))
    _add_rows(total.numpy(), indices.numpy(), memory.numpy(), *groups.shape[:2], *groups.stride()[:2])


def _words(flags: Tensor) -> NDArray[np.uint64]:
    return flags.numpy().view(np.uint64)


_scratch_tensors = threading.local()


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor that a thread reuses, of ``count`` entries or more."""
    # The system maps pages only when they are written, and few are. A new tensor would have it clear them in each call.
    tensor = vars(_scratch_tensors).get(str(dtype))
    if tensor is None or tensor.numel() < count:
        tensor = vars(_scratch_tensors)[str(dtype)] = torch.empty(count, dtype=dtype)
    return tensor


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _window(words: Any, bit: Any, length: Any) -> Any:
    """Up to 64 flags from a bit on, the first in the lowest bit; those beyond ``length`` are zero."""
    word, shift = bit >> 6, np.uint64(bit) & WORD
    flags = words[word] >> shift
    if shift:
        flags |= words[word + 1] << (np.uint64(64) - shift)
    if length < 64:
        flags &= (ONE << np.uint64(length)) - ONE
    return flags


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _set_window(words: Any, bit: Any, flags: Any) -> None:
    word, shift = bit >> 6, np.uint64(bit) & WORD
    words[word] |= flags << shift
    # Only if it changes: the next word may be another thread's.
    if shift and flags >> (np.uint64(64) - shift):
        words[word + 1] |= flags >> (np.uint64(64) - shift)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _ones(word: Any) -> Any:
    """The number of set flags. Compilers know this formula, and use the processor's instruction."""
    word = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(nogil=True, cache=True, error_model="numpy")
def _flags_before(words: Any, bit: int, start: int = 0) -> int:
    """The number of set flags from number ``start`` on, before number ``bit``."""
    first = min(bit, start + (-start & 63))
    count = _ones(_window(words, start, first - start)) if start < first else 0
    for word in range(first >> 6, bit >> 6):
        count += _ones(words[word])
    first = max(first, bit & ~63)
    return count + (_ones(_window(words, first, bit - first)) if first < bit else 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _count_flags(words: Any, sizes: Any) -> Any:
    counts, start = np.zeros(sizes.size, np.int64), 0
    for number in range(sizes.size):
        counts[number] = _flags_before(words, start + sizes[number], start)
        start += sizes[number]
    return counts


@njit(nogil=True, cache=True, error_model="numpy")
def _write_positions(words: Any, positions: Any) -> None:
    count = 0
    for word in range(words.size):
        flags = words[word]
        while flags and count < positions.size:
            positions[count] = 64 * word + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            count += 1


@intrinsic
def _prefetch_entry(context: Any, array: Any, index: Any) -> Any:
    """Have the processor fetch the cache line of an array's entry, which may lie beyond its end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, number, number, number]), "llvm.prefetch.p0i8"
        )
        # To be written, into the first-level cache, as data.
        kind = [ir.Constant(number, value) for value in (1, 3, 1)]
        builder.call(function, [builder.bitcast(builder.gep(data, [arguments[1]]), byte), *kind])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


_prefetch: Any = _prefetch_entry


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
            _set_window(words, bit + start, flags)
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
        flags = _window(words, bit, begin + size - bit)
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
        flags = _window(words, bit + start, part.size)
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
        flags = _window(words, bit + start, ours.size)
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
            _prefetch(total, entry)
            if own.size:
                _prefetch(own, entry)
        for sender in range(words.shape[0]):
            flags, cursor = _window(words[sender], bit + start, part.size), cursors[sender]
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


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_signs(values: Any, counts: Any, signs: Any, scales: Any) -> None:
    for start in range(0, values.size, 64):
        part, flags = values[start : start + 64], np.uint64(0)
        for i in range(part.size):
            flags |= np.uint64(part[i] > 0) << np.uint64(i)
        signs[start // 64] = flags
    start = 0
    for tensor in range(counts.size):
        part = values[start : start + counts[tensor]]
        start += counts[tensor]
        # Sums that do not wait for one another.
        one, two, three, four = 0.0, 0.0, 0.0, 0.0
        for i in range(0, part.size - 3, 4):
            one += abs(np.float64(part[i]))
            two += abs(np.float64(part[i + 1]))
            three += abs(np.float64(part[i + 2]))
            four += abs(np.float64(part[i + 3]))
        for i in range(part.size & ~3, part.size):
            one += abs(np.float64(part[i]))
        scales[tensor] = (one + two + three + four) / max(part.size, 1)


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_scaled(words: Any, bits: int, counts: Any, scales: Any, values: Any) -> None:
    one, two, in_word = np.float32(1), np.float32(2), 64 // bits
    for word in range(words.size):
        codes, part = words[word], values[word * in_word : (word + 1) * in_word]
        if bits == 1:
            for i in range(part.size):
                part[i] = one if (codes >> np.uint64(i)) & ONE else -one
        else:
            for i in range(part.size):
                level = two if (codes >> np.uint64(2 * i + 1)) & ONE else one
                part[i] = level if (codes >> np.uint64(2 * i)) & ONE else -level
    start = 0
    for tensor in range(counts.size):
        part, scale = values[start : start + counts[tensor]], scales[tensor]
        for i in range(part.size):
            part[i] *= scale
        start += part.size


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_levels(values: Any, counts: Any, codes: Any, scales: Any) -> None:
    start = 0
    for tensor in range(counts.size):
        part, count = values[start : start + counts[tensor]], max(counts[tensor], 1)
        # In the order of torch, because every sum is rounded.
        total, larger, number = 0.0, 0.0, 0
        for i in range(part.size):
            total += abs(np.float64(part[i]))
        mean = total / count
        for i in range(part.size):
            magnitude = abs(np.float64(part[i]))
            larger += magnitude if magnitude >= mean else 0.0
            number += magnitude >= mean
        product, square = total + larger, np.float64(count + 3 * number)
        fits = product * product / square > total * mean and product / square <= LARGEST_HALF
        scales[tensor] = product / square if fits else mean
        for i in range(part.size):
            code = 2 * (fits and abs(np.float64(part[i])) >= mean) + (part[i] > 0)
            codes[(start + i) >> 2] |= code << (2 * ((start + i) & 3))
        start += part.size


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_elias_fano(words: Any, message: Any, num_flags: int, low_bits: int, capacity: int) -> bool:
    count, low = 0, np.zeros(64, np.int64)
    for word in range(words.size):
        flags = words[word]
        while flags:
            position = 64 * word + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            if count == capacity:
                return False
            place = (position >> low_bits) + count
            message[place >> 6] |= ONE << (np.uint64(place) & WORD)
            low[count & 63] = position
            count += 1
            if not count & 63:
                _set_planes(message, low, num_flags + count - 64, low_bits, capacity)
    low[count & 63 :] = 0
    _set_planes(message, low, num_flags + (count & ~63), low_bits, capacity)
    return True


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _set_planes(message: Any, low: Any, first: Any, low_bits: Any, capacity: Any) -> None:
    """Write the low bits of 64 positions, plane by plane."""
    for plane in range(low_bits):
        bits = np.uint64(0)
        for i in range(64):
            bits |= np.uint64((low[i] >> plane) & 1) << np.uint64(i)
        if bits:
            _set_window(message, first + plane * capacity, bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_elias_fano(message: Any, universe: int, num_flags: int, low_bits: int, capacity: int, words: Any) -> int:
    count, last, low = 0, np.int64(-1), np.zeros(64, np.int64)
    for start in range(0, num_flags, 64):
        flags = _window(message, start, num_flags - start)
        while flags:
            place = start + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            if count == capacity:
                return -1
            if not count & 63:
                low[:] = 0
                for plane in range(low_bits):
                    bits = _window(message, num_flags + plane * capacity + count, capacity - count)
                    for i in range(64):
                        low[i] |= np.int64((bits >> np.uint64(i)) & ONE) << plane
            position = (place - count) << low_bits | low[count & 63]
            if position <= last or position >= universe:
                return -1
            words[position >> 6] |= ONE << (np.uint64(position) & WORD)
            last = position
            count += 1
    return count


@njit(nogil=True, cache=True)
def _add_rows(total: Any, indices: Any, rows: Any, num_groups: int, size: int, to_group: int, to_row: int) -> None:
    for i in range(num_groups):
        for k in range(size):
            start = i * to_group + k * to_row
            sums, addends = total[indices[i * size + k]], rows[start : start + total.shape[1]]
            for j in range(sums.size):
                sums[j] += addends[j]


def _shares(tensors: Tensors, first: Sequence[int]) -> list[list[_Span]]:
    """Divide tensors among threads by their flags, the same number each. No two threads share a word of flags."""
    sizes = list(map(Tensor.numel, tensors))
    num_flags = max(map(sum, zip(first, sizes, strict=True)), default=0)
    share = max(-(-num_flags // torch.get_num_threads()), ENTRIES_PER_THREAD)
    share += -share % 64
    shares: list[list[_Span]] = []
    for begin in range(0, num_flags, share):
        shares.append([])
        for number, (bit, size) in enumerate(zip(first, sizes, strict=True)):
            start, stop = max(begin - bit, 0), min(begin + share - bit, size)
            if start < stop:
                shares[-1].append(_Span(number, start, stop, bit + start))
    return [spans for spans in shares if spans]


def _in_threads(work: Callable[[list[_Span]], Result], shares: list[list[_Span]]) -> list[Result]:
    helping = [_threads(os.getpid()).submit(work, share) for share in shares[1:]] if len(shares) > 1 else []
    return [*map(work, shares[:1]), *map(Future.result, helping)]


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process, by its id, because forks do not inherit their parent's threads."""
    return ThreadPoolExecutor(max_workers=max(torch.get_num_threads(), os.cpu_count() or 1), thread_name_prefix="dct")
