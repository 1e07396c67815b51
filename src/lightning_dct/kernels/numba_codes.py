"""Codes values and positions of entries that are sent, compiled for this CPU by numba (extra ``fast``).

:mod:`lightning_dct.wire` describes the bytes. The results are those of torch to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lightning_dct.kernels.numba_words import ONE, WORD, flags_before, set_window, trailing_zeros, window, words_of

# The largest fp32 number of which twice is finite.
LARGEST_HALF = torch.finfo(torch.float32).max / 2


def encode_signs(values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """See :func:`lightning_dct.kernels.plain.encode_signs`."""
    signs, scales = np.zeros(values.numel() // 64 + 1, np.uint64), torch.empty(len(counts))
    _encode_signs(values.numpy(), np.array(counts, np.int64), signs, scales.numpy())
    return torch.from_numpy(signs.view(np.uint8)[: (values.numel() + 7) // 8]), scales


def decode_signs(signs: Tensor, counts: Sequence[int], scales: Tensor, values: Tensor) -> None:
    """See :func:`lightning_dct.kernels.plain.decode_signs`."""
    words, size = np.zeros(values.numel() // 64 + 1, np.uint64), (values.numel() + 7) // 8
    words.view(np.uint8)[:size] = signs.numpy()[:size]
    _decode_signs(words, np.array(counts, np.int64), scales.numpy(), values.numpy())


def encode_levels(values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The codes and scales of ``2bit``, as in :func:`lightning_dct.wire.encode_values`."""
    codes, scales = np.zeros((values.numel() + 3) // 4, np.uint8), torch.empty(len(counts))
    _encode_levels(values.numpy(), np.array(counts, np.int64), codes, scales.numpy())
    return torch.from_numpy(codes), scales


def decode_levels(codes: Tensor, counts: Sequence[int], scales: Tensor, values: Tensor) -> None:
    """Undo :func:`encode_levels`, into ``values``: shape ``[sum(counts)]``, fp32."""
    _decode_levels(codes.numpy(), np.array(counts, np.int64), scales.numpy(), values.numpy())


def count_flags(flags: Tensor, sizes: Sequence[int]) -> list[int]:
    """See :func:`lightning_dct.kernels.plain.count_flags`."""
    counts: list[int] = _count_flags(words_of(flags), np.array(sizes, np.int64)).tolist()
    return counts


def encode_elias_fano(flags: Tensor, num_bits: int, num_flags: int, low_bits: int, capacity: int) -> Tensor:
    """See :func:`lightning_dct.kernels.plain.encode_elias_fano`."""
    message = np.zeros(num_bits // 64 + 2, np.uint64)
    if not _encode_elias_fano(words_of(flags), message, num_flags, low_bits, capacity):
        raise ValueError(f"More than {capacity} positions do not fit.")
    return torch.from_numpy(message.view(np.uint8)[: (num_bits + 7) // 8])


def decode_elias_fano(
    message: Tensor, universe: int, num_flags: int, low_bits: int, capacity: int, flags: Tensor
) -> int:
    """See :func:`lightning_dct.kernels.plain.decode_elias_fano`."""
    words = np.zeros(message.numel() // 8 + 3, np.uint64)
    words.view(np.uint8)[: message.numel()] = message.numpy()
    return int(_decode_elias_fano(words, universe, num_flags, low_bits, capacity, words_of(flags)))


@njit(nogil=True, cache=True, error_model="numpy")
def _count_flags(words: Any, sizes: Any) -> Any:
    counts, start = np.zeros(sizes.size, np.int64), 0
    for number in range(sizes.size):
        counts[number] = flags_before(words, start + sizes[number], start)
        start += sizes[number]
    return counts


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
def _decode_signs(signs: Any, counts: Any, scales: Any, values: Any) -> None:
    plus, minus = np.float32(1), np.float32(-1)
    for start in range(0, values.size, 64):
        part, flags = values[start : start + 64], signs[start >> 6]
        for i in range(part.size):
            part[i] = plus if (flags >> np.uint64(i)) & ONE else minus
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
def _decode_levels(codes: Any, counts: Any, scales: Any, values: Any) -> None:
    start = 0
    for tensor in range(counts.size):
        part, scale = values[start : start + counts[tensor]], scales[tensor]
        for i in range(part.size):
            code = codes[(start + i) >> 2] >> (2 * ((start + i) & 3))
            level = scale + scale if code & 2 else scale
            part[i] = level if code & 1 else -level
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
            set_window(message, first + plane * capacity, bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_elias_fano(message: Any, universe: int, num_flags: int, low_bits: int, capacity: int, words: Any) -> int:
    """The number of positions, or minus one if they are not ascending below ``universe``."""
    count, last, low = 0, np.int64(-1), np.zeros(64, np.int64)
    for start in range(0, num_flags, 64):
        flags = window(message, start, num_flags - start)
        while flags:
            place = start + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            if count == capacity:
                return -1
            if not count & 63:
                low[:] = 0
                for plane in range(low_bits):
                    bits = window(message, num_flags + plane * capacity + count, capacity - count)
                    for i in range(64):
                        low[i] |= np.int64((bits >> np.uint64(i)) & ONE) << plane
            position = (place - count) << low_bits | low[count & 63]
            if position <= last or position >= universe:
                return -1
            words[position >> 6] |= ONE << (np.uint64(position) & WORD)
            last = position
            count += 1
    return count
