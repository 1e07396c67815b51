"""Codes rows in 8 or 4 bits and draws initial ones, compiled for this CPU by numba (extra
``fast``).

:mod:`lightning_dct.wire.rows` describes the bytes and :mod:`lightning_dct.activations.codec` the
random numbers. The results are the same as in torch to the last bit, so ranks may use either. All
arithmetic is fp32, with one rounding for each operation, and unsigned integers of 32 bits.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

INFINITY = 0x7F800000  # as bits, above which are those of NaN
NO_SIGN = 0x7FFFFFFF
LARGEST = np.float32(np.finfo(np.float32).max)
ONE = np.float32(1)
ZERO = np.float32(0)
UNIT = np.float32(2.0**-24)
PART = np.float32(2.0**-23)
# Of SplitMix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
A_LITTLE_LESS = np.float32(1 - 2**-23)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would trace into numba
def encode(
    values: Tensor,
    num_rows: int,
    levels: int,
    shares: NDArray[np.float32],
    salt: int | None,
    header: bytes,
) -> Tensor:
    """The header, and the bytes of the scales and of the values, uint8.

    ``values`` (any shape and floating-point dtype, not empty) are ``num_rows`` rows, one after the
    other. ``levels`` are the steps of the scale on either side of zero: 127 for int8, 7 for int4.
    ``shares`` (shape ``[256]``, fp32) has the scale of each code over the largest scale. ``salt``
    is that of stochastic rounding; None rounds to nearest.
    """
    # Contiguous, because numba would compile the loop anew for another order of a matrix.
    rows = values.detach().to(torch.float32).contiguous().numpy().reshape(num_rows, -1)
    begin = len(header)
    payload = np.empty(
        begin + 4 + num_rows + (rows.size if levels > 7 else (rows.size + 1) // 2), np.uint8
    )
    payload[:begin] = np.frombuffer(header, np.uint8)
    _encode(rows, payload[begin:], levels, shares, salt is not None, salt or 0)
    return torch.from_numpy(payload)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def decode(
    written: Tensor, count: int, num_rows: int, levels: int, shares: NDArray[np.float32]
) -> Tensor:
    """Decode ``count`` values from the bytes of :func:`encode` after the header: shape ``[count]``,
    fp32.
    """
    values = np.empty(count, np.float32)
    _decode(values.reshape(num_rows, -1), written.numpy(), levels > 7, shares)
    return torch.from_numpy(values)


@njit(nogil=True, cache=True, error_model="numpy")
def fill_uniform(rows: Any, states: Any, bounds: Any) -> None:
    """Overwrite rows (fp32 ``[n, dim]``) as :func:`lightning_dct.embedding.owners.initial_rows`
    does.

    ``states`` is uint64 ``[n]``, and ``bounds`` fp32 ``[n]``.
    """
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            x = states[i] + np.uint64(j + 1) * GOLDEN
            x = (x ^ (x >> np.uint64(30))) * FIRST
            x = (x ^ (x >> np.uint64(27))) * SECOND
            x ^= x >> np.uint64(31)
            rows[i, j] = (np.float32(np.int32(x >> np.uint64(40))) * PART - ONE) * bounds[i]


@njit(inline="always")
def _hashed(x: Any) -> Any:
    # numba widens to 64 bits in every operation; the casts keep 32, and vector instructions.
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@njit(inline="always")
def _noise(place: Any, low: Any, high: Any) -> Any:
    # Places wrap around after 32 bits, as in torch.
    number = _hashed(np.uint32(_hashed(np.uint32(np.uint32(place) ^ low)) + high))
    return np.float32(np.int32(number & np.uint32(0xFFFFFF))) * UNIT


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(rows: Any, written: Any, steps: int, shares: Any, noisy: bool, salt: int) -> None:
    (num_rows, length), bits, levels = rows.shape, rows.view(np.int32), np.float32(steps)
    largest = np.empty(num_rows, np.int32)
    fingerprint = np.int64(salt)
    for i in range(num_rows):
        # Magnitudes have the same order as integers as they have as floats, and NaN is the largest.
        most = np.int32(0)
        for bit in bits[i]:
            most = max(most, np.int32(bit & NO_SIGN))
            fingerprint += np.int64(bit)
        largest[i] = most
    # The scales, as in `wire.rows`.
    needed = largest.view(np.float32)
    top = ZERO
    for i in range(num_rows):
        if largest[i] < INFINITY:
            scale = needed[i] / levels
            if scale * levels > LARGEST:
                scale *= A_LITTLE_LESS
            needed[i] = scale
            top = max(top, scale)
    for byte in range(4):
        written[byte] = np.full(1, top, np.float32).view(np.uint8)[byte]
    named = shares[:255] * top
    low = _hashed(np.uint32(fingerprint & NO_SIGN))
    high = _hashed(np.uint32(np.uint32((fingerprint >> 31) & NO_SIGN) ^ low))
    codes = np.zeros(rows.size + 1, np.uint8)
    for i in range(num_rows):
        if largest[i] >= INFINITY:
            written[4 + i] = 255
            continue
        written[4 + i] = code = np.searchsorted(named, needed[i])
        scale = named[code]
        row = rows[i]
        out = codes[i * length : (i + 1) * length]
        before = i * length
        for j in range(length):
            step = row[j] / scale
            # A row of zeros gives zero over zero.
            step = step if step == step else ZERO
            if noisy:
                below = np.floor(step)
                step = below + (ONE if _noise(before + j, low, high) < step - below else ZERO)
            else:
                step = np.rint(step)
            out[j] = np.uint8(np.int32(min(max(step, -levels), levels)))
    data = written[4 + num_rows :]
    if steps > 7:
        data[:] = codes[:-1]
        return
    # An offset removes the sign, and 0 is never written.
    codes[:-1] += np.uint8(8)
    for i in range(data.size):
        data[i] = codes[2 * i] | codes[2 * i + 1] << 4


@njit(nogil=True, cache=True, error_model="numpy")
def _decode(rows: Any, written: Any, bytewise: bool, shares: Any) -> None:
    num_rows, length = rows.shape
    top = written[:4].copy().view(np.float32)[0]
    data = written[4 + num_rows :]
    for i in range(num_rows):
        row = rows[i]
        scale = shares[written[4 + i]] * top
        before = i * length
        if bytewise:
            for j in range(length):
                row[j] = np.float32(np.int8(data[before + j])) * scale
        else:
            for j in range(length):
                place = before + j
                code = data[place >> 1] >> (4 * (place & 1)) & 15
                row[j] = np.float32(np.int32(code) - 8) * scale
