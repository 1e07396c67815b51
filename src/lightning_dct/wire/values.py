"""Values of sent entries in 32, 16, 2 or 1 bits.

=======  ====  ==================================================================================================
format   bits  an entry ``v`` of tensor ``t`` is read back as
=======  ====  ==================================================================================================
fp32     32    ``v`` as a 32-bit float
bf16     16    ``v`` as a bfloat16, rounded to nearest
2bit     2     its sign times ``scale_t`` or, if ``|v|`` is at least its mean, ``2 scale_t``: the scale with the least
               squared error; ``scale_t = mean |v|`` for all where that fits better
1bit     1     ``scale_t * sign(v)``, with ``scale_t = mean |v|`` over what the tensor sends
=======  ====  ==================================================================================================

Error feedback keeps the rounding error in the residual, so few bits are enough. An infinite or NaN
value makes the scale of its tensor infinite or NaN, so the other ranks receive it in every format.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_dct.kernels import compiled
from lightning_dct.kernels.bits import (
    as_bytes,
    num_bytes,
    pack_bits,
    pack_codes,
    unpack_bits,
    unpack_codes,
)
from lightning_dct.kernels.plain import LARGEST_HALF

BITS_PER_VALUE: dict[str, int] = {"fp32": 32, "bf16": 16, "2bit": 2, "1bit": 1}
SCALED_FORMATS = ("2bit", "1bit")


def encode_values(
    values: Tensor, counts: Sequence[int] | Tensor, value_format: str, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Encode the values of several tensors.

    Args:
        values: Shape ``[sum(counts)]``, floating point: those of one tensor after the other.
        counts: How many are of each tensor, for scales: on a device as a tensor, int64, on it.
        value_format: One of ``fp32``, ``bf16``, ``2bit``, ``1bit``.
        kernel: See :func:`~lightning_dct.kernels.cpu_kernel`.

    Returns:
        The values' bytes (uint8) and one fp32 scale a tensor (shape ``[len(counts)]``, or ``[0]``
        without scales).
    """
    no_scales = values.new_empty(0, dtype=torch.float32)
    if value_format == "fp32":
        return as_bytes(values.to(torch.float32)), no_scales
    if value_format == "bf16":
        # Without a limit the largest floats would round up to infinity.
        limit = min(torch.finfo(torch.bfloat16).max, torch.finfo(values.dtype).max)
        rounded = torch.where(values.abs() == torch.inf, values, values.clamp(-limit, limit)).to(
            torch.bfloat16
        )
        return rounded.view(torch.uint8), no_scales
    if (loops := compiled(values.device.type, kernel)) is not None:
        # Numba has no other dtypes.
        values = values if values.dtype == torch.float64 else values.float()
        assert not isinstance(counts, Tensor)
        return loops.encode_scaled(values, counts, BITS_PER_VALUE[value_format])
    lengths = torch.as_tensor(counts, dtype=torch.int64).to(values.device)
    codes, scales = code_values(values, lengths, value_format)
    return (pack_bits(codes) if value_format == "1bit" else pack_codes(codes, 2)), scales


def code_values(values: Tensor, lengths: Tensor, value_format: str) -> tuple[Tensor, Tensor]:
    """The codes of values, a byte each, and the scales, in formats with scales; ``lengths``, int64,
    says how many values are of each tensor.
    """
    # fp64 sums: a mean of many fp32 magnitudes must not overflow or drift.
    magnitudes = values.to(torch.float64, copy=True).abs_()
    numbers = lengths.clamp(min=1)
    totals = _sums(magnitudes, lengths)
    means = totals / numbers
    if value_format == "1bit":
        return (values > 0).view(torch.uint8), means.to(torch.float32)
    index = torch.arange(lengths.numel(), device=values.device).repeat_interleave(
        lengths, output_size=values.numel()
    )
    is_large = magnitudes >= means.index_select(0, index)
    products = totals + _sums(magnitudes * is_large, lengths)
    squares = numbers + 3 * _sums(is_large.to(torch.float64), lengths)
    # The squared error of each is that of zeros less this. Twice the larger scale may be infinite,
    # twice the mean not.
    scales = products / squares
    fits = (products * products / squares > totals * means) & (scales <= LARGEST_HALF)
    scales = torch.where(fits, scales, means).to(torch.float32)
    codes = (is_large & fits.index_select(0, index)).to(torch.uint8) << 1 | (values > 0)
    return codes, scales


def levels_of(codes: Tensor, value_format: str) -> Tensor:
    """What codes of :func:`code_values` are times the scale of their tensor: fp32."""
    if value_format == "1bit":
        return codes.to(torch.float32).mul_(2).sub_(1)
    large = ((codes >> 1) + 1).to(torch.float32)
    return large.copysign_((codes & 1) - 0.5)


def decode_values(
    data: Tensor,
    counts: Sequence[int],
    scales: Tensor,
    value_format: str,
    out: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Decode the bytes and scales of :func:`encode_values`, into ``out`` if given: shape
    ``[sum(counts)]``, fp32.
    """
    count = sum(counts)
    if value_format in ("fp32", "bf16"):
        # A view as a wider dtype needs aligned storage, which a part of a payload lacks.
        dtype = torch.float32 if value_format == "fp32" else torch.bfloat16
        wide = data[: dtype.itemsize * count].clone().view(dtype)
        return wide.to(torch.float32) if out is None else out.copy_(wide)
    values = data.new_empty(count, dtype=torch.float32) if out is None else out
    if (loops := compiled(data.device.type, kernel)) is not None:
        loops.decode_scaled(data, counts, scales, values, BITS_PER_VALUE[value_format])
        return values
    if value_format == "2bit":
        codes = unpack_codes(data, 2)[:count].view(torch.int8)
        levels = torch.where(codes > 1, 2.0, 1.0).copysign_((codes & 1) - 0.5)
    else:
        levels = torch.where(
            unpack_bits(data[: num_bytes(count)], count).view(torch.bool), 1.0, -1.0
        )
    return values.copy_(levels).mul_(scales.index_select(0, _tensor_index(counts, data.device)))


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    # Unlike a scattered sum, this has a fixed order on a GPU. "Unsafe" does not wait to check the
    # lengths.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


def _tensor_index(counts: Sequence[int], device: torch.device) -> Tensor:
    """The tensor of each value: int32."""
    return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(device)
