"""Messages about rows as bytes: the ids of a request, changed entries, and whole rows.

No communication.

*Ids* take little more bits than their entropy. Look-ups are uneven: some rows are in every batch,
most in hardly any. Among rows with the same number of requests, a request is a uniform choice, for
which :class:`~lightning_dct.wire.positions.PositionCode` (or its bitmap, if the request takes most
of a group) needs almost the fewest bits. So rows are grouped by the power of two below their count.
Both ends count the same requests, so they know the same groups.

==============  ===================================================================================
part            bits
==============  ===================================================================================
number of rows  for each group as many bits as its size has, lowest first; the last group is "all
                rows", for rows that are requested for the first time
positions       for each group, places among its rows in ascending order
==============  ===================================================================================

*Changed entries* are those that exceed their table's threshold. The receiver reads them with
:func:`~lightning_dct.wire.payload.unpack_payload`. Both ends know the rows and their order. The
size follows from the number of rows: for each table, ``density`` times its entries among them. So
no rank announces a size. The sender keeps the entries that do not fit::

    a [k, d]               to be sent: sums of rows
    sent                   the entries with |a| >= tau(table), the largest of them if there are too many
    left                   a - decoded(sent)

*Whole rows* are in the same format if that is fp32 or bf16, else in int8 with a scale for each row:
residuals of rows that leave a cache, which no end remembers any longer, and changes of rows whose
copies are outdated.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.compress.threshold import (
    GUARD_RESELECT,
    entries_at,
    keep_largest,
    kth_magnitude,
    nudge,
)
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.kernels import compiled, cpu_kernel, positions_of
from lightning_dct.kernels.bits import (
    nonzero_indices,
    num_bytes,
    pack_bits,
    unpack_bits,
)
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD
from lightning_dct.wire.payload import PayloadLayout, pack_payload, unpack_values
from lightning_dct.wire.positions import PayloadError, PositionCode, check_count
from lightning_dct.wire.rows import (
    WHOLE_FORMATS,
    decode_rows,
    encode_rows,
    row_scales_num_bytes,
    row_values_num_bytes,
)

# The guard aims a little high: a surplus is cut to the largest entries, but a shortfall is sent as
# padding.
GUARD_AIM = 1.05
# Requests between two groupings; in the beginning, rows are also grouped whenever the number of
# requests has doubled.
REGROUP_EVERY = 64
# Requests between two halvings of the counts.
HALVE_EVERY = 1024
# Bytes that a row of a code takes.
CODE_BYTES = 17
Float64Array = npt.NDArray[np.float64]


class RequestCode:
    """Encodes and decodes ascending distinct places below ``universe``, the number of the owner's
    rows.
    """

    def __init__(self, universe: int) -> None:
        self.universe = universe
        self._group(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def learn(self, rows: Int64Array, counts: Int64Array) -> None:
        """Group ascending rows, ``[n]``, by their counts of requests, ``[n]``; ignore rows with
        count 0.
        """
        seen = counts > 0
        self._group(rows[seen], np.frexp(counts[seen])[1].astype(np.int64) - 1)

    def _group(self, rows: Int64Array, groups: Int64Array) -> None:
        self._rows = rows
        self._groups = groups.astype(np.uint8)
        sizes = np.bincount(self._groups)
        # Which rows are in each group, one group after the other, and the number of each row in its
        # group.
        self._order = np.argsort(self._groups, kind="stable").astype(np.int32)
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), sizes.cumsum()])
        self._numbers = np.empty(rows.size, dtype=np.int32)
        self._numbers[self._order] = np.arange(rows.size) - np.repeat(self._starts[:-1], sizes)
        # The last group is "all rows".
        self._sizes = [*sizes.tolist(), self.universe]

    def encode(self, places: Int64Array) -> Tensor:
        """Encode places, shape ``[k]``, ascending and distinct, as uint8 on the CPU."""
        loops = compiled("cpu", loops="numba_ids")
        grouped = _grouped if loops is None else loops.grouped
        numbers, counts = grouped(
            self._rows, self._groups, self._numbers, len(self._sizes), np.ascontiguousarray(places)
        )
        header = 0
        start = 0
        for count, size in zip(counts.tolist(), self._sizes, strict=True):
            header |= count << start
            start += size.bit_length()
        codes = self._codes(counts.tolist())
        length = num_bytes(start + sum(0 if code is None else code.num_bits for code in codes))
        written = header.to_bytes(num_bytes(start), "little")
        if loops is not None:
            words = np.zeros(length // 8 + 2, dtype=np.uint64)
            words.view(np.uint8)[: len(written)] = np.frombuffer(written, dtype=np.uint8)
            loops.write_codes(words, self._table(codes, counts.tolist(), start), numbers)
            return torch.from_numpy(words.view(np.uint8)[:length])
        bits = [unpack_bits(torch.frombuffer(bytearray(written + b"\0"), dtype=torch.uint8), start)]
        parts = torch.from_numpy(numbers).split(counts.tolist())
        for code, part in zip(codes, parts, strict=True):
            if code is not None:
                bits.append(code.encode_bits(part))
        return pack_bits(torch.cat(bits))

    def _codes(self, counts: Sequence[int]) -> list[PositionCode | None]:
        """The code of each group's places; None if none or all of them are requested."""
        both = zip(self._sizes, counts, strict=True)
        return [PositionCode(size, count) if 0 < count < size else None for size, count in both]

    def _table(
        self, codes: Sequence[PositionCode | None], counts: Sequence[int], start: int
    ) -> Int64Array:
        """For compiled loops, of each group: the bit at which its code begins, its last place, the
        number of places, and the numbers of flags, 0 without a code, and of low bits.
        """
        table = np.zeros((len(codes), 5), dtype=np.int64)
        for number, (code, count) in enumerate(zip(codes, counts, strict=True)):
            table[number, :3] = start, self._sizes[number] - 1, count
            if code is not None:
                table[number, 3:] = code.num_flags, code.low_bits
                start += code.num_bits
        return table

    def decode(self, data: Tensor, most: int) -> Int64Array:
        """Undo :meth:`encode`.

        More than ``most`` places are refused: corrupt bits could claim all of a large table.

        Raises:
            PayloadError: The bytes are not a request.
        """
        widths = [size.bit_length() for size in self._sizes]
        start = sum(widths)
        written = np.ascontiguousarray(data.cpu().numpy())
        if 8 * written.size < start:
            raise PayloadError("a request for rows ends too early")
        header = int.from_bytes(written[: num_bytes(start)].tobytes(), "little")
        counts = []
        for width in widths:
            counts.append(header & ((1 << width) - 1))
            header >>= width
        if any(count > size for count, size in zip(counts, self._sizes, strict=True)):
            raise PayloadError("a request for rows claims more of them than there are")
        if sum(counts) > most:
            raise PayloadError(
                f"a request for rows claims {sum(counts)} of them, for {most} look-ups"
            )
        codes = self._codes(counts)
        length = sum(0 if code is None else code.num_bits for code in codes)
        if 8 * written.size < start + length:
            raise PayloadError("a request for rows ends too early")
        if written.size != (needed := num_bytes(start + length)):
            raise PayloadError(
                f"a request for rows has {written.size} bytes, but its content takes {needed}"
            )
        numbers = self._read_codes(written, codes, counts, start)
        loops = compiled("cpu", loops="numba_ids")
        merge = _merged if loops is None else loops.merged
        ends = np.cumsum([0, *counts])
        wanted = merge(self._rows, self._order, self._starts, numbers, ends)
        if (wanted[1:] == wanted[:-1]).any():
            raise PayloadError("a request has a row twice")
        return cast(Int64Array, wanted)

    def _read_codes(
        self,
        written: npt.NDArray[np.uint8],
        codes: Sequence[PositionCode | None],
        counts: Sequence[int],
        start: int,
    ) -> Int64Array:
        """The numbers of places in their groups, one group after the other."""
        if (loops := compiled("cpu", loops="numba_ids")) is not None:
            numbers = np.empty(sum(counts), dtype=np.int64)
            words = np.zeros(written.size // 8 + 2, dtype=np.uint64)
            words.view(np.uint8)[: written.size] = written
            found = loops.read_codes(words, self._table(codes, counts, start), numbers)
            for code, count, marked in zip(codes, counts, found.tolist(), strict=True):
                if code is not None:
                    check_count(abs(marked), count)
                    if marked < 0:
                        raise code.not_ascending()
            return numbers
        bits = unpack_bits(torch.from_numpy(written), 8 * written.size)[start:]
        parts = []
        for code, count in zip(codes, counts, strict=True):
            if code is None:
                parts.append(np.arange(count))
                continue
            parts.append(code.decode_bits(bits[: code.num_bits], count).numpy())
            bits = bits[code.num_bits :]
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """The groups."""
        return {
            "rows": torch.from_numpy(self._rows.copy()),
            "groups": torch.from_numpy(self._groups.astype(np.int64)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved groups."""
        self._group(state["rows"].numpy().copy(), state["groups"].numpy().copy())


def _grouped(
    rows: Int64Array,
    groups: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.int32],
    num_groups: int,
    places: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """The number of each place in its group, one group after the other, and how many each group
    has. Places that are not among the rows are in the last group by themselves.
    """
    found = np.searchsorted(rows, places)
    known = np.zeros(places.size, dtype=bool)
    inside = found < rows.size
    known[inside] = rows[found[inside]] == places[inside]
    group = np.full(places.size, num_groups - 1)
    number = places.copy()
    group[known] = groups[found[known]]
    number[known] = numbers[found[known]]
    counts = np.bincount(group, minlength=num_groups)
    return number[np.argsort(group, kind="stable")], counts


def _merged(
    rows: Int64Array,
    order: npt.NDArray[np.int32],
    starts: Int64Array,
    numbers: Int64Array,
    ends: Int64Array,
) -> Int64Array:
    """Undo :func:`_grouped`: places, ascending; a place that is given twice is there twice."""
    grouped = ends[-2]
    first = np.repeat(starts[:-1], np.diff(ends[:-1]))
    known = rows[order[first + numbers[:grouped]]]
    return np.sort(np.concatenate([known, numbers[grouped:]]))


class Message(NamedTuple):
    """The form of all messages about the same rows."""

    layout: PayloadLayout  # with one tensor for each table with rows in the message
    tables: list[int]  # these tables, ascending
    num_rows: int
    dim: int

    def some_num_bytes(self, count: int) -> int:
        """Bytes of :func:`encode_some` for ``count`` of the rows (PayloadError: there are not so
        many).
        """
        if count > self.num_rows:
            raise PayloadError(
                f"An owner announces {count} rows where {self.num_rows} were requested."
            )
        whole = whole_num_bytes(count, self.dim, self.layout.value_format)
        return PositionCode(self.num_rows, count).num_bytes + whole


class RowSums(NamedTuple):
    """The sums of rows on a CPU from which a message is selected: ``rows[at] + scale *
    new[new_at]``.
    """

    rows: Tensor  # shape `[n, dim]`, fp32 or fp64, contiguous
    at: Tensor  # shape `[k]`, int64
    new: Tensor  # shape `[m, dim]`, of the same dtype, contiguous
    new_at: Tensor  # shape `[k]`, int64
    scale: float = 1.0  # or -1
    # Whether selecting leaves the sums in `rows`, except where they are infinite or NaN.
    is_kept: bool = False

    def of(self, start: int, end: int, is_selected: bool) -> Tensor:
        """Some of the sums, flattened, before or after they are selected from; after it without
        infinite ones and NaN.
        """
        base = self.rows.index_select(0, self.at[start:end])
        if not (is_selected and self.is_kept):
            base += self.scale * self.new.index_select(0, self.new_at[start:end])
        return base.view(-1)


class SentRows(NamedTuple):
    """A message, and what is in it."""

    payload: Tensor  # shape `[message.layout.num_bytes]`, uint8
    flags: Tensor  # packed: which entries of the rows, flattened, are in it
    # Shape `[count]`: the sums there, valid until the same thread selects again.
    values: Tensor
    received: Tensor  # shape `[count]`, fp32: these as the receiver reads them
    is_finite: bool  # whether no sum is infinite or NaN


def message_about(row_tables: Int64Array, dim: int, density: float, value_format: str) -> Message:
    """The form of a message about rows; ``row_tables``, shape ``[k]``, ascending, has the table of
    each.
    """
    counts = np.bincount(row_tables)
    tables = np.flatnonzero(counts)
    sizes = tuple((counts[tables] * dim).tolist())
    capacities = tuple(entries_at(density, size) for size in sizes)
    return Message(
        PayloadLayout(sizes, capacities, value_format), tables.tolist(), row_tables.size, dim
    )


def compress_changes(sums: RowSums, message: Message, thresholds: Float64Array) -> SentRows:
    """Select entries of sums of rows, and pack them.

    Zeros are never sent, because 1bit has none. If a table has infinite or NaN sums, only those are
    sent.

    Args:
        sums: What is selected from.
        message: The form of the message.
        thresholds: One for each table of the module; 0 if none was selected yet, or if everything
            is sent. Changed in place: the guard moves them towards their targets by the counts of
            this message.
    """
    layout = message.layout
    lengths = [size // message.dim for size in layout.tensor_sizes]
    edges = list(accumulate(lengths, initial=0))
    for number, (table, target) in enumerate(zip(message.tables, layout.capacities, strict=True)):
        if target == layout.tensor_sizes[number]:
            thresholds[table] = 0  # everything is sent
        elif thresholds[table] == 0:
            thresholds[table] = kth_magnitude(
                sums.of(edges[number], edges[number + 1], is_selected=False), target
            )

    def after(number: int) -> Tensor:
        return sums.of(edges[number], edges[number + 1], is_selected=True)

    limits = np.maximum(thresholds[message.tables], SMALLEST_THRESHOLD)
    flags = torch.zeros(layout.flags_num_bytes, dtype=torch.uint8)
    values, reached = cpu_kernel().select_rows(
        *sums[:4], lengths, limits.tolist(), sums.scale, sums.is_kept, flags
    )
    if not values.isfinite().all():
        positions = positions_of(flags, len(values))
        return send_some(after, message, thresholds, limits, positions, values, reached)
    guard(message, thresholds, reached, after)
    if len(values) > layout.capacity:
        values, reached = _fit(layout, limits.astype(values.numpy().dtype), flags, values, reached)
    return _sent(layout, flags, values, reached, True)


def _fit(
    layout: PayloadLayout,
    limits: npt.NDArray[Any],
    flags: Tensor,
    values: Tensor,
    reached: list[int],
) -> tuple[Tensor, list[int]]:
    """Leave out those values that exceed their table's limit by the smallest factors, so that the
    others fit: the values that stay, and how many each table has. Their flags stay set.
    """
    table_of = np.repeat(np.arange(len(reached)), reached)
    # In fp64 the largest float over the smallest threshold is finite.
    excess = values.to(torch.float64) / torch.from_numpy(limits[table_of])
    keep = keep_largest(excess, layout.capacity)[0].numpy()
    cpu_kernel().unflag(flags, torch.from_numpy(keep))
    left_out = np.flatnonzero(~keep)
    counts = np.array(reached) - np.bincount(table_of[left_out], minlength=len(reached))
    return torch.from_numpy(values.numpy()[keep]), counts.tolist()


def send_some(
    sums: Callable[[int], Tensor],
    message: Message,
    thresholds: Float64Array,
    limits: Float64Array,
    positions: Tensor,
    values: Tensor,
    reached: list[int],
) -> SentRows:
    """Pack those of selected entries that may be sent: of a table with infinite or NaN ones only
    these, and the largest if there are too many.

    Args:
        sums: Gives what was selected from, of one table of the message, flattened.
        message: The form of the message.
        thresholds: One for each table of the module, which the guard moves.
        limits: Those of the tables in the message, from which the entries were selected.
        positions: Shape ``[count]``, int64: the entries' positions in the flattened rows.
        values: The entries.
        reached: The number of them of each table.
    """
    layout = message.layout
    device = positions.device
    number = len(layout.tensor_sizes)
    ends = torch.tensor(list(accumulate(layout.tensor_sizes)), device=device)
    table_of = torch.searchsorted(ends, positions, right=True)
    broken = values.isfinite().logical_not_()
    finite = np.ones(number, dtype=np.bool_)
    finite[table_of[broken].cpu().numpy()] = False
    if not finite.all():
        keep = broken | torch.from_numpy(finite).to(device)[table_of]
        positions = positions[keep]
        values = values[keep]
        table_of = table_of[keep]
        reached = torch.bincount(table_of, minlength=number).tolist()
    guard(message, thresholds, reached, sums, finite.tolist())
    if len(values) > layout.capacity:
        # Those that exceed their table's threshold by the largest factors are sent.
        over = torch.from_numpy(np.where(finite, limits, np.inf)).to(device, values.dtype)
        # In fp64 the largest float over the smallest threshold is finite; infinite over infinite is
        # NaN.
        excess = values.to(torch.float64) / over[table_of]
        kept = nonzero_indices(keep_largest(excess.nan_to_num_(nan=math.inf), layout.capacity)[0])
        positions = positions[kept]
        values = values[kept]
        table_of = table_of[kept]
    counts = torch.bincount(table_of, minlength=number).tolist()
    flags = torch.zeros(layout.flags_num_bytes, dtype=torch.uint8, device=device)
    flags.index_add_(0, positions >> 3, (1 << (positions & 7)).to(torch.uint8))
    return _sent(layout, flags, values, counts, bool(finite.all()))


def _sent(
    layout: PayloadLayout, flags: Tensor, values: Tensor, counts: list[int], is_finite: bool
) -> SentRows:
    none = values.new_empty(0, dtype=torch.uint8)
    payload = pack_payload(layout, flags, values, counts, none)
    received = unpack_values(layout, payload, counts)
    return SentRows(payload, flags, values, received, is_finite)


def encode_whole(rows: Tensor, value_format: str) -> Tensor:
    """Whole rows, ``[n, dim]``, as bytes; ``value_format`` is that of changes."""
    return torch.cat(encode_rows(rows.reshape(-1), None, len(rows), WHOLE_FORMATS[value_format]))


def whole_num_bytes(num_rows: int, dim: int, value_format: str) -> int:
    """Bytes of :func:`encode_whole`."""
    row_format = WHOLE_FORMATS[value_format]
    return row_values_num_bytes(row_format, num_rows * dim) + row_scales_num_bytes(
        row_format, num_rows
    )


def decode_whole(data: Tensor, num_rows: int, dim: int, value_format: str) -> Tensor:
    """Undo :func:`encode_whole`: shape ``[num_rows, dim]``, fp32."""
    row_format = WHOLE_FORMATS[value_format]
    values, scales = data.tensor_split([row_values_num_bytes(row_format, num_rows * dim)])
    return decode_rows(values, num_rows * dim, None, scales, row_format).view(num_rows, dim)


def encode_some(changes: Tensor, chosen: Tensor, message: Message) -> tuple[Tensor, Tensor]:
    """Which of the rows of a message are chosen (int64, ascending), and the changes of these,
    ``[count, dim]``.

    Returns:
        The bytes, and what a receiver reads of the changes, fp32.
    """
    places = PositionCode(message.num_rows, len(chosen)).encode(chosen)
    value_format = message.layout.value_format
    whole = encode_whole(changes, value_format)
    received = decode_whole(whole, len(chosen), message.dim, value_format)
    return torch.cat([places, whole]), received


def finite(copies: Tensor) -> Tensor:
    """Copies to which whole rows are added; zero where they are infinite or NaN, because no sum
    would mend that.
    """
    return copies.nan_to_num(0.0, 0.0, 0.0)


def decode_some(message: Message, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Undo :func:`encode_some` of ``count`` rows (PayloadError): their places, and they."""
    code = PositionCode(message.num_rows, count)
    places, rows = data.tensor_split([code.num_bytes])
    received = decode_whole(rows, count, message.dim, message.layout.value_format)
    return code.decode(places, count), received


def guard(
    message: Message,
    thresholds: Float64Array,
    reached: list[int],
    sums: Callable[[int], Tensor],
    finite: Sequence[bool] | None = None,
) -> None:
    """Move thresholds towards their targets, or select those anew that far too many entries have
    reached; ``sums`` gives those of one table of the message, flattened.
    """
    layout = message.layout
    finite = finite or [True] * len(reached)
    parts = zip(
        message.tables, layout.tensor_sizes, reached, layout.capacities, finite, strict=True
    )
    for number, (table, size, count, target, is_finite) in enumerate(parts):
        if target == size:
            continue
        if count > GUARD_RESELECT * target and is_finite:
            thresholds[table] = kth_magnitude(sums(number), target)
        else:
            thresholds[table] = nudge(float(thresholds[table]), count, target, size, GUARD_AIM)
