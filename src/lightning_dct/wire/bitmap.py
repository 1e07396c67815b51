"""Sorted positions as one flag for each place: the shortest code when more than a quarter of the places is named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dct.wire.bits import check_size, nonzero_indices, num_bytes, pack_bits, unpack_bits
from lightning_dct.wire.positions import PositionCode


@dataclass(frozen=True)
class Bitmap:
    """The code for distinct positions below ``universe``, however many.

    Attributes:
        universe: Number of places a position can name.
    """

    universe: int

    @cached_property
    def num_bits(self) -> int:
        """Size of every message, in bits."""
        return self.universe

    @cached_property
    def num_bytes(self) -> int:
        """Size of every message, in bytes."""
        return num_bytes(self.universe)

    def encode_bits(self, positions: Tensor) -> Tensor:
        """Write positions (shape ``[count]``, int64, distinct), not packed yet: ``[num_bits]``, uint8."""
        flags = torch.zeros(self.universe, dtype=torch.uint8, device=positions.device)
        flags[positions] = 1
        return flags

    def encode(self, positions: Tensor) -> Tensor:
        """Write positions: :meth:`encode_bits`, packed; shape ``[num_bytes]``, uint8."""
        return pack_bits(self.encode_bits(positions))

    def decode_bits(self, bits: Tensor, count: int) -> Tensor:
        """Read positions back.

        Args:
            bits: Shape ``[num_bits]``, uint8 of zeros and ones.
            count: How many positions they hold.

        Returns:
            Shape ``[count]``, int64, ascending.

        Raises:
            ValueError: The message does not hold ``count`` positions.
        """
        positions = nonzero_indices(bits)
        if positions.numel() != count:
            raise ValueError(f"{positions.numel()} positions are marked where the header says {count}")
        return positions

    def decode(self, message: Tensor, count: int) -> Tensor:
        """Read a packed message, shape ``[num_bytes]``; see :meth:`decode_bits`."""
        check_size(message, self.num_bytes)
        return self.decode_bits(unpack_bits(message, self.universe), count)


def shortest_code(universe: int, capacity: int) -> Bitmap | PositionCode:
    """Whichever code writes up to ``capacity`` positions below ``universe`` in fewer bits."""
    bitmap, sparse = Bitmap(universe), PositionCode(universe, capacity)
    return sparse if sparse.num_bits < bitmap.num_bits else bitmap
