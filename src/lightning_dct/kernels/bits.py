"""Packs flags, eight to a byte with the first in the lowest bit, and finds set flags."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def num_bytes(num_bits: int) -> int:
    """Bytes that hold ``num_bits`` bits."""
    return (num_bits + 7) // 8


def flags_num_bytes(size: int) -> int:
    """Bytes of the flags of ``size`` entries: whole words of 64, and one more, so that any 64 flags can be read."""
    return 8 * (size // 64 + 2)


def pack_bits(flags: Tensor) -> Tensor:
    """Pack flags (shape ``[n]``, bool or uint8 of zeros and ones) into ``[ceil(n / 8)]``, uint8, zero-padded."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    spare = -flags.numel() % 8
    padded = torch.nn.functional.pad(flags, (0, spare)) if spare else flags
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(torch.uint8).view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Undo :func:`pack_bits`: shape ``[num_bits]``, uint8 of zeros and ones."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=num_bits, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten()[:num_bits]


def nonzero_indices(flags: Tensor) -> Tensor:
    """Indices of set flags (shape ``[n]``, bool or uint8 of zeros and ones): shape ``[count]``, int64, ascending."""
    if flags.device.type == "cpu":
        # numpy searches bools several times faster than torch does.
        return torch.from_numpy(np.flatnonzero(flags.numpy().view(np.bool_)))
    return flags.nonzero().squeeze(1)


def pack_flags(marks: Tensor) -> Tensor:
    """Marks (shape ``[n]``, bool or uint8 of zeros and ones) as flags: uint8, ``[flags_num_bytes(n)]``."""
    packed = pack_bits(marks)
    return torch.nn.functional.pad(packed, (0, flags_num_bytes(marks.numel()) - packed.numel()))
