"""Packs and unpacks payloads on a GPU, without the host waiting for a number.

The bytes are those of :mod:`lightning_dct.wire.payload`, but shapes do not depend on data. Entries are in a fixed
number of slots. Which slots are used, and whether a received payload is valid, are tensors on the device. Indices from
a payload always lie within bounds, whatever its bytes.

Launching an operation takes a host about as long as a small operation takes the GPU. So payloads for several owners,
and from several senders, are packed and unpacked together, in as many operations as one payload.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.kernels.bits import pack_marks, places_in_byte
from lightning_dct.wire.payload import FORMAT_CODES, MAGIC, PayloadLayout, write_header
from lightning_dct.wire.positions import PayloadError
from lightning_dct.wire.values import BITS_PER_VALUE, SCALED_FORMATS, decode_units, values_num_bytes

# A payload has a multiple of eight slots, so that its values start with a byte in any format. Its last slot is never
# used, so that each entry can be compared with the next slot.
SLOTS = 8
# Of a fp32 number, all set if it is infinite or NaN.
EXPONENT = 0x7F800000
# More than any number of flags.
INVALID = 1 << 40
# Entries of all payloads together whose bitmaps are read at once; each takes about 30 bytes.
AT_ONCE = 1 << 23


def slots_of(layout: PayloadLayout) -> int:
    """The slots of a payload of this layout."""
    return (layout.capacity // SLOTS + 1) * SLOTS if layout.capacity else 0


def headers_of(layouts: Sequence[PayloadLayout]) -> Tensor:
    """The headers of payloads without entries: uint8, ``[payloads, 12]``."""
    headers = (write_header(MAGIC, FORMAT_CODES[layout.value_format], 0, layout.fingerprint) for layout in layouts)
    return torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8).view(len(layouts), -1)


@lru_cache(maxsize=64)
def _counted(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def numbers(count: int, device: torch.device) -> Tensor:
    """The numbers from 0 to below ``count``: int64, read-only, in memory that all plans share."""
    return _counted(1 << count.bit_length(), device)[:count]


def running_counts(flags: Tensor) -> Tensor:
    """``flags.cumsum(1)`` of flags of shape ``[n, k]``: int64.

    In one long row, because a GPU scans each row of several by a single block: on an H200 two rows of four million
    flags took 7.5 ms, and one row of eight million 0.2 ms.
    """
    counts = flags.flatten().cumsum(0).view(flags.shape)
    if len(flags) > 1:
        counts[1:].sub_(counts[:-1, -1:].clone())
    return counts


class Verdict(NamedTuple):
    """Of one payload of one sender."""

    is_valid: bool  # of its layout
    is_finite: bool  # its scales, which one infinite or NaN entry makes so


class Payloads:
    """The layouts of ``S`` payloads, one after the other, with the same value format.

    Attributes:
        num_bytes: Of all payloads together.
        eight: Shape ``[8]``, uint8: 0 to 7.
        zero: Shape ``[1, 1]``, uint8.
    """

    def __init__(self, layouts: Sequence[PayloadLayout], device: torch.device) -> None:
        self.layouts, self.value_format = tuple(layouts), layouts[0].value_format
        self.num_bytes = sum(layout.num_bytes for layout in layouts)
        self.eight = places_in_byte(1, device)
        self.zero = torch.zeros(1, 1, dtype=torch.uint8).to(device)
        self._headers = headers_of(layouts).view(torch.int32).tolist()

    def split(self, payloads: Tensor) -> tuple[list[Sequence[Tensor]], Tensor, Tensor]:
        """The parts of payloads, ``[n, num_bytes]``, uint8, one row a sender; a PayloadError if they have another size.

        Of each kind the part of each payload, the words of all headers and scales (shape ``[n, 3 S + T]``, int32), and
        the scales (``[n, T]``, fp32); ``T`` is 0 in formats without.
        """
        if payloads.shape[1] != self.num_bytes:
            raise PayloadError(f"the payload has {payloads.shape[1]} bytes, the layout says {self.num_bytes}")
        every = payloads.split([size for layout in self.layouts for size in layout.part_sizes], dim=1)
        words = torch.cat([*every[0::5], *every[1::5]], dim=1).view(torch.int32)
        return [every[kind::5] for kind in range(5)], words, words[:, 3 * len(self.layouts) :].view(torch.float32)

    def verdicts(self, told: Sequence[int]) -> list[Verdict]:
        """What is wrong with payloads; each sender tells the words of :meth:`split`, then the numbers of flags."""
        found, count = [], len(self.layouts)
        width = 4 * count + sum(layout.num_scales for layout in self.layouts)
        for row in (told[start : start + width] for start in range(0, len(told), width)):
            scales = iter(row[3 * count : -count])
            parts = zip(self.layouts, self._headers, range(0, 3 * count, 3), row[-count:], strict=True)
            for layout, header, first, marks in parts:
                # A count that needs all 32 bits is negative here, and is never the number of marks.
                is_valid = row[first : first + 3] == [header[0], marks, header[2]] and marks <= layout.capacity
                own = islice(scales, layout.num_scales)
                found.append(Verdict(is_valid, all(scale & EXPONENT != EXPONENT for scale in own)))
        return found


class Arrived(NamedTuple):
    """The contents of the payloads of ``n`` senders."""

    positions: Tensor  # shape `[n, slots]`, int64: counted through all payloads; any valid index in unused slots
    values: Tensor  # shape `[n, slots]`, fp32; zero in unused slots
    in_use: Tensor  # shape `[n, slots]`, bool
    dense: Tensor  # shape `[n, dense bytes]`, uint8: the tensors sent dense, one after the other
    told: Tensor  # shape `[n, 4 payloads + scales]`, int64: see :meth:`Payloads.verdicts`


class SideBySide(Payloads):
    """Payloads of ``T`` tensors with ``K`` slots in all, and their constants, copied to a device once.

    Attributes:
        slots: Of each payload.
        numbers: Shape ``[K]``, int64: 0 to below ``K``, which all plans share.
        spare: Shape ``[K]``, int64: an index for each unused slot, distinct if there are enough.
        offsets: Shape ``[K]`` or ``[1]``, int64: where each slot's flag is in a row that begins with a zero, less the
            high part.
    """

    def __init__(self, layouts: Sequence[PayloadLayout], device: torch.device) -> None:
        super().__init__(layouts, device)
        self.slots = [slots_of(layout) for layout in layouts]
        codes = [layout.position_code for layout in layouts]
        # Low bits are coded byte by byte.
        dtypes = {code.low_dtype for code in codes if code.low_bits and code.capacity}
        self.low_dtype = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.uint8)
        self.low_bytes = self.low_dtype.itemsize if dtypes else 0
        edges, places, flags = (
            torch.tensor([0, *accumulate(counts)])
            for counts in (self.slots, [code.universe for code in codes], [code.num_flags for code in codes])
        )
        self.num_flags, num_slots, size = int(flags[-1]), int(edges[-1]), int(places[-1])
        self.numbers = self.spare = numbers(num_slots, device)
        if num_slots > size:
            self.spare = self.numbers.clamp(max=max(size - 1, 0))
        if len(codes) == 1:
            # Of a bitmap, a flag's index is the high part alone.
            self.offsets = numbers(2 if codes[0].is_bitmap else num_slots + 1, device)[1:]
        else:
            payload = torch.arange(len(codes)).repeat_interleave(edges.diff())
            is_coded = torch.tensor([not code.is_bitmap for code in codes])
            number = (torch.arange(num_slots) - edges[payload]) * is_coded[payload]
            self._payload, self.offsets = payload.to(device), (number + flags[payload] + 1).to(device)
        low_bits = torch.tensor([code.low_bits for code in codes])
        self._low_bits, self._first, self._ends = (part.to(device) for part in (low_bits, places[:-1], places[1:]))
        self._starts, self._flag_edges = edges[:-1].to(device), flags.to(device)
        self._pair_edges = edges.clamp(max=max(num_slots - 1, 0)).to(device)
        sizes = chain.from_iterable(layout.tensor_sizes for layout in layouts)
        self._tensor_ends = torch.tensor([*accumulate(sizes)]).to(device)

    def of_slots(self, numbers: Tensor) -> Tensor:
        """Numbers of each payload (shape ``[..., S]``) for each slot: ``[..., K]``, or as they are for one payload."""
        return numbers if len(self.layouts) == 1 else numbers[..., self._payload]

    def in_use(self, counts: Tensor) -> Tensor:
        """Which slots are used (bool, ``[..., K]``) by so many entries of each payload (``[..., S]``)."""
        return self.numbers < self.of_slots(counts if len(self.layouts) == 1 else counts + self._starts)

    def unpack(self, payloads: Tensor) -> Arrived:
        """Unpack payloads, which :meth:`split` describes."""
        (_, _, positions, values, dense), words, scales = self.split(payloads)
        local, in_use, raised = self._decode_positions(positions)
        # Unused slots have the end as position, so the position of a used slot must be below that of the next slot.
        ends, one = self.of_slots(self._ends), len(self.layouts) == 1
        places = torch.where(in_use, local if one else local + self.of_slots(self._first), ends)
        wrong = (places + in_use)[:, :-1] > places[:, 1:]
        if one:
            wrong = wrong.sum(1, keepdim=True)
        else:
            before = torch.cat([self.zero.expand(len(payloads), 1), wrong], dim=1).cumsum(1, dtype=torch.int32)
            wrong = before[:, self._pair_edges].diff(dim=1)
        told = torch.cat([words, raised.sub(wrong, alpha=INVALID)], dim=1)
        places = torch.where(places < ends, places, self.spare)
        # Each payload's values, padded to the bytes of its slots.
        padded = []
        for part, slots in zip(values, self.slots, strict=True):
            width = values_num_bytes(self.value_format, slots) - part.shape[1]
            padded += [part, self.zero.expand(len(payloads), width)]
        units = decode_units(torch.cat(padded, dim=1).flatten(), places.numel(), self.value_format).view_as(places)
        if self.value_format in SCALED_FORMATS:
            units.mul_(scales.gather(1, torch.searchsorted(self._tensor_ends, places, right=True)))
        return Arrived(places, torch.where(in_use, units, 0.0), in_use, torch.cat(list(dense), dim=1), told)

    def encode_positions(self, positions: Tensor, in_use: Tensor) -> Tensor:
        """:meth:`PositionCode.encode`, payload by payload: uint8.

        ``positions`` (``[K]``, int64) are each slot's in its payload, anything in unused slots.
        """
        codes, local = [layout.position_code for layout in self.layouts], torch.where(in_use, positions, 0)
        # The first flag is for unused slots, and is not sent.
        flag = torch.where(in_use, (local >> self.of_slots(self._low_bits)) + self.offsets, 0)
        flags = torch.zeros(1 + self.num_flags, dtype=torch.uint8, device=local.device).scatter_(0, flag, 1)
        flags_of = flags[1:].split([code.num_flags for code in codes])
        # One byte a bit: the lowest bits in the first plane.
        low = local.view(torch.uint8).view(-1, 8)[:, : self.low_bytes]
        planes = ((low.unsqueeze(2) >> self.eight) & 1).flatten(1).t()
        parts = []
        for code, own_flags, own_planes in zip(codes, flags_of, planes.split(self.slots, dim=1), strict=True):
            parts += [own_flags, *own_planes[: code.low_bits, : code.capacity].unbind()]
            parts.append(self.zero.expand(1, 8 * code.num_bytes - code.num_bits).squeeze(0))
        return pack_marks(torch.cat(parts))

    def _decode_positions(self, messages: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Decode the positions of ``n`` senders, ``[n, bytes]`` in each payload.

        Returns indices into each payload (shape ``[n, K]``, int64, not negative; anything in unused slots), which slots
        are used (``[n, K]``, bool), and the number of set flags (``[n, S]``).
        """
        message = messages[0] if len(messages) == 1 else torch.cat(list(messages), dim=1)
        bits = ((message.unsqueeze(2) >> self.eight) & 1).flatten(1)
        senders, start = len(message), 0
        flags = [self.zero.expand(senders, 1)]
        # By plane, payload by payload, padded with zeros to the same number of planes and to all slots.
        by_plane: list[list[Tensor]] = [[] for _ in range(8 * self.low_bytes)]
        for layout, slots in zip(self.layouts, self.slots, strict=True):
            code = layout.position_code
            flags.append(bits[:, start : start + code.num_flags])
            for number, plane in enumerate(by_plane):
                width = code.capacity * (number < code.low_bits)
                first = start + code.num_flags + number * code.capacity
                plane += [bits[:, first : first + width], self.zero.expand(senders, slots - width)]
            start += 8 * code.num_bytes
        # The number of set flags before each; integer sums are the same in any order.
        before = running_counts(torch.cat(flags, dim=1))
        if len(self.layouts) == 1:
            counts, wanted = before[:, -1:], before[:, :1] + self.numbers
        else:
            at_edges = before[:, self._flag_edges]
            counts = at_edges.diff(dim=1)
            wanted = self.of_slots(at_edges[:, :-1] - self._starts) + self.numbers
        high = torch.searchsorted(before, wanted, right=True) - self.offsets
        local = high << self.of_slots(self._low_bits)
        if self.low_bytes:
            stacked = torch.cat([*chain.from_iterable(by_plane)], dim=1).view(senders, self.low_bytes, 8, -1)
            low = (stacked << self.eight.view(8, 1)).sum(2, dtype=torch.uint8).mT.contiguous()
            local = local | low.view(self.low_dtype).squeeze(2)
        return local, self.in_use(counts), counts


class Bitmaps(Payloads):
    """The layouts of ``S`` payloads, one after the other, with the same value format and bitmaps for positions.

    A bitmap has a flag for each entry, so everything here is done to entries in their places, and no position is ever
    computed: the number of flags before an entry says which of the payload's values is its own. What is kept on the
    device has the size of the list of tensors, not of the tensors.

    Rows are as long as the longest payload needs, so that several payloads of a sender are read as several senders.

    Attributes:
        width: Entries of a row.
        bounds: Of each of the ``T`` tensors in the rows of all payloads, one after the other.
    """

    def __init__(self, layouts: Sequence[PayloadLayout], device: torch.device) -> None:
        super().__init__(layouts, device)
        self._bits = BITS_PER_VALUE[self.value_format]
        # At least as many bytes of flags as a value has, because values are read from one before the first on.
        flag_bytes, self._value_bytes = (max(layout.part_sizes[part] for layout in layouts) for part in (2, 3))
        self._flag_bytes = flag_bytes if len(layouts) == 1 else max(flag_bytes, 4)
        self.width, column = 8 * self._flag_bytes, 0
        self.bounds: list[tuple[int, int]] = []
        # Of each stretch of a row with one scale: the scale's column, and its bounds, padding included.
        self._stretches: list[tuple[int, int, int]] = []
        for row, layout in enumerate(layouts):
            edges, first = [0, *accumulate(layout.tensor_sizes)], row * self.width
            self.bounds += [(first + start, first + stop) for start, stop in pairwise(edges)]
            scales = range(column, column + len(edges) - 1) or [max(column - 1, 0)]
            edges = [*edges[: len(scales)], self.width]
            self._stretches += [(scale, *edge) for scale, edge in zip(scales, pairwise(edges), strict=True)]
            column += len(layout.tensor_sizes)
        self._signs = torch.tensor([-1.0, 1.0], dtype=torch.float32).to(device)

    def unpack(self, payloads: Tensor, take: Callable[[Tensor], None]) -> tuple[Tensor, Tensor]:
        """Read payloads, which :meth:`split` describes.

        ``take`` gets the entries of all rows, piece by piece: shape ``[n, S, columns]``, fp32, zero where nothing is
        sent. Returns the tensors sent dense (``[n, dense bytes]``, uint8), and what :meth:`verdicts` takes
        (``[n, 4 S + T]``, int64).
        """
        senders, ((_, _, *parts, dense), words, scales) = len(payloads), self.split(payloads)
        rows, first = self._rows(payloads, *parts)
        units, ends = self._units(rows, first + self._flag_bytes), [sum(o.tensor_sizes) for o in self.layouts]
        raised, before = [words[:, :0]] * len(ends), None
        step = max(AT_ONCE // (8 * len(rows)), 1) * 8
        for start in range(0, self.width, step):
            stop = min(start + step, self.width)
            flags = self._as_bits(rows[:, first + start // 8 : first + stop // 8])
            # Of a flag in its payload, from one on.
            numbers = running_counts(flags) if before is None else running_counts(flags).add_(before)
            before = numbers[:, -1:].clone() if stop < self.width else None
            for row, end in enumerate(ends):
                if start <= max(end - 1, 0) < stop:
                    own = numbers.view(senders, len(ends), -1)[:, row, max(end - 1, 0) - start].unsqueeze(1)
                    # A copy where more follows, so that these numbers are freed.
                    raised[row] = own if before is None else own.clone()
            values = units.gather(1, numbers.clamp(max=units.shape[1] - 1))
            if self.value_format == "1bit":
                values = torch.where(values, self._signs[1], self._signs[0])
            if self.value_format in SCALED_FORMATS:
                values.view(senders, -1).mul_(self._spread(scales, start, stop))
            take(torch.where(flags, values, 0.0).view(senders, len(ends), -1))
        # The host compares them once it knows them: that starts fewer operations.
        return torch.cat(list(dense), dim=1), torch.cat([words, *raised], dim=1)

    def _as_bits(self, data: Tensor) -> Tensor:
        return ((data.unsqueeze(2) >> self.eight) & 1).flatten(1).view(torch.bool)

    def _units(self, rows: Tensor, start: int) -> Tensor:
        """A row's values before they are scaled (of one bit: bool), after one for entries before the first flag."""
        before = max(1, self._bits // 8)
        data = rows[:, start - before : start + self._value_bytes]
        if self.value_format == "1bit":
            every = self._as_bits(data)
        else:
            every = decode_units(data.flatten(), 8 * data.numel() // self._bits, self.value_format)
        return every.view(len(rows), -1)[:, 8 * before // self._bits - 1 :]

    def _rows(self, payloads: Tensor, every: Sequence[Tensor], sent: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Flags and values of one payload in each row, and where the flags begin."""
        if len(self.layouts) == 1:
            return payloads, sum(self.layouts[0].part_sizes[:2])
        pieces = []
        for flags, values in zip(every, sent, strict=True):
            for part, width in ((flags, self._flag_bytes), (values, self._value_bytes)):
                pieces += [part, self.zero.expand(len(payloads), width - part.shape[1])]
        return torch.cat(pieces, dim=1).view(len(payloads) * len(self.layouts), -1), 0

    def _spread(self, scales: Tensor, start: int, stop: int) -> Tensor:
        """The scale of each entry in some columns of all rows: shape ``[n, S * columns]``."""
        spread = []
        for column, begin, end in self._stretches:
            if begin < stop and end > start:
                spread.append(scales[:, column : column + 1].expand(-1, min(end, stop) - max(begin, start)))
        return spread[0] if len(spread) == 1 else torch.cat(spread, dim=1)
