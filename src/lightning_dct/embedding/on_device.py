"""Messages about rows on a device: the same bits as on a CPU, few waits of its host, and as many
operations with any number of ranks and tables.

The messages with all ranks are treated at once. Their rows lie one message after the other, and a
*segment* is the entries of one table in one message. What differs between messages or segments is a
number of each, in a tensor on the device::

    rows        rank 0: table 0, table 2, ...   rank 2: table 0, table 1, ...
    segments    0        1                      k        k + 1
    marks       entries that reach their segment's limit; their running sum says where they are
    bits        of all payloads, one byte each, written and read at once, and then packed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.kernels.bits import as_bytes, pack_codes, unpack_codes
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD
from lightning_dct.wire.payload import FORMAT_CODES, HEADER, MAGIC, read_count, write_header
from lightning_dct.wire.positions import PositionCode, check_count, reading
from lightning_dct.wire.rows import (
    LARGEST_SCALE_BYTES,
    LEVELS,
    WHOLE_FORMATS,
    code_scales,
    row_values_num_bytes,
    scales_of,
)
from lightning_dct.wire.values import (
    BITS_PER_VALUE,
    SCALED_FORMATS,
    code_values,
    decode_values,
    encode_values,
    levels_of,
)

if TYPE_CHECKING:
    from lightning_dct.embedding.messages import Message

Piece = Tensor | bytes


def numbers_on(device: torch.device, *arrays: npt.ArrayLike) -> list[Tensor]:
    """Copy arrays of whole numbers to a device in one piece: int64, each of one dimension."""
    on_host = [np.asarray(array, dtype=np.int64).reshape(-1) for array in arrays]
    copied = to_device(torch.from_numpy(np.concatenate(on_host)), device)
    return list(copied.split([array.size for array in on_host]))


class DeferredReads:
    """Numbers on a device that its host needs at some time: it reads them together with the next
    ones for which it waits. A copy begins without any.
    """

    def __init__(self) -> None:
        self._deferred: list[tuple[Sequence[Tensor], Callable[..., None]]] = []

    def __reduce__(self) -> tuple[type[DeferredReads], tuple[()]]:
        return DeferredReads, ()

    def later(self, then: Callable[..., None], *numbers: Tensor) -> None:
        """Call a function with lists of numbers, ``[n]`` each of any dtype, once they are read."""
        self._deferred.append((numbers, then))

    def now(self, *numbers: Tensor) -> list[list[Any]]:
        """Wait for numbers, ``[n]`` each of any dtype, and for those that were deferred."""
        deferred = self._deferred
        self._deferred = []
        parts = [*(part for given, _ in deferred for part in given), *numbers]
        if not parts:
            return []
        in_bytes = [as_bytes(part) for part in parts]
        data = bytes((in_bytes[0] if len(parts) == 1 else torch.cat(in_bytes)).tolist())
        found = []
        start = 0
        for part in parts:
            end = start + part.numel() * part.itemsize
            dtype = str(part.dtype).removeprefix("torch.")
            found.append(np.frombuffer(data[start:end], dtype=dtype).tolist())
            start = end
        for given, then in deferred:
            own = found[: len(given)]
            found = found[len(given) :]
            then(*own)
        return found


class ReadCodes(NamedTuple):
    """Positions of several messages, one message after the other."""

    positions: Tensor  # shape `[n]`, int64
    numbers: Tensor  # shape `[n]`, int64: from 1 on
    columns: tuple[Tensor, ...]  # shape `[n]` each, int64: the messages' other numbers
    bits: Tensor  # shape `[8 * bytes]`, uint8: the bytes that were read


class Codes:
    """Position codes of several messages, whose bits lie side by side.

    Args:
        codes: That of each message.
        starts: The bit at which each begins, ascending; at least 1.
    """

    def __init__(self, codes: Sequence[PositionCode], starts: Sequence[int]) -> None:
        self._codes = codes
        self._starts = starts
        # As many as the message with the most low bits has.
        self.planes = np.arange(max((code.low_bits for code in codes), default=0))
        ends = [start + code.num_flags for code, start in zip(codes, starts, strict=True)]
        # The bits before the flags of each message, and the last of them.
        self._edges = np.array([starts, ends], dtype=np.int64).T - 1

    def table(self, counts: Sequence[int], offsets: Sequence[int], spare: int = 0) -> Int64Array:
        """What differs between messages of ``counts`` positions, ``[messages, 9]``; ``offsets`` are
        added to positions, and are the last column.

        Positions have numbers ``i`` from 1 on, through all messages. The flag of one is at ``start
        + i * is_coded + (position >> low)``, and its bit of plane ``p`` at ``planes_at + i + p *
        capacity``. Planes that a message lacks are read and written as its last one; a bitmap has
        none, and writes to ``spare + i``, which nobody reads.
        """
        rows = []
        firsts = _starts_of(counts)
        for code, start, first, offset in zip(
            self._codes, self._starts, firsts, offsets, strict=True
        ):
            end = offset + code.universe - 1
            if code.is_bitmap:
                rows.append((start, 0, 0, 0, spare, 0, 1, end, offset))
                continue
            before = start - first - 1
            low = code.low_bits
            planes_at = before + code.num_flags
            rows.append((before, low, 1, code.capacity, planes_at, low - 1, 1 << low, end, offset))
        return np.array(rows, dtype=np.int64)

    def write(
        self,
        bits: Tensor,
        columns: Sequence[Tensor],
        numbers: Tensor,
        positions: Tensor,
        planes: Tensor,
    ) -> None:
        """Write positions into ``bits``, which are zero.

        Args:
            bits: A byte each.
            columns: Those of :meth:`table` for each position, ``[n]`` each.
            numbers: From 1 on, ``[n]``.
            positions: Shape ``[n]``, with their offsets.
            planes: The numbers of planes, on the device.
        """
        start, low, is_coded = columns[:3]
        local = positions - columns[8]
        bits.index_fill_(0, torch.addcmul(start, numbers, is_coded).add_(local >> low), 1)
        if planes.numel():
            at, plane = _low_bits_at(columns, numbers, planes.unsqueeze(1))
            codes = (local >> plane).bitwise_and_(1).to(torch.uint8)
            bits.index_copy_(0, at.view(-1), codes.view(-1))

    def read(
        self,
        reads: DeferredReads,
        data: Tensor,
        counts: Sequence[int],
        offsets: Sequence[int],
        sources: Sequence[str],
        *more: npt.ArrayLike,
    ) -> ReadCodes:
        """Read ``counts`` positions of each message from bytes.

        Damage is found when the host reads the next numbers (PayloadError); until then positions
        are below their universes, whatever the bytes.

        Args:
            reads: Reads what shows damage.
            data: The bytes.
            counts: How many positions each message has.
            offsets: What is added to the positions of each message, ascending.
            sources: Of each message, who has sent it.
            more: Other numbers of each message.
        """
        extra = [np.asarray(one, dtype=np.int64).reshape(-1, 1) for one in more]
        columns = np.concatenate([self.table(counts, offsets), *extra], axis=1)
        table, edges, counts_there, firsts, planes, weights = numbers_on(
            data.device,
            columns,
            self._edges,
            counts,
            _starts_of(counts),
            self.planes,
            1 << self.planes,
        )
        bits = unpack_codes(data, 1)
        sums = bits.cumsum(0)
        at_edges = sums.index_select(0, edges)
        number = sum(counts)
        of = torch.repeat_interleave(counts_there, output_size=number)
        numbers = torch.arange(1, number + 1, device=data.device)
        each = table.view(columns.shape).index_select(0, of).unbind(1)
        if not number:
            reads.later(lambda marked: self._check_marks(marked, counts, sources), at_edges)
            return ReadCodes(of, numbers, each[9:], bits)
        start, _, is_coded, _, _, _, factor, end, offset = each[:9]
        wanted = (at_edges[::2] - firsts).index_select(0, of).add_(numbers)
        local = torch.searchsorted(sums, wanted).sub_(start)
        local.addcmul_(numbers, is_coded, value=-1)
        if planes.numel():
            at, _ = _low_bits_at(each, numbers, planes.unsqueeze(1))
            codes = bits.index_select(0, at.view(-1)).view_as(at)
            # Planes that a message lacks were read, too.
            low = (codes * weights.unsqueeze(1)).sum(0).remainder_(factor)
            local = low.addcmul_(local, factor)
        unchecked = local + offset
        positions = torch.minimum(unchecked, end)
        facts = [(unchecked - positions).amax().view(1)]
        if number > 1:
            facts.append(unchecked.diff().amin().view(1))

        def check(marked: list[int], over: list[int], least_step: Sequence[int] = (1,)) -> None:
            self._check_marks(marked, counts, sources)
            if over[0] > 0 or least_step[0] <= 0:
                self._refuse(local, counts, sources)

        reads.later(check, at_edges, *facts)
        return ReadCodes(positions, numbers, each[9:], bits)

    def _check_marks(
        self, marked: Sequence[int], counts: Sequence[int], sources: Sequence[str]
    ) -> None:
        for before, end, count, source in zip(
            marked[::2], marked[1::2], counts, sources, strict=True
        ):
            with reading(source):
                check_count(end - before, count)

    def _refuse(self, local: Tensor, counts: Sequence[int], sources: Sequence[str]) -> None:
        """Name who has sent the wrong positions (PayloadError)."""
        parts = local.cpu().split(list(counts))
        for part, code, source in zip(parts, self._codes, sources, strict=True):
            with reading(source):
                if bool((part.diff() <= 0).any() | (part[-1:] >= code.universe).any()):
                    raise code.not_ascending()


def _low_bits_at(
    columns: Sequence[Tensor], numbers: Tensor, planes: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the low bits of positions are, ``[planes, n]``, and which plane each is."""
    capacity, planes_at, last = columns[3:6]
    plane = torch.minimum(planes, last)
    return torch.addcmul(planes_at + numbers, plane, capacity), plane


class Selected(NamedTuple):
    """Entries of rows that are to be sent."""

    sums: Tensor  # shape `[k, dim]`; where they are infinite or NaN, the old rows
    positions: Tensor  # shape `[count]`, int64, ascending: in the flattened rows
    values: Tensor  # shape `[count]`
    numbers: Tensor  # shape `[count]`, int64: from 1 on
    counts: list[int]  # how many are of each segment
    limits: npt.NDArray[np.float64]  # shape `[segments]`: what they have reached
    limits_there: Tensor  # the same on the device, in the dtype of rows
    is_finite: bool  # whether no sum is infinite or NaN
    more: list[list[Any]]  # other numbers that were read


class Packed(NamedTuple):
    """Payloads, and the entries in them."""

    payloads: list[list[Piece]]  # of each message, its parts, one after the other
    positions: Tensor  # shape `[count]`, int64: in the flattened rows
    received: Tensor  # shape `[count]`, fp32: the values as receivers read them
    left: Tensor  # shape `[count]`: what remains to be sent at these positions


class Forms:
    """The forms of messages with several ranks about rows on a device.

    Args:
        messages: The form of each.
        device: Where the rows are.
        more: Other numbers that are needed there.
    """

    def __init__(
        self, messages: Sequence[Message], device: torch.device, *more: npt.ArrayLike
    ) -> None:
        self.layouts = [message.layout for message in messages]
        self.device = device
        self.value_format = messages[0].layout.value_format
        # Of each segment, its entries and how many of them are sent.
        self.sizes = [size for layout in self.layouts for size in layout.tensor_sizes]
        self.targets = [part for layout in self.layouts for part in layout.capacities]
        self.capacities = [layout.capacity for layout in self.layouts]
        # Where the entries of each segment begin, those of each message, and in bytes its payload.
        self.edges = list(accumulate(self.sizes, initial=0))
        self._first_entries = _starts_of([sum(layout.tensor_sizes) for layout in self.layouts])
        self._starts = _starts_of([layout.num_bytes for layout in self.layouts])
        self._num_bits = 8 * sum(layout.num_bytes for layout in self.layouts)
        self._codes = Codes(
            [layout.position_code for layout in self.layouts],
            [8 * (at + one.edges[2]) for at, one in zip(self._starts, self.layouts, strict=True)],
        )
        self._segments_of = [len(layout.tensor_sizes) for layout in self.layouts]
        rows_of = np.array(self.sizes, dtype=np.int64) // messages[0].dim
        self._ends, self._last_entries, self._message_of, self._segment_of_row, *self.more = (
            numbers_on(
                device,
                self.edges,
                np.array(self.edges[1:], dtype=np.int64) - 1,
                np.repeat(np.arange(len(messages)), self._segments_of),
                np.repeat(np.arange(len(self.sizes)), rows_of),
                *more,
            )
        )

    def select(
        self,
        reads: DeferredReads,
        rows: Tensor,
        addend: Tensor,
        limits: npt.NDArray[np.float64],
        scale: float,
        *more: Tensor,
    ) -> Selected:
        """Select from ``rows + scale * addend``, both ``[k, dim]``, what reaches its segment's
        limit, or is infinite or NaN.

        A limit of 0 becomes the one that selects as many entries as the segment sends.
        """
        sums = torch.add(rows, addend.to(rows.dtype), alpha=scale)
        flat = sums.view(-1)
        missing = np.flatnonzero(limits == 0)
        limits_there = to_device(torch.from_numpy(limits).to(rows.dtype), rows.device)
        found = limits_there[:0]
        if missing.size:
            finite = flat.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            found = self.kth_magnitudes(finite, missing.tolist())
            [at] = numbers_on(rows.device, missing)
            limits_there.index_copy_(0, at, found.to(rows.dtype))
        of_rows = limits_there.index_select(0, self._segment_of_row).unsqueeze(1)
        magnitudes = sums.abs()
        so_far = (magnitudes >= of_rows).view(-1).cumsum(0)
        reached = so_far.index_select(0, self._last_entries)
        # Infinite or NaN if an entry is.
        total = magnitudes.sum(dtype=torch.float64).view(1)
        [numbers, [of_all], kths, *others] = reads.now(reached, total, found, *more)
        limits = limits.copy()
        limits[missing] = kths
        is_finite = bool(np.isfinite(of_all))
        if not is_finite:
            # "Not below" instead of "at or above", because it is true for NaN.
            so_far = (magnitudes < of_rows).logical_not_().view(-1).cumsum(0)
            numbers = so_far.index_select(0, self._last_entries).tolist()
            sums = torch.where(sums.isfinite(), sums, rows)
        counts = np.diff(numbers, prepend=0).tolist()
        each = torch.arange(1, sum(counts) + 1, device=rows.device)
        positions = torch.searchsorted(so_far, each)
        values = flat.index_select(0, positions)
        return Selected(
            sums, positions, values, each, counts, limits, limits_there, is_finite, others
        )

    def kth_magnitudes(self, flat: Tensor, segments: Sequence[int]) -> Tensor:
        """The magnitudes of flattened rows that so many entries of segments reach as each sends:
        fp64 ``[n]``, at least the smallest normal fp32 number. All entries are finite.
        """
        parts = [flat[self.edges[one] : self.edges[one + 1]] for one in segments]
        magnitudes = torch.cat(parts).abs_()
        sizes = [part.numel() for part in parts]
        targets = [self.targets[one] for one in segments]
        places_there, sizes_there = numbers_on(flat.device, np.cumsum(sizes) - targets, sizes)
        of = torch.repeat_interleave(sizes_there, output_size=magnitudes.numel())
        order = _sorted_in(of, magnitudes, descending=False)
        kth = magnitudes.index_select(0, order.index_select(0, places_there))
        return kth.to(torch.float64).clamp_(min=SMALLEST_THRESHOLD)

    def pack(self, selected: Selected) -> Packed:
        """Pack finite entries that have reached their segments' limits: those that exceed them by
        the largest factors, if there are too many for a message.
        """
        positions = selected.positions
        values = selected.values
        segment = torch.searchsorted(self._ends[1:], positions, right=True)
        ends = np.cumsum([0, *selected.counts])[np.cumsum([0, *self._segments_of])]
        found = np.diff(ends).tolist()
        counts = np.minimum(found, self.capacities).tolist()
        if counts == found:
            table, planes, lengths = self._table(counts, selected.counts)
        else:
            over = values.abs().to(torch.float64)
            over.div_(selected.limits_there.index_select(0, segment))
            of = self._message_of.index_select(0, segment)
            order = _sorted_in(of, over, descending=True)
            first = [np.arange(at, at + k) for at, k in zip(ends[:-1], counts, strict=True)]
            table, planes, first_there = self._table(counts, np.concatenate(first))
            kept = order.index_select(0, first_there).sort().values
            positions = positions.index_select(0, kept)
            values = values.index_select(0, kept)
            segment = segment.index_select(0, kept)
            lengths = torch.searchsorted(positions, self._ends).diff()
        columns = table.index_select(0, segment).unbind(1)
        numbers = selected.numbers[: positions.numel()]
        # What nobody reads follows the payloads.
        bits = zero_bits(self._num_bits + positions.numel(), self.device)
        self._codes.write(bits, columns, numbers, positions, planes)
        if self.value_format in SCALED_FORMATS:
            codes, scales = code_values(values, lengths, self.value_format)
            received = _scaled(scales.index_select(0, segment), codes, self.value_format, values)
            self._write_codes(bits, columns[-1], numbers, codes)
            scale_bytes = scales.view(torch.uint8)
            data = scale_bytes[:0]
        else:
            data, scales = encode_values(values, [], self.value_format)
            received = decode_values(data, [values.numel()], scales, self.value_format)
            scale_bytes = data[:0]
        payloads = self._put_together(counts, scale_bytes, pack_codes(bits, 1), data)
        return Packed(payloads, positions, received, values - received.to(values.dtype))

    def _table(self, counts: Sequence[int], more: npt.ArrayLike) -> list[Tensor]:
        """What differs between the messages of segments, the numbers of planes, and other numbers,
        on the device.
        """
        of_messages = [
            self._codes.table(counts, self._first_entries, spare=self._num_bits),
            self._values_at(counts).reshape(-1, 1),
        ]
        table = np.repeat(np.concatenate(of_messages, axis=1), self._segments_of, axis=0)
        table_there, planes, more_there = numbers_on(self.device, table, self._codes.planes, more)
        return [table_there.view(table.shape), planes, more_there]

    def _write_codes(self, bits: Tensor, values_at: Tensor, numbers: Tensor, codes: Tensor) -> None:
        """Write values of one or two bits each."""
        if self.value_format == "1bit":
            bits.index_copy_(0, values_at + numbers, codes)
            return
        low = torch.add(values_at, numbers, alpha=2)
        bits.index_copy_(0, low, codes & 1)
        bits.index_copy_(0, low + 1, codes >> 1)

    def _values_at(self, counts: Sequence[int]) -> Int64Array:
        """By message, the bit of the value whose number is 0; of numbers from 1 on."""
        width = BITS_PER_VALUE[self.value_format]
        at = [
            8 * (start + layout.edges[3]) - width * (first + 1)
            for start, layout, first in zip(
                self._starts, self.layouts, _starts_of(counts), strict=True
            )
        ]
        return np.array(at, dtype=np.int64)

    def _put_together(
        self, counts: Sequence[int], scales: Tensor, coded: Tensor, data: Tensor
    ) -> list[list[Piece]]:
        """Of each message, the parts of its payload."""
        payloads: list[list[Piece]] = []
        entry_bytes = data.numel() // max(sum(counts), 1)
        for layout, start, count in zip(self.layouts, self._starts, counts, strict=True):
            code = FORMAT_CODES[layout.value_format]
            own_scales, scales = scales.tensor_split([4 * layout.num_scales])
            own_data, data = data.tensor_split([entry_bytes * count])
            end = layout.edges[3] if own_data.numel() else layout.edges[5]
            parts: list[Piece] = [
                write_header(MAGIC, code, count, layout.fingerprint),
                own_scales,
                coded[start + layout.edges[2] : start + end],
                own_data,
                bytes(layout.num_bytes - end - own_data.numel()),
            ]
            payloads.append(parts)
        return payloads

    def unpack(
        self,
        reads: DeferredReads,
        payloads: Sequence[Tensor],
        headers: Sequence[bytes | None],
        sources: Sequence[str],
    ) -> tuple[Tensor, Tensor]:
        """Unpack a payload of each message: positions in the flattened rows, int64, and values,
        fp32.

        ``headers`` are their first bytes, as far as the host has them. What is wrong with a header
        is found at once, and other damage when the host reads the next numbers (PayloadError).
        """
        counts = []
        known = self._all_headers(reads, payloads, headers)
        for layout, payload, header, source in zip(
            self.layouts, payloads, known, sources, strict=True
        ):
            with reading(source):
                counts.append(read_count(layout, payload, header=header))
        together = torch.cat(list(payloads))
        values_at = self._values_at(counts)
        read = self._codes.read(reads, together, counts, self._first_entries, sources, values_at)
        return read.positions, self._read_values(payloads, counts, read)

    def _read_values(
        self, payloads: Sequence[Tensor], counts: Sequence[int], read: ReadCodes
    ) -> Tensor:
        if self.value_format not in SCALED_FORMATS:
            width = BITS_PER_VALUE[self.value_format] // 8
            data = torch.cat(
                [
                    payload[layout.edges[3] :][: width * count]
                    for payload, layout, count in zip(payloads, self.layouts, counts, strict=True)
                ]
            )
            none = data.new_empty(0, dtype=torch.float32)
            return decode_values(data, [sum(counts)], none, self.value_format)
        parts = [
            payload[HEADER.size : layout.edges[2]]
            for payload, layout in zip(payloads, self.layouts, strict=True)
        ]
        scales = torch.cat(parts).view(torch.float32)
        [values_at] = read.columns
        if self.value_format == "1bit":
            codes = read.bits.index_select(0, values_at + read.numbers)
        else:
            low = torch.add(values_at, read.numbers, alpha=2)
            codes = read.bits.index_select(0, low + 1).mul_(2).add_(read.bits.index_select(0, low))
        segment = torch.searchsorted(self._ends[1:], read.positions, right=True)
        return _scaled(scales.index_select(0, segment), codes, self.value_format)

    def _all_headers(
        self,
        reads: DeferredReads,
        payloads: Sequence[Tensor],
        headers: Sequence[bytes | None],
    ) -> list[bytes]:
        known = [header for header in headers if header is not None]
        if len(known) == len(headers):
            return known
        [found] = reads.now(torch.cat([part[: HEADER.size] for part in payloads]))
        return [bytes(found[at : at + HEADER.size]) for at in range(0, len(found), HEADER.size)]


def _scaled(
    scales: Tensor, codes: Tensor, value_format: str, signs: Tensor | None = None
) -> Tensor:
    """Values by the scale of each, fp32, and its code. ``signs`` may be numbers with the signs of
    the values, none of which is zero.
    """
    if value_format == "1bit":
        return scales.copysign_(codes - 0.5 if signs is None else signs.to(torch.float32))
    return levels_of(codes, value_format).mul_(scales)


class CodedRows(NamedTuple):
    """Whole rows of several messages as bytes."""

    data: Tensor  # shape `[n, bytes]`, uint8: of each row
    scales: Tensor | None  # shape `[n]`, uint8: the code of each row's scale, if there are scales
    largest: Tensor | None  # shape `[messages, 4]`, uint8: the largest scale of each message
    received: Tensor  # shape `[n, dim]`, fp32: the rows as receivers read them

    def some(self, at: Tensor) -> CodedRows:
        """Some of the rows."""
        scales = None if self.scales is None else self.scales.index_select(0, at)
        return self._replace(data=self.data.index_select(0, at), scales=scales)

    def pieces(self, counts: Sequence[int]) -> list[list[Tensor]]:
        """Of each message, the bytes of so many rows."""
        found = []
        start = 0
        for number, count in enumerate(counts):
            end = start + count
            parts = [self.data[start:end].reshape(-1)]
            if self.scales is not None and self.largest is not None and count:
                parts += [self.largest[number], self.scales[start:end]]
            found.append(parts)
            start = end
        return found


def encode_whole(
    rows: Tensor,
    of: Tensor,
    within: Tensor,
    counts: Sequence[int],
    value_format: str,
    chosen: Tensor | None = None,
) -> CodedRows:
    """Code rows of several messages as :func:`lightning_dct.embedding.messages.encode_whole` does
    those of one.

    Args:
        rows: Shape ``[n, dim]``.
        of: Shape ``[n]``: of each row, the number of its message.
        within: Shape ``[n]``: its number in the message.
        counts: The number of rows of each message.
        value_format: That of changes.
        chosen: Which rows are sent, bool ``[n]``; None for all.
    """
    row_format = WHOLE_FORMATS[value_format]
    if row_format not in LEVELS:
        data = encode_values(rows.reshape(-1), [], row_format)[0]
        none = data.new_empty(0, dtype=torch.float32)
        received = decode_values(data, [rows.numel()], none, row_format).view_as(rows)
        return CodedRows(data.view(len(rows), -1), None, None, received)
    values = rows.to(torch.float32)
    largest = values.abs().amax(dim=1)
    if chosen is not None:
        largest = largest.masked_fill_(~chosen, 0.0)
    side_by_side = largest.new_zeros(len(counts) * max(counts))
    places = torch.add(within, of, alpha=max(counts))
    side_by_side.index_copy_(0, places, largest)
    codes, tops = code_scales(side_by_side.view(len(counts), -1), LEVELS[row_format])
    codes = codes.view(-1).index_select(0, places)
    scales = scales_of(codes, tops.index_select(0, of)).unsqueeze(1)
    steps = (values / scales).nan_to_num_(nan=0.0).round_()
    whole = steps.clamp_(-LEVELS[row_format], LEVELS[row_format]).to(torch.int8)
    received = whole.to(torch.float32).mul_(scales)
    return CodedRows(whole.view(torch.uint8), codes, tops.view(torch.uint8).view(-1, 4), received)


def decode_whole(
    parts: Sequence[Tensor], counts: Sequence[int], dim: int, value_format: str
) -> Tensor:
    """Read the whole rows of several messages: fp32 ``[sum(counts), dim]``."""
    row_format = WHOLE_FORMATS[value_format]
    given = [part for part, count in zip(parts, counts, strict=True) if count]
    some = [count for count in counts if count]
    cuts = [row_values_num_bytes(row_format, count * dim) for count in some]
    data = torch.cat([part[:cut] for part, cut in zip(given, cuts, strict=True)])
    number = sum(counts)
    if row_format not in LEVELS:
        none = data.new_empty(0, dtype=torch.float32)
        return decode_values(data, [number * dim], none, row_format).view(number, dim)
    ends = [cut + LARGEST_SCALE_BYTES for cut in cuts]
    tops = [part[cut:end] for part, cut, end in zip(given, cuts, ends, strict=True)]
    largest = torch.cat(tops).view(torch.float32)
    codes = torch.cat([part[end:] for part, end in zip(given, ends, strict=True)])
    [counts_there] = numbers_on(data.device, some)
    of = torch.repeat_interleave(counts_there, output_size=number)
    scales = scales_of(codes, largest.index_select(0, of)).unsqueeze(1)
    return data.view(torch.int8).to(torch.float32).view(number, dim).mul_(scales)


def zero_bits(num_bits: int, device: torch.device) -> Tensor:
    """Bits that can be packed, a byte each: so many, and one or more that nobody reads."""
    return torch.zeros(num_bits + 16 - num_bits % 8, dtype=torch.uint8, device=device)


def _sorted_in(of: Tensor, keys: Tensor, descending: bool) -> Tensor:
    """The order of entries by ascending groups, and in each by keys; of equals the first first."""
    by_key = keys.sort(stable=True, descending=descending).indices
    return by_key.index_select(0, of.index_select(0, by_key).sort(stable=True).indices)


def _starts_of(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
