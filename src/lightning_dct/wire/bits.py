"""Flags: eight to a byte and back, lowest bit first, and where they are set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def num_bytes(num_bits: int) -> int:
    """Bytes that hold ``num_bits`` bits."""
    return (num_bits + 7) // 8


def check_size(message: Tensor, num_bytes: int) -> None:
    """Refuse a message of another size.

    Raises:
        ValueError: It does not have ``num_bytes`` bytes.
    """
    if message.numel() != num_bytes:
        raise ValueError(f"the positions take {num_bytes} bytes and here are {message.numel()}")


def pack_bits(flags: Tensor) -> Tensor:
    """Pack flags, the first one into the lowest bit of the first byte.

    Args:
        flags: Shape ``[n]``, bool or uint8 of zeros and ones.

    Returns:
        Shape ``[ceil(n / 8)]``, uint8; the last byte is filled up with zeros.
    """
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    spare = -flags.numel() % 8
    padded = torch.nn.functional.pad(flags, (0, spare)) if spare else flags
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(torch.uint8).view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Undo :func:`pack_bits`.

    Args:
        packed: Shape ``[ceil(num_bits / 8)]``, uint8.
        num_bits: How many flags to return.

    Returns:
        Shape ``[num_bits]``, uint8 of zeros and ones.
    """
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=num_bits, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten()[:num_bits]


def nonzero_indices(flags: Tensor) -> Tensor:
    """Where flags are set.

    Args:
        flags: Shape ``[n]``, bool or uint8 of zeros and ones.

    Returns:
        Shape ``[count]``, int64, ascending.
    """
    if flags.device.type == "cpu":
        # numpy's search of bools is several times faster than torch's.
        return torch.from_numpy(np.flatnonzero(flags.numpy().view(np.bool_)))
    return flags.nonzero().squeeze(1)
