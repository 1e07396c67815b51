"""Codes for sorted positions: Elias-Fano with about ``2 + log2(N / K)`` bits each, or a bitmap if
that is shorter.

Elias-Fano stores the low ``b`` bits of a position as they are. The high bits grow slowly from one
position to the next, so they are stored as flags: the ``i``-th position sets flag ``high + i``. The
index of the ``i``-th set flag, less ``i``, is the high part again.

    positions (b = 2)     1        6        7       13
    high, low             0, 01    1, 10    1, 11   3, 01
    flag set at           0+0=0    1+1=2    1+2=3   3+3=6      flags 1011001

If more than about a quarter of all positions are stored, a bitmap with one flag for each is
shorter.

At 1% density a position takes 8.6 bits. The entropy is 8.1 bits, and 16-bit offsets in blocks would
take 16.

Source: P. Elias, *Efficient storage and retrieval by content and address of static files*, J. ACM
21(2), 1974; R. Fano, *On the number of bits required to implement an associative memory*, MIT
Project MAC memo 61, 1971.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dct.kernels import compiled
from lightning_dct.kernels.bits import (
    nonzero_indices,
    num_bytes,
    pack_bits,
    unpack_bits,
)


class PayloadError(ValueError):
    """A payload that is corrupt, or was made for another layout."""


class reading(AbstractContextManager[None]):
    """Names the source in every PayloadError that is raised inside."""

    __slots__ = ("_source",)

    def __init__(self, source: str) -> None:
        self._source = source

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PayloadError):
            raise PayloadError(f"{self._source}: {error}.") from error


@dataclass(frozen=True)
class PositionCode:
    """The shorter code for up to ``capacity`` positions below ``universe``.

    A message's size depends on the capacity and not on the number of positions in it, because
    collectives need equal sizes. Positions have shape ``[count]``, int64, ascending and distinct.
    """

    universe: int
    capacity: int

    @cached_property
    def low_bits(self) -> int:
        """Bits of a position that are stored as they are, for the smallest message; 0 if a bitmap
        is not longer.
        """
        # One more low bit costs `capacity` bits and halves the flags. It pays with more than two
        # flags a position.
        largest = max(self.universe - 1, 0)
        enough = 2 * self.capacity
        bits = max(largest.bit_length() - enough.bit_length(), 0)
        bits = min(bits + (largest >> bits > enough), max(self.universe.bit_length() - 1, 0))
        return bits if self._num_flags(bits) + bits * self.capacity < self.universe else 0

    @property
    def is_bitmap(self) -> bool:
        """Whether the code is a bitmap: without low bits, Elias-Fano has more flags than there are
        positions.
        """
        return not self.low_bits

    @cached_property
    def num_flags(self) -> int:
        """Flags that hold the high parts, or one for each position."""
        return self.universe if self.is_bitmap else self._num_flags(self.low_bits)

    @cached_property
    def num_bits(self) -> int:
        """Size of every message, in bits."""
        return self.num_flags + self.low_bits * self.capacity

    @cached_property
    def num_bytes(self) -> int:
        """Size of every message, in bytes."""
        return num_bytes(self.num_bits)

    def _num_flags(self, low_bits: int) -> int:
        return self.capacity + (max(self.universe - 1, 0) >> low_bits) + 1

    def encode_bits(self, positions: Tensor) -> Tensor:
        """The flags, then the low bits as ``low_bits`` planes of ``capacity``: shape
        ``[num_bits]``, uint8.
        """
        count = positions.numel()
        device = positions.device
        bits = torch.zeros(self.num_bits, dtype=torch.uint8, device=device)
        flags = (
            positions
            if self.is_bitmap
            else (positions >> self.low_bits) + torch.arange(count, device=device)
        )
        if device.type == "cpu":
            bits.numpy()[flags.numpy()] = 1  # several times faster than torch
        else:
            bits[flags] = 1
        planes = bits[self.num_flags :].view(self.low_bits, self.capacity)
        if device.type == "cpu":
            for number, plane in enumerate(planes):
                plane[:count] = (positions >> number) & 1
        else:
            planes[:, :count] = (positions >> self._numbers_of_planes(device)) & 1
        return bits

    def _numbers_of_planes(self, device: torch.device) -> Tensor:
        return torch.arange(self.low_bits, device=device).unsqueeze(1)

    def decode_bits(self, bits: Tensor, count: int) -> Tensor:
        """Read ``count`` positions from an unpacked message (shape ``[num_bits]``, uint8): int64,
        ascending.

        Raises:
            PayloadError: The message does not hold ``count`` ascending positions below
                ``universe``.
        """
        flags = nonzero_indices(bits[: self.num_flags])
        check_count(flags.numel(), count)
        if self.is_bitmap:
            return flags
        planes = bits[self.num_flags :].view(self.low_bits, self.capacity)[:, :count]
        positions = (flags - torch.arange(count, device=bits.device)) << self.low_bits
        for number, plane in enumerate(planes):
            positions |= plane.long() << number
        if count and (
            int(positions[-1]) >= self.universe or not bool((positions[1:] > positions[:-1]).all())
        ):
            raise self.not_ascending()
        return positions

    def not_ascending(self) -> PayloadError:
        """What is raised if a message's positions are not ascending below ``universe``."""
        return PayloadError(
            f"the positions are corrupt: they are not ascending below {self.universe}"
        )

    def encode(self, positions: Tensor) -> Tensor:
        """The message: shape ``[num_bytes]``, uint8."""
        return pack_bits(self.encode_bits(positions))

    def decode(self, message: Tensor, count: int) -> Tensor:
        """Read a packed message, shape ``[num_bytes]``; see :meth:`decode_bits`."""
        if message.numel() != self.num_bytes:
            raise PayloadError(
                f"the positions take {self.num_bytes} bytes, but {message.numel()} have arrived"
            )
        return self.decode_bits(unpack_bits(message, self.num_bits), count)

    def encode_flags(self, flags: Tensor, kernel: str) -> Tensor:
        """The message, shape ``[num_bytes]``, uint8, of the positions whose flags (packed) are
        set.
        """
        if self.is_bitmap:
            return flags[: self.num_bytes]
        if (loops := compiled(flags.device.type, kernel)) is not None:
            return loops.encode_elias_fano(
                flags, self.num_bits, self.num_flags, self.low_bits, self.capacity
            )
        return self.encode(nonzero_indices(unpack_bits(flags, self.universe)))

    def decode_flags(
        self, message: Tensor, count: int, flags: Tensor, sizes: Sequence[int], kernel: str
    ) -> list[int]:
        """Read a message, shape ``[num_bytes]``, uint8, into flags, which are zero before.

        Returns:
            How many of its ``count`` positions are in each of the tensors of these sizes, one after
            the other.

        Raises:
            PayloadError: The message does not hold ``count`` ascending positions below
                ``universe``.
        """
        if self.is_bitmap:
            flags[: self.num_bytes] = message
            if self.universe % 8:  # flags behind the end are no positions
                flags[self.num_bytes - 1] &= (1 << self.universe % 8) - 1
        elif (loops := compiled(message.device.type, kernel)) is not None:
            lengths = self.universe, self.num_flags, self.low_bits, self.capacity
            if loops.decode_elias_fano(message, *lengths, flags) < 0:
                raise self.not_ascending()
        else:
            flags.copy_(
                pack_bits(
                    flags.new_zeros(8 * flags.numel()).index_fill_(
                        0, self.decode(message, count), 1
                    )
                )
            )
        counts = count_flags(flags, sizes, kernel)
        check_count(sum(counts), count)
        return counts


def check_count(marked: int, count: int) -> None:
    """Refuse a message that marks another number of positions than its header says
    (PayloadError).
    """
    if marked != count:
        raise PayloadError(
            f"the positions are corrupt: {marked} positions are marked, but the header says {count}"
        )


def count_flags(flags: Tensor, sizes: Sequence[int], kernel: str) -> list[int]:
    """How many of packed flags are set in each of the tensors of these sizes, one after the
    other.
    """
    if (loops := compiled(flags.device.type, kernel)) is not None:
        return loops.count_flags(flags, sizes)
    marks = unpack_bits(flags, sum(sizes))
    return (
        torch.stack([part.count_nonzero() for part in marks.split(list(sizes))]).tolist()
        if sizes
        else []
    )
