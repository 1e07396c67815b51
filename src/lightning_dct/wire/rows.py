"""Codes for rows of values in 32, 16, 8 or 4 bits: a scale for each row in low-bit formats, and
stochastic rounding.

=======  ====  ==================================================================================================
format   bits  an entry ``v`` of row ``r`` is decoded as
=======  ====  ==================================================================================================
fp32     32    ``v`` as a 32-bit float
bf16     16    ``v`` as a bfloat16, rounded to nearest
int8     8     ``scale_r * round(v / scale_r)``, with ``scale_r = max |v| / 127`` over what the row sends
int4     4     ``scale_r * round(v / scale_r)``, with ``scale_r = max |v| / 7`` over what the row sends
=======  ====  ==================================================================================================

Activations have no residual to keep rounding errors, so ``round`` can be stochastic: up with the
probability that makes the expectation exact.

A scale is one byte: ``c`` means ``2 ** ((c - 254) / 8)`` of the largest scale, which is written
once as fp32. Scales are rounded up, by at most an eleventh, so that no value exceeds the number of
steps. This costs a little precision and takes half the bytes of bfloat16 scales, which outweigh the
values of short rows. Scales below 2 ** -31 of the largest are rounded up to that. 0 means a row of
zeros, and 255 a row with an infinite or NaN value, which is decoded as NaN.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lightning_dct.kernels.bits import num_bytes, pack_codes, unpack_codes
from lightning_dct.wire.values import decode_values, encode_values

BITS_PER_VALUE: dict[str, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
LEVELS: dict[str, int] = {"int8": 127, "int4": 7}
# The formats of whole rows by that of single entries.
WHOLE_FORMATS = {"fp32": "fp32", "bf16": "bf16", "2bit": "int8", "1bit": "int8"}
LARGEST_SCALE_BYTES = 4
STEPS_PER_OCTAVE = 8
LARGEST_CODE = 254
BROKEN_CODE = 255


def row_values_num_bytes(value_format: str, count: int) -> int:
    """Bytes that ``count`` values take."""
    return num_bytes(BITS_PER_VALUE[value_format] * count)


def row_scales_num_bytes(value_format: str, num_rows: int) -> int:
    """Bytes of the scales of ``num_rows`` rows."""
    return LARGEST_SCALE_BYTES + num_rows if value_format in LEVELS and num_rows else 0


def encode_rows(
    values: Tensor,
    row_of: Tensor | None,
    num_rows: int,
    value_format: str,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode values.

    Args:
        values: Shape ``[count]``, floating point.
        row_of: Shape ``[count]``, int64: the row of each value, for formats with scales. None for
            rows of equal length, one after the other.
        num_rows: The number of rows, some of which may be empty.
        value_format: One of ``fp32``, ``bf16``, ``int8``, ``int4``.
        noise: Shape ``[count]``, fp32, uniform in [0, 1), for stochastic rounding in formats with
            scales; None rounds to nearest.

    Returns:
        The bytes of the values and of the scales (none in formats without scales), uint8.
    """
    if value_format not in LEVELS:
        return encode_values(values, [], value_format)[0], values.new_empty(0, dtype=torch.uint8)
    levels = LEVELS[value_format]
    values = values.to(torch.float32)
    scale_bytes = _encode_scales(_largest_magnitudes(values, row_of, num_rows), levels)
    scales = _decode_scales(scale_bytes)
    # A row of zeros gives zero over zero. In a row that is not finite, steps do not matter.
    steps = _in_rows(torch.div, values, scales, row_of).nan_to_num_(nan=0.0)
    if noise is None:
        rounded = steps.round_()
    else:
        rounded = steps.floor()
        rounded += steps.sub_(rounded).gt_(noise)
    rounded.clamp_(-levels, levels)
    if value_format == "int8":
        return rounded.to(torch.int8).view(torch.uint8), scale_bytes
    # An offset removes the sign, and 0 is never written.
    return pack_codes(rounded.add_(8).to(torch.int8).view(torch.uint8), 4), scale_bytes


def decode_rows(
    data: Tensor, count: int, row_of: Tensor | None, scale_bytes: Tensor, value_format: str
) -> Tensor:
    """Decode ``count`` values from the bytes of :func:`encode_rows`: shape ``[count]``, fp32."""
    if value_format not in LEVELS:
        return decode_values(data, [count], data.new_empty(0), value_format)
    if value_format == "int8":
        steps = data[:count].view(torch.int8).to(torch.float32)
    else:
        steps = unpack_codes(data, 4)[:count].to(torch.float32).sub_(8)
    return _in_rows(torch.mul, steps, _decode_scales(scale_bytes), row_of)


def _largest_magnitudes(values: Tensor, row_of: Tensor | None, num_rows: int) -> Tensor:
    magnitudes = values.abs()
    if row_of is None:
        return (
            magnitudes.view(num_rows, -1).amax(dim=1)
            if values.numel()
            else values.new_zeros(num_rows)
        )
    return values.new_zeros(num_rows).scatter_reduce_(0, row_of, magnitudes, "amax")


def _encode_scales(largest: Tensor, levels: int) -> Tensor:
    if largest.numel() == 0:
        return largest.new_empty(0, dtype=torch.uint8)
    codes, top = code_scales(largest.unsqueeze(0), levels)
    return torch.cat([top.view(torch.uint8), codes.view(-1)])


def code_scales(largest: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The codes of scales, uint8 ``[n, rows]``, and the largest scale of each of ``n`` messages, by
    the largest magnitude of each row, ``[n, rows]``; rows of zeros may fill a message up.
    """
    # "Not below" is true for NaN, and one operation where `isfinite` is four.
    broken = (largest < math.inf).logical_not_()
    needed = largest.masked_fill(broken, 0.0).div_(levels)
    # Slightly smaller if `levels` steps would be infinite although the value is finite.
    needed = torch.where(needed * levels < math.inf, needed, needed * (1 - 2**-23))
    top = needed.amax(dim=1)
    # Only zeros get code 0.
    limits = _fractions(largest.device)[: LARGEST_CODE + 1] * top.unsqueeze(1)
    codes = torch.searchsorted(limits, needed)
    return codes.to(torch.uint8).masked_fill_(broken, BROKEN_CODE), top


def _decode_scales(scale_bytes: Tensor) -> Tensor:
    """One scale a row, fp32."""
    top = scale_bytes[:LARGEST_SCALE_BYTES].clone().view(torch.float32)
    return scales_of(scale_bytes[LARGEST_SCALE_BYTES:], top)


def scales_of(codes: Tensor, top: Tensor) -> Tensor:
    """The scales of codes, ``[rows]``, by the largest scale, ``[1]`` or that of each, fp32."""
    return _fractions(codes.device).index_select(0, codes.int()).mul_(top)


@lru_cache
def _fractions(device: torch.device) -> Tensor:
    """The scale of each code over the largest scale: shape ``[256]``, fp32, read-only."""
    codes = torch.arange(BROKEN_CODE + 1, device=device)
    # In fp64, so that devices with different last bits there agree in fp32.
    shares = torch.exp2((codes - LARGEST_CODE).to(torch.float64) / STEPS_PER_OCTAVE).to(
        torch.float32
    )
    return shares.masked_fill_(codes == 0, 0.0).masked_fill_(codes == BROKEN_CODE, math.nan)


SHARES = _fractions(torch.device("cpu")).numpy()


def _in_rows(
    operation: Callable[..., Tensor], values: Tensor, scales: Tensor, row_of: Tensor | None
) -> Tensor:
    """An operation on each value and its row's scale."""
    if row_of is not None or not values.numel():
        return operation(values, scales[row_of] if row_of is not None else scales)
    return operation(values.view(scales.numel(), -1), scales.unsqueeze(1)).view(-1)
