"""Values in rows, in 32, 16, 8 or 4 bits: one scale a row for the low-bit formats, stochastic rounding if wanted.

=======  ====  ==================================================================================================
format   bits  an entry ``v`` of row ``r`` is read back as
=======  ====  ==================================================================================================
fp32     32    ``v`` as a 32-bit float
bf16     16    ``v`` as a bfloat16, rounded to nearest
int8     8     ``scale_r * round(v / scale_r)``, with ``scale_r = max |v| / 127`` over what the row sends
int4     4     ``scale_r * round(v / scale_r)``, with ``scale_r = max |v| / 7`` over what the row sends
=======  ====  ==================================================================================================

Activations have no residual that would hold what rounding loses, so ``round`` can be stochastic: up with the
probability that makes the expectation exact. Scales are bfloat16, rounded up: half the bytes of fp32 for a step that
is at most 1/128 wider. An infinite or NaN value makes the scale of its row infinite or NaN, so in int8 and int4 no
value of such a row is read back as finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dct.wire.values import decode_values, encode_values

ROW_BITS_PER_VALUE: dict[str, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
LEVELS: dict[str, int] = {"int8": 127, "int4": 7}
SCALE_BYTES = 2
# Added to a signed int4 step to store it without sign; 0 is never written.
INT4_OFFSET = 8


def row_values_num_bytes(value_format: str, capacity: int) -> int:
    """Bytes that ``capacity`` values take, scales not included."""
    return (ROW_BITS_PER_VALUE[value_format] * capacity + 7) // 8


def row_scales_num_bytes(value_format: str, num_rows: int) -> int:
    """Bytes that the scales of ``num_rows`` rows take."""
    return SCALE_BYTES * num_rows if value_format in LEVELS else 0


def encode_rows(
    values: Tensor, row_of: Tensor | None, num_rows: int, value_format: str, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write values.

    Args:
        values: Shape ``[count]``, floating point.
        row_of: Shape ``[count]``, int64 below ``num_rows``: the row of each value (used by int8 and int4 only). None
            for ``num_rows`` rows of equal length, one after the other.
        num_rows: How many rows there are; a row may be empty.
        value_format: One of ``fp32``, ``bf16``, ``int8``, ``int4``.
        noise: Shape ``[count]``, fp32, uniform in [0, 1), for stochastic rounding (used by int8 and int4 only); None
            rounds to nearest.

    Returns:
        The values' bytes (uint8) and one bfloat16 scale a row (shape ``[num_rows]``, or ``[0]`` for the formats that
        need none).
    """
    if value_format not in LEVELS:
        return encode_values(values, values.new_empty(0), 0, value_format)[0], _no_scales(values)
    levels = LEVELS[value_format]
    values = values.to(torch.float32)
    scales = _scales(_largest_magnitudes(values, row_of, num_rows), levels)
    # Zero over zero, in a row of zeros, is no step. In a row that is not finite any step will do.
    steps = (values / _spread(scales, row_of, values.numel())).nan_to_num_(nan=0.0)
    whole = steps.round() if noise is None else steps.floor()
    if noise is not None:
        whole += noise < steps - whole
    whole.clamp_(-levels, levels)
    if value_format == "int8":
        return whole.to(torch.int8).view(torch.uint8), scales
    nibbles = values.new_zeros(values.numel() + values.numel() % 2, dtype=torch.uint8)
    nibbles[: values.numel()] = whole.add_(INT4_OFFSET).to(torch.uint8)
    pairs = nibbles.view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4), scales


def decode_rows(data: Tensor, count: int, row_of: Tensor | None, scales: Tensor, value_format: str) -> Tensor:
    """Read values back.

    Args:
        data: The values' bytes, uint8.
        count: How many values to read.
        row_of: As it was when they were written.
        scales: Shape ``[num_rows]`` (int8, int4) or ``[0]``, bfloat16.
        value_format: The format they were written in.

    Returns:
        Shape ``[count]``, fp32.
    """
    if value_format not in LEVELS:
        return decode_values(data, count, data.new_empty(0), data.new_empty(0), value_format)
    if value_format == "int8":
        steps = data[:count].view(torch.int8).to(torch.float32)
    else:
        packed = data[: row_values_num_bytes("int4", count)]
        steps = torch.stack([packed & 15, packed >> 4], dim=1).flatten()[:count].to(torch.float32).sub_(INT4_OFFSET)
    return steps.mul_(_spread(scales, row_of, count))


def _largest_magnitudes(values: Tensor, row_of: Tensor | None, num_rows: int) -> Tensor:
    magnitudes = values.abs()
    if row_of is None:
        return magnitudes.view(num_rows, -1).amax(dim=1) if values.numel() else values.new_zeros(num_rows)
    return values.new_zeros(num_rows).scatter_reduce_(0, row_of, magnitudes, "amax")


def _scales(largest: Tensor, levels: int) -> Tensor:
    """``largest / levels`` as bfloat16, rounded up so that no value needs more than ``levels`` steps."""
    exact = largest / levels
    bits = exact.view(torch.int32)
    # bfloat16 is the upper half of an fp32.
    up = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    down = (bits & -0x10000).view(torch.float32)
    # Down only where `levels` steps would reach infinity although the value did not.
    finite = torch.where((up * levels).isinf(), down, up)
    return torch.where(largest.isfinite(), finite, exact).to(torch.bfloat16)


def _spread(scales: Tensor, row_of: Tensor | None, count: int) -> Tensor:
    """The scale of each value, fp32."""
    wide = scales.to(torch.float32)
    if row_of is not None:
        return wide[row_of]
    return wide.repeat_interleave(count // scales.numel()) if scales.numel() else wide.new_empty(0)


def _no_scales(values: Tensor) -> Tensor:
    return values.new_empty(0, dtype=torch.bfloat16)
