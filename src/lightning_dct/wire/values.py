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

Error feedback keeps the rounding error in the residual, so few bits are enough. An infinite or NaN value makes the
scale of its tensor infinite or NaN, so the other ranks receive it in every format.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_dct.kernels import compiled
from lightning_dct.kernels.bits import as_bytes, num_bytes, pack_bits, places_in_byte, unpack_bits

BITS_PER_VALUE: dict[str, int] = {"fp32": 32, "bf16": 16, "2bit": 2, "1bit": 1}
SCALED_FORMATS = ("2bit", "1bit")
# As wide as the codes that share a byte, while each has one.
INTEGERS = {4: torch.int16, 2: torch.int32}
# 2bit: the largest scale of which twice is finite.
LARGEST_HALF = torch.finfo(torch.float32).max / 2


def encode_tensors(values: Tensor, counts: Sequence[int], value_format: str, kernel: str) -> tuple[Tensor, Tensor]:
    """:func:`encode_values` of ``counts`` values of each tensor."""
    if value_format in SCALED_FORMATS and (loops := compiled(values.device.type, kernel)) is not None:
        values = values if values.dtype == torch.float64 else values.float()  # numba has no other dtypes
        return (loops.encode_signs if value_format == "1bit" else loops.encode_levels)(values, counts)
    return encode_values(values, _tensor_index(counts, values.device), len(counts), value_format)


def decode_tensors(
    data: Tensor, counts: Sequence[int], scales: Tensor, value_format: str, values: Tensor, kernel: str
) -> None:
    """Decode the bytes of :func:`encode_tensors` into ``values``: shape ``[sum(counts)]``, fp32."""
    if value_format in SCALED_FORMATS and (loops := compiled(data.device.type, kernel)) is not None:
        (loops.decode_signs if value_format == "1bit" else loops.decode_levels)(data, counts, scales, values)
    else:
        index = _tensor_index(counts, data.device)
        values.copy_(decode_values(data, values.numel(), index, scales, value_format))


def _tensor_index(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(device)


def encode_values(values: Tensor, tensor_index: Tensor, num_tensors: int, value_format: str) -> tuple[Tensor, Tensor]:
    """Encode values.

    Args:
        values: Shape ``[count]``, floating point.
        tensor_index: Shape ``[count]``, int32 or int64, ascending: the tensor of each value, for scales.
        num_tensors: The number of tensors.
        value_format: One of ``fp32``, ``bf16``, ``2bit``, ``1bit``.

    Returns:
        The values' bytes (uint8) and one fp32 scale a tensor (shape ``[num_tensors]``, or ``[0]`` without scales).
    """
    no_scales = values.new_empty(0, dtype=torch.float32)
    if value_format == "fp32":
        return as_bytes(values.to(torch.float32)), no_scales
    if value_format == "bf16":
        # Without a limit the largest floats would round up to infinity.
        limit = min(torch.finfo(torch.bfloat16).max, torch.finfo(values.dtype).max)
        rounded = torch.where(values.abs() == torch.inf, values, values.clamp(-limit, limit)).to(torch.bfloat16)
        return rounded.view(torch.uint8), no_scales
    # fp64 sums: a mean of many fp32 magnitudes must not overflow or drift.
    magnitudes = values.to(torch.float64, copy=True).abs_()
    tensors = torch.arange(num_tensors + 1, dtype=tensor_index.dtype, device=values.device)
    lengths = torch.searchsorted(tensor_index, tensors).diff()
    counts = lengths.clamp(min=1)
    totals = _sums(magnitudes, lengths)
    means = totals / counts
    if value_format == "1bit":
        return pack_bits(values > 0), means.to(torch.float32)
    return _two_levels(values, magnitudes, tensor_index, lengths, counts, totals, means)


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    # Unlike a scattered sum, this has a fixed order on a GPU. "Unsafe" does not wait to check the lengths.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


def _two_levels(
    values: Tensor,
    magnitudes: Tensor,
    tensor_index: Tensor,
    lengths: Tensor,
    counts: Tensor,
    totals: Tensor,
    means: Tensor,
) -> tuple[Tensor, Tensor]:
    """The codes of 2bit, packed, and its scales."""
    is_large = magnitudes >= means.index_select(0, tensor_index)
    products = totals + _sums(magnitudes * is_large, lengths)
    squares = counts + 3 * _sums(is_large.to(torch.float64), lengths)
    # The squared error of each is that of zeros less this. Twice the larger scale may be infinite, twice the mean not.
    scales = products / squares
    fits = (products * products / squares > totals * means) & (scales <= LARGEST_HALF)
    scales = torch.where(fits, scales, means).to(torch.float32)
    codes = (is_large & fits.index_select(0, tensor_index)).to(torch.uint8) << 1 | (values > 0)
    return pack_codes(codes, 2), scales


def decode_values(data: Tensor, count: int, tensor_index: Tensor, scales: Tensor, value_format: str) -> Tensor:
    """Decode ``count`` values (fp32) from their bytes, with the index and scales of :func:`encode_values`."""
    if value_format in ("fp32", "bf16"):
        # A view as a wider dtype needs aligned storage, which a part of a payload lacks.
        dtype = torch.float32 if value_format == "fp32" else torch.bfloat16
        return data[: dtype.itemsize * count].clone().view(dtype).to(torch.float32)
    if value_format == "2bit":
        codes = unpack_codes(data, 2)[:count].view(torch.int8)
        values = torch.where(codes > 1, 2.0, 1.0).copysign_((codes & 1) - 0.5)
    else:
        values = torch.where(unpack_bits(data[: num_bytes(count)], count).view(torch.bool), 1.0, -1.0)
    return values.to(torch.float32).mul_(scales.index_select(0, tensor_index))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 2 or 4 bits (uint8), the first into the lowest bits; the last byte is padded with zeros."""
    together = 8 // bits
    spare = -codes.numel() % together
    padded = torch.nn.functional.pad(codes, (0, spare)) if spare else codes
    # The product has the codes side by side in its last byte, the first in the lowest bits.
    factor = sum(1 << (8 - bits) * place for place in range(1, together + 1))
    return (padded.view(INTEGERS[bits]) * factor).view(torch.uint8)[together - 1 :: together]


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack_codes`; zeros follow where the last byte was padded."""
    return (packed.unsqueeze(1) >> places_in_byte(bits, packed.device)).bitwise_and_((1 << bits) - 1).flatten()
