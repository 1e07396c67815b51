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
from lightning_dct.kernels.bits import found_in, pack_codes, positions_in, unpack_codes
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD
from lightning_dct.wire.payload import FORMAT_CODES, HEADER, MAGIC, read_count, write_header
from lightning_dct.wire.positions import PayloadError, PositionCode, reading
from lightning_dct.wire.rows import (
    LARGEST_SCALE_BYTES,
    LEVELS,
    WHOLE_FORMATS,
    code_scales,
    row_values_num_bytes,
    scales_of,
)
from lightning_dct.wire.values import (
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
    """Whole numbers on a device that its host needs at some time: it reads them together with the
    next ones for which it waits. A copy begins without any.
    """

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, Callable[[list[int]], None]]] = []

    def __reduce__(self) -> tuple[type[DeferredReads], tuple[()]]:
        return DeferredReads, ()

    def later(self, numbers: Tensor, then: Callable[[list[int]], None]) -> None:
        """Call a function with numbers, int64 ``[n]``, once they are read."""
        self._deferred.append((numbers, then))

    def now(self, *numbers: Tensor) -> list[int]:
        """Wait for numbers, int64 ``[n]`` each, and for those that were deferred."""
        deferred = self._deferred
        self._deferred = []
        parts = [*(part for part, _ in deferred), *numbers]
        if not parts:
            return []
        found = torch.cat(parts).tolist()
        for part, then in deferred:
            own = found[: part.numel()]
            found = found[part.numel() :]
            then(own)
        return found


def as_whole_numbers(values: Tensor) -> Tensor:
    """The bits of fp64 values, as :class:`DeferredReads` reads them; see :func:`as_floats`."""
    return values.view(torch.int64)


def as_floats(numbers: Sequence[int]) -> list[float]:
    """Undo :func:`as_whole_numbers`."""
    found: list[float] = np.array(numbers, dtype=np.int64).view(np.float64).tolist()
    return found


class Codes:
    """Position codes of several messages, whose bits lie side by side.

    Args:
        codes: That of each message.
        starts: The bit at which each begins, ascending; at least 1.
        device: Where the bits are.
    """

    def __init__(
        self, codes: Sequence[PositionCode], starts: Sequence[int], device: torch.device
    ) -> None:
        self._codes = codes
        self._most_low_bits = max((code.low_bits for code in codes), default=0)
        columns = [
            (start, code.low_bits, not code.is_bitmap, code.capacity, start + code.num_flags)
            for code, start in zip(codes, starts, strict=True)
        ]
        ends = [start + code.num_flags for code, start in zip(codes, starts, strict=True)]
        universes = [code.universe for code in codes]
        edges = np.array([starts, ends]).T.reshape(-1) - 1
        table, self._edges, self._universes = numbers_on(device, columns, edges, universes)
        self._table = table.view(len(codes), 5)

    def bits_of(
        self, of: Tensor, index: Tensor, positions: Tensor, spare: int
    ) -> tuple[Tensor, Tensor]:
        """Where bits are to be written, and which.

        Args:
            of: Of each position, the number of its message: ``[n]``, int64.
            index: Its number in the message.
            positions: The positions.
            spare: A bit that nobody reads.
        """
        start, low, is_coded, capacity, planes_at = self._table.index_select(0, of).unbind(1)
        flags = torch.addcmul(start, index, is_coded).add_(positions >> low)
        if not self._most_low_bits:
            return flags, torch.ones_like(flags, dtype=torch.uint8)
        planes = torch.arange(self._most_low_bits, device=of.device).unsqueeze(1)
        at = torch.addcmul(planes_at + index, planes, capacity).masked_fill_(planes >= low, spare)
        codes = (positions >> planes).bitwise_and_(1)
        where = torch.cat([flags, at.view(-1)])
        set_bits = torch.cat([torch.ones_like(flags), codes.view(-1)])
        return where, set_bits.to(torch.uint8)

    def read(
        self, bits: Tensor, of: Tensor, index: Tensor, counts: Sequence[int], counts_there: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read ``counts`` positions of each message, and what :meth:`check` needs to know.

        ``of`` and ``index`` are as in :meth:`bits_of`, ``counts_there`` has the counts on the
        device. Positions are below their universes, whatever the bits.
        """
        sums = bits.cumsum(0)
        edges = sums.index_select(0, self._edges).view(-1, 2)
        facts = [edges[:, 1] - edges[:, 0]]
        if not of.numel():
            return of, facts[0]
        start, low, is_coded, capacity, planes_at = self._table.index_select(0, of).unbind(1)
        wanted = edges[:, 0].index_select(0, of).add_(index).add_(1)
        flags = torch.searchsorted(sums, wanted)
        positions = torch.addcmul(flags - start, index, is_coded, value=-1)
        if self._most_low_bits:
            planes = torch.arange(self._most_low_bits, device=of.device).unsqueeze(1)
            is_none = planes >= low
            at = torch.addcmul(planes_at + index, planes, capacity).masked_fill_(is_none, 0)
            codes = bits.index_select(0, at.view(-1)).view_as(at).long() << planes
            positions = (positions << low).add_(codes.masked_fill_(is_none, 0).sum(0))
        universe = self._universes.index_select(0, of)
        falls = positions.diff(prepend=positions[:1]) <= 0
        is_wrong = (falls & (index > 0)) | (positions >= universe)
        # The number of a message with a wrong position, or that of all messages.
        last = torch.full_like(of, len(counts))
        facts.append(torch.where(is_wrong, of, last).amin().view(1))
        return torch.minimum(positions, universe - 1).clamp_(min=0), torch.cat(facts)

    def check(self, facts: Sequence[int], counts: Sequence[int], sources: Sequence[str]) -> None:
        """Refuse what :meth:`read` has found if a message does not hold it (PayloadError)."""
        for marked, count, source in zip(facts, counts, sources, strict=False):
            with reading(source):
                if marked != count:
                    raise PayloadError(
                        f"the positions are corrupt: {marked} positions are marked, but the header"
                        f" says {count}"
                    )
        for wrong in facts[len(counts) :]:
            if wrong < len(counts):
                with reading(sources[wrong]):
                    raise PayloadError(
                        "the positions are corrupt: they are not ascending below"
                        f" {self._codes[wrong].universe}"
                    )


class Selected(NamedTuple):
    """Entries of rows that are to be sent."""

    sums: Tensor  # shape `[k, dim]`; where they are infinite or NaN, the old rows
    positions: Tensor  # shape `[count]`, int64, ascending: in the flattened rows
    values: Tensor  # shape `[count]`
    counts: list[int]  # how many are of each segment
    limits: npt.NDArray[np.float64]  # shape `[segments]`: what they have reached
    limits_there: Tensor  # the same on the device
    is_finite: bool  # whether no sum is infinite or NaN
    more: list[int]  # other numbers that were read


class Packed(NamedTuple):
    """Payloads, and the entries in them."""

    payloads: list[list[Piece]]  # of each message, its parts, one after the other
    positions: Tensor  # shape `[count]`, int64: in the flattened rows
    received: Tensor  # shape `[count]`, fp32: the values as receivers read them
    left: Tensor  # shape `[count]`: what remains to be sent at these positions


class Forms:
    """The forms of messages with several ranks about rows on a device."""

    def __init__(self, messages: Sequence[Message], device: torch.device) -> None:
        self.messages = messages
        self.layouts = [message.layout for message in messages]
        self.device = device
        self.value_format = messages[0].layout.value_format
        self.num_rows = [message.num_rows for message in messages]
        sizes = [size for layout in self.layouts for size in layout.tensor_sizes]
        self.targets = [part for layout in self.layouts for part in layout.capacities]
        # Where the entries of each segment begin, and where payloads begin in bytes.
        self.edges = list(accumulate(sizes, initial=0))
        self._starts = list(accumulate((one.num_bytes for one in self.layouts), initial=0))
        entries = [sum(layout.tensor_sizes) for layout in self.layouts]
        self._first_entries = list(accumulate(entries, initial=0))
        dim = messages[0].dim
        number = [len(layout.tensor_sizes) for layout in self.layouts]
        (
            self._edges_there,
            self._message_of,
            self._rows_of,
            self._first_there,
            self._capacities,
            self._values_at,
        ) = numbers_on(
            device,
            self.edges,
            np.repeat(np.arange(len(messages)), number),
            np.array(sizes, dtype=np.int64) // dim,
            self._first_entries[:-1],
            [layout.capacity for layout in self.layouts],
            [8 * (s + one.edges[3]) for s, one in zip(self._starts, self.layouts, strict=False)],
        )
        self._codes = Codes(
            [layout.position_code for layout in self.layouts],
            [8 * (s + one.edges[2]) for s, one in zip(self._starts, self.layouts, strict=False)],
            device,
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
        scaled = addend.to(rows.dtype)
        sums = torch.add(rows, scaled, alpha=scale)
        flat = sums.view(-1)
        missing = np.flatnonzero(limits == 0)
        limits_there = to_device(torch.from_numpy(limits), rows.device)
        found = limits_there[:0]
        if missing.size:
            found = self.kth_magnitudes(flat, missing.tolist())
            [at] = numbers_on(rows.device, missing)
            limits_there.index_copy_(0, at, found)
        of_rows = torch.repeat_interleave(
            limits_there.to(rows.dtype), self._rows_of, output_size=len(rows)
        )
        # "Not below" instead of "at or above", because it is true for NaN.
        marks = (sums.abs() < of_rows.unsqueeze(1)).logical_not_().view(-1)
        finite = sums.isfinite()
        so_far = marks.cumsum(0)
        reached = so_far.index_select(0, self._edges_there[1:] - 1)
        num_finite = finite.sum().view(1)
        numbers = reads.now(reached, num_finite, as_whole_numbers(found), *more)
        number = len(self.targets)
        counts = np.diff(numbers[:number], prepend=0).tolist()
        is_finite = numbers[number] == sums.numel()
        now = sums if is_finite else torch.where(finite, sums, rows)
        limits = limits.copy()
        limits[missing] = as_floats(numbers[number + 1 : number + 1 + missing.size])
        positions = found_in(so_far, sum(counts))
        values = flat.index_select(0, positions)
        rest = numbers[number + 1 + missing.size :]
        return Selected(now, positions, values, counts, limits, limits_there, is_finite, rest)

    def kth_magnitudes(self, flat: Tensor, segments: Sequence[int]) -> Tensor:
        """The magnitudes of flattened rows that so many entries of segments reach as each sends:
        fp64 ``[n]``, at least the smallest normal fp32 number. Infinite and NaN entries count as
        zero.
        """
        parts = [flat[self.edges[one] : self.edges[one + 1]] for one in segments]
        magnitudes = torch.cat(parts).abs_().nan_to_num_(nan=0.0, posinf=0.0)
        sizes = [part.numel() for part in parts]
        ends = list(accumulate(sizes))
        targets = [self.targets[one] for one in segments]
        places = [end - target for end, target in zip(ends, targets, strict=True)]
        places_there, sizes_there = numbers_on(flat.device, places, sizes)
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
        ends = self._edges_there[1:]
        segment = torch.searchsorted(ends, positions, right=True)
        of = self._message_of.index_select(0, segment)
        counts = self._by_message(selected.counts)
        capacities = [layout.capacity for layout in self.layouts]
        if any(count > most for count, most in zip(counts, capacities, strict=True)):
            over = values.abs().to(torch.float64).div_(selected.limits_there.index_select(0, segment))
            order = _sorted_in(of, over, descending=True)
            [firsts] = numbers_on(self.device, _starts_of(counts))
            rank = torch.arange(sum(counts), device=self.device) - firsts.index_select(0, of)
            is_kept = torch.zeros_like(of, dtype=torch.bool)
            is_kept.index_copy_(0, order, rank < self._capacities.index_select(0, of))
            counts = [min(count, most) for count, most in zip(counts, capacities, strict=True)]
            kept = positions_in(is_kept, sum(counts))
            positions = positions.index_select(0, kept)
            values = values.index_select(0, kept)
            segment = segment.index_select(0, kept)
            of = of.index_select(0, kept)
        return self._packed(positions, values, segment, of, counts)

    def _packed(
        self, positions: Tensor, values: Tensor, segment: Tensor, of: Tensor, counts: list[int]
    ) -> Packed:
        [firsts] = numbers_on(self.device, _starts_of(counts))
        index = torch.arange(positions.numel(), device=self.device).sub_(
            firsts.index_select(0, of)
        )
        local = positions - self._first_there.index_select(0, of)
        num_bits = 8 * self._starts[-1]
        where, set_bits = self._codes.bits_of(of, index, local, spare=num_bits)
        is_scaled = self.value_format in SCALED_FORMATS
        if is_scaled:
            lengths = torch.searchsorted(positions, self._edges_there).diff()
            codes, scales = code_values(values, lengths, self.value_format)
            received = levels_of(codes, self.value_format).mul_(scales.index_select(0, segment))
            places, parts = self._places_of_values(of, index, codes)
            where = torch.cat([where, places])
            set_bits = torch.cat([set_bits, parts])
            scale_bytes = scales.view(torch.uint8)
            data = scale_bytes[:0]
        else:
            data, scales = encode_values(values, [], self.value_format)
            received = decode_values(data, [values.numel()], scales, self.value_format)
            scale_bytes = data[:0]
        # A word more, for the bit that nobody reads.
        bits = torch.zeros(num_bits + 64, dtype=torch.uint8, device=self.device)
        coded = pack_codes(bits.index_copy_(0, where, set_bits), 1)
        payloads = self._put_together(counts, scale_bytes, coded, data)
        return Packed(payloads, positions, received, values - received.to(values.dtype))

    def _places_of_values(self, of: Tensor, index: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The bits of values of one or two bits, and what is in them."""
        at = self._values_at.index_select(0, of)
        if self.value_format == "1bit":
            return at.add_(index), codes
        pair = torch.arange(2, dtype=torch.uint8, device=self.device)
        places = at.add_(index, alpha=2).unsqueeze(1) + pair
        return places.view(-1), (codes.unsqueeze(1) >> pair).bitwise_and_(1).view(-1)

    def _put_together(
        self, counts: Sequence[int], scales: Tensor, coded: Tensor, data: Tensor
    ) -> list[list[Piece]]:
        """Of each message, the parts of its payload."""
        payloads: list[list[Piece]] = []
        entry_bytes = data.numel() // max(sum(counts), 1)
        for layout, start, count in zip(self.layouts, self._starts, counts, strict=False):
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

    def _by_message(self, counts: Sequence[int]) -> list[int]:
        """The sums of the numbers of segments over each message."""
        number = [len(layout.tensor_sizes) for layout in self.layouts]
        ends = list(accumulate(number, initial=0))
        return [sum(counts[low:high]) for low, high in zip(ends, ends[1:], strict=False)]

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
        headers = self._all_headers(reads, payloads, headers)
        counts = []
        for layout, payload, header, source in zip(
            self.layouts, payloads, headers, sources, strict=True
        ):
            with reading(source):
                counts.append(read_count(layout, payload, header=header))
        together = torch.cat(list(payloads))
        bits = unpack_codes(together, 1)
        counts_there, firsts = numbers_on(self.device, counts, _starts_of(counts))
        number = sum(counts)
        of = torch.repeat_interleave(counts_there, output_size=number)
        index = torch.arange(number, device=self.device).sub_(firsts.index_select(0, of))
        local, facts = self._codes.read(bits, of, index, counts, counts_there)
        reads.later(facts, lambda found: self._codes.check(found, counts, sources))
        positions = local.add_(self._first_there.index_select(0, of))
        return positions, self._read_values(payloads, counts, bits, of, index, positions)

    def _read_values(
        self,
        payloads: Sequence[Tensor],
        counts: Sequence[int],
        bits: Tensor,
        of: Tensor,
        index: Tensor,
        positions: Tensor,
    ) -> Tensor:
        if self.value_format not in SCALED_FORMATS:
            data = torch.cat(
                [
                    payload[layout.edges[3] :][: count * (4 if self.value_format == "fp32" else 2)]
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
        at = self._values_at.index_select(0, of)
        if self.value_format == "1bit":
            codes = bits.index_select(0, at.add_(index))
        else:
            at.add_(index, alpha=2)
            codes = bits.index_select(0, at + 1).mul_(2).add_(bits.index_select(0, at))
        segment = torch.searchsorted(self._edges_there[1:], positions, right=True)
        return levels_of(codes, self.value_format).mul_(scales.index_select(0, segment))

    def _all_headers(
        self,
        reads: DeferredReads,
        payloads: Sequence[Tensor],
        headers: Sequence[bytes | None],
    ) -> list[bytes]:
        if all(header is not None for header in headers):
            return [header for header in headers if header is not None]
        found = bytes(reads.now(torch.cat([part[: HEADER.size] for part in payloads]).long()))
        return [found[at : at + HEADER.size] for at in range(0, len(found), HEADER.size)]


class CodedRows(NamedTuple):
    """Whole rows of several messages as bytes."""

    data: Tensor  # shape `[n, bytes]`, uint8: of each row
    scales: Tensor | None  # shape `[n]`, uint8: the code of each row's scale, if there are scales
    largest: Tensor | None  # shape `[messages, 4]`, uint8: the largest scale of each message
    received: Tensor  # shape `[n, dim]`, fp32: the rows as receivers read them

    def pieces(self, counts: Sequence[int]) -> list[list[Piece]]:
        """Of each message, the bytes of so many rows."""
        found: list[list[Piece]] = []
        start = 0
        for number, count in enumerate(counts):
            end = start + count
            parts: list[Piece] = [self.data[start:end].reshape(-1)]
            if self.scales is not None and self.largest is not None and count:
                parts += [self.largest[number], self.scales[start:end]]
            found.append(parts)
            start = end
        return found


def encode_whole(
    rows: Tensor, of: Tensor, index: Tensor, counts: Sequence[int], value_format: str, chosen: Any
) -> CodedRows:
    """Code rows of several messages, ``[n, dim]``, ``counts`` of each, as
    :func:`lightning_dct.embedding.messages.encode_whole` does those of one.

    Args:
        rows: The rows.
        of: Of each row, the number of its message.
        index: Its number in the message.
        counts: The number of rows of each message.
        value_format: That of changes.
        chosen: Which rows are sent, bool ``[n]``; None for all.
    """
    row_format = WHOLE_FORMATS[value_format]
    if row_format not in LEVELS:
        data = encode_values(rows.reshape(-1), [], row_format)[0]
        none = rows.new_empty(0, dtype=torch.float32)
        received = decode_values(data, [rows.numel()], none, row_format).view_as(rows)
        return CodedRows(data.view(len(rows), -1), None, None, received)
    values = rows.to(torch.float32)
    largest = values.abs().amax(dim=1)
    if chosen is not None:
        largest = largest.masked_fill(~chosen, 0.0)
    side_by_side = largest.new_zeros(len(counts) * max(counts))
    places = torch.add(index, of, alpha=max(counts))
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
    given = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    cuts = [row_values_num_bytes(row_format, count * dim) for _, count in given]
    data = torch.cat([part[:cut] for (part, _), cut in zip(given, cuts, strict=True)])
    number = sum(counts)
    if row_format not in LEVELS:
        none = data.new_empty(0, dtype=torch.float32)
        return decode_values(data, [number * dim], none, row_format).view(number, dim)
    ends = [cut + LARGEST_SCALE_BYTES for cut in cuts]
    edges = list(zip(given, cuts, ends, strict=True))
    largest = torch.cat([part[cut:end] for (part, _), cut, end in edges]).view(torch.float32)
    codes = torch.cat([part[end:] for (part, _), _, end in edges])
    [counts_there] = numbers_on(data.device, [count for _, count in given])
    of = torch.repeat_interleave(counts_there, output_size=number)
    scales = scales_of(codes, largest.index_select(0, of)).unsqueeze(1)
    return data.view(torch.int8).to(torch.float32).view(number, dim).mul_(scales)


def _sorted_in(of: Tensor, keys: Tensor, descending: bool) -> Tensor:
    """The order of entries by ascending groups, and in each by keys; of equals the first first."""
    by_key = keys.sort(stable=True, descending=descending).indices
    return by_key.index_select(0, of.index_select(0, by_key).sort(stable=True).indices)


def _starts_of(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
