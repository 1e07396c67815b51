"""Sorted positions as one flag for each place: the shortest code when more than a quarter of the places is named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dct.wire.bits import num_bytes, pack_bits, places, unpack_bits
from lightning_dct.wire.positions import PositionCode


@dataclass(frozen=True)
class Bitmap:
    """The code for distinct positions below ``universe``, however many.

    Attributes:
        universe: Number of places a position can name.
    """

    universe: int

    @cached_property
    def num_bytes(self) -> int:
        """Size of every message, in bytes."""
        return num_bytes(self.universe)

    def encode(self, positions: Tensor) -> Tensor:
        """Write positions.

        Args:
            positions: Shape ``[count]``, int64, distinct.

        Returns:
            Shape ``[num_bytes]``, uint8.
        """
        flags = torch.zeros(self.universe, dtype=torch.bool, device=positions.device)
        flags[positions] = True
        return pack_bits(flags)

    def decode(self, message: Tensor, count: int) -> Tensor:
        """Read positions back.

        Args:
            message: Shape ``[num_bytes]``, uint8.
            count: How many positions it holds.

        Returns:
            Shape ``[count]``, int64, ascending.

        Raises:
            ValueError: The message does not hold ``count`` positions.
        """
        positions = places(unpack_bits(message, self.universe))
        if positions.numel() != count:
            raise ValueError(f"{positions.numel()} positions are marked where the header says {count}")
        return positions


def shortest_code(universe: int, capacity: int) -> Bitmap | PositionCode:
    """Whichever code writes up to ``capacity`` positions below ``universe`` in fewer bytes."""
    bitmap, sparse = Bitmap(universe), PositionCode(universe, capacity)
    return sparse if sparse.num_bytes < bitmap.num_bytes else bitmap
