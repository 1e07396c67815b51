"""Packs flags and other small codes, the first into the lowest bits, finds set flags, and views
entries as bytes.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# As wide as the codes of so many bits that share a byte, while each has one.
INTEGERS = {1: torch.int64, 2: torch.int32, 4: torch.int16}


def num_bytes(num_bits: int) -> int:
    """Bytes that hold ``num_bits`` bits."""
    return (num_bits + 7) // 8


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's entries in their order: shape ``[bytes]``, uint8; without a copy if
    they lie flat.

    torch views entries as bytes only where their stride is one. That of no entry or a single one
    need not be, as in an empty array of numpy.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flags_num_bytes(size: int) -> int:
    """Bytes of the flags of ``size`` entries: whole words of 64, and one more, so that any 64 flags
    can be read.
    """
    return 8 * (size // 64 + 2)


def pack_bits(flags: Tensor) -> Tensor:
    """Pack flags (shape ``[n]``, bool or uint8 of zeros and ones) into ``[ceil(n / 8)]``, uint8,
    zero-padded.
    """
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    return pack_codes(flags, 1)


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Undo :func:`pack_bits`: shape ``[num_bits]``, uint8 of zeros and ones."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=num_bits, bitorder="little"))
    return unpack_codes(packed, 1)[:num_bits]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 1, 2 or 4 bits (a byte each), the first into the lowest bits; zeros fill the
    last byte.
    """
    together = 8 // bits
    spare = -codes.numel() % together
    padded = torch.nn.functional.pad(codes, (0, spare)) if spare else codes
    # The product has the codes side by side in its last byte, the first in the lowest bits.
    factor = sum(1 << (8 - bits) * place for place in range(1, together + 1))
    return (padded.view(INTEGERS[bits]) * factor).view(torch.uint8)[together - 1 :: together]


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack_codes`: uint8; zeros follow where the last byte was filled."""
    return (
        (packed.unsqueeze(1) >> _places_in_byte(bits, packed.device))
        .bitwise_and_((1 << bits) - 1)
        .flatten()
    )


@lru_cache(maxsize=64)
def _places_in_byte(bits: int, device: torch.device) -> Tensor:
    """Where codes of so many bits begin in a byte: uint8, read-only."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def nonzero_indices(flags: Tensor) -> Tensor:
    """Indices of set flags (shape ``[n]``, bool or uint8 of zeros and ones): shape ``[count]``,
    int64, ascending.
    """
    if flags.device.type == "cpu":
        # numpy searches bools several times faster than torch does.
        return torch.from_numpy(np.flatnonzero(flags.numpy().view(np.bool_)))
    return flags.nonzero().squeeze(1)


def positions_in(marks: Tensor, count: int) -> Tensor:
    """The numbers of the ``count`` marks (bool, ``[n]``) that are set: int64, ascending.

    If more are set, the first; if fewer, others follow. The host of a device does not wait.
    """
    numbers = torch.arange(1, count + 1, device=marks.device)
    return torch.searchsorted(marks.cumsum(0), numbers).clamp_(max=max(marks.numel() - 1, 0))
