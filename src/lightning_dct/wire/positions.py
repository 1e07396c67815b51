"""Sorted positions in about ``2 + log2(N / K)`` bits each: the Elias-Fano code.

A position is cut in two. Its low ``b`` bits are stored as they are. Its high bits grow slowly from one position
to the next, so they are stored as a row of flags: the ``i``-th position sets flag ``high + i``. Reading back, the
``i``-th set flag, less ``i``, is the high part.

    positions (b = 2)     1        6        7       13
    high, low             0, 01    1, 10    1, 11   3, 01
    flag set at           0+0=0    1+1=2    1+2=3   3+3=6      flags 1011001

Where more than about a quarter of all places are named, a flag for each place is shorter, and that is what is written.

At 1% density the code takes 8.6 bits a position and the entropy of the positions is 8.1; 16-bit offsets in blocks
would take 16. Both directions are a handful of data-parallel operations, so the code is the same on CPU and GPU.

Source: P. Elias, *Efficient storage and retrieval by content and address of static files*, J. ACM 21(2), 1974;
R. Fano, *On the number of bits required to implement an associative memory*, MIT Project MAC memo 61, 1971.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dct.wire.bits import check_size, nonzero_indices, num_bytes, pack_bits, unpack_bits


@dataclass(frozen=True)
class PositionCode:
    """The code for up to ``capacity`` distinct positions below ``universe``.

    Attributes:
        universe: Number of places a position can name, ``N``.
        capacity: Most positions one message can hold, ``K``. The size of a message depends on it, not on how many
            positions it happens to hold, because collectives want equal sizes from all ranks.
    """

    universe: int
    capacity: int

    @cached_property
    def is_bitmap(self) -> bool:
        """Whether there is a flag for each place instead, because that is no longer."""
        bits = self._best_low_bits
        return self.universe <= self._num_flags(bits) + bits * self.capacity

    @cached_property
    def low_bits(self) -> int:
        """Bits of a position stored as they are."""
        return 0 if self.is_bitmap else self._best_low_bits

    @cached_property
    def _best_low_bits(self) -> int:
        """The number that makes a message smallest."""
        # One more bit costs `capacity` bits and halves the flags: it pays while there are more than two for each.
        largest, enough = max(self.universe - 1, 0), 2 * self.capacity
        bits = max(largest.bit_length() - enough.bit_length(), 0)
        return min(bits + (largest >> bits > enough), max(self.universe.bit_length() - 1, 0))

    @cached_property
    def num_flags(self) -> int:
        """Flags that hold the high parts, or one for each place."""
        return self.universe if self.is_bitmap else self._num_flags(self.low_bits)

    @cached_property
    def num_bits(self) -> int:
        """Size of every message, in bits."""
        return self.num_flags + self.low_bits * self.capacity

    @cached_property
    def num_bytes(self) -> int:
        """Size of every message, in bytes."""
        return num_bytes(self.num_bits)

    @cached_property
    def _low_dtype(self) -> torch.dtype:
        # The narrowest that holds the low bits: there are as many walks over them as bits.
        for dtype in (torch.uint8, torch.int16, torch.int32):
            if self.low_bits <= torch.iinfo(dtype).max.bit_length():
                return dtype
        return torch.int64

    def _num_flags(self, low_bits: int) -> int:
        return self.capacity + (max(self.universe - 1, 0) >> low_bits) + 1

    def encode_bits(self, positions: Tensor) -> Tensor:
        """Write positions, not packed yet.

        Args:
            positions: Shape ``[count]``, int64, ascending and distinct, ``count <= capacity``.

        Returns:
            Shape ``[num_bits]``, uint8 of zeros and ones: the flags, then the low bits as ``low_bits`` planes of
            ``capacity``.
        """
        count, device = positions.numel(), positions.device
        bits = torch.zeros(self.num_bits, dtype=torch.uint8, device=device)
        if self.is_bitmap:
            bits[positions] = 1
            return bits
        bits[(positions >> self.low_bits) + torch.arange(count, device=device)] = 1
        planes = bits[self.num_flags :].view(self.low_bits, self.capacity)
        low = (positions & ((1 << self.low_bits) - 1)).to(self._low_dtype)
        for plane in range(self.low_bits):
            planes[plane, :count] = (low >> plane) & 1
        return bits

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
            ValueError: The message does not hold ``count`` ascending positions below ``universe``.
        """
        raised = nonzero_indices(bits[: self.num_flags])
        if raised.numel() != count:
            raise ValueError(f"{raised.numel()} positions are marked where the header says {count}")
        if self.is_bitmap:
            return raised
        planes = bits[self.num_flags :].view(self.low_bits, self.capacity)[:, :count].to(self._low_dtype)
        low = torch.zeros(count, dtype=self._low_dtype, device=bits.device)
        for plane in range(self.low_bits):
            low |= planes[plane] << plane
        positions = ((raised - torch.arange(count, device=bits.device)) << self.low_bits) | low
        if count and (int(positions[-1]) >= self.universe or not bool((positions[1:] > positions[:-1]).all())):
            raise ValueError(f"positions are not ascending below {self.universe}")
        return positions

    def decode(self, message: Tensor, count: int) -> Tensor:
        """Read a packed message, shape ``[num_bytes]``; see :meth:`decode_bits`."""
        check_size(message, self.num_bytes)
        return self.decode_bits(unpack_bits(message, self.num_bits), count)
