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

    rows [k, d]            to be sent: rows + addend
    sent                   the entries with |a| >= tau(table), the largest of them if there are too many
    left                   rows - decoded(sent)

*Whole rows* are in the same format if that is fp32 or bf16, else in int8 with a scale for each row:
residuals of rows that leave a cache, which no end remembers any longer, and changes of rows whose
copies are outdated.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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
from lightning_dct.kernels import cpu_kernel, positions_of
from lightning_dct.kernels.bits import (
    nonzero_indices,
    num_bytes,
    pack_bits,
    unpack_bits,
)
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD
from lightning_dct.wire.payload import PayloadLayout, pack_payload, unpack_payload, unpack_values
from lightning_dct.wire.positions import PayloadError, PositionCode
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
        number = int(groups.max()) + 1 if groups.size else 0
        self._members = [rows[groups == group] for group in range(number)]
        # The last group is "all rows".
        self._sizes = [*(members.size for members in self._members), self.universe]

    def encode(self, places: Int64Array) -> Tensor:
        """Encode places, shape ``[k]``, ascending and distinct, as uint8 on the CPU."""
        known = np.zeros(places.size, dtype=bool)
        found = np.searchsorted(self._rows, places)
        inside = found < self._rows.size
        known[inside] = self._rows[found[inside]] == places[inside]
        groups = self._groups[found[known]]
        seen = places[known]
        parts = [
            np.searchsorted(members, seen[groups == group])
            for group, members in enumerate(self._members)
        ]
        parts.append(places[~known])
        bits = [
            torch.tensor(
                [part.size >> place & 1 for place in range(size.bit_length())], dtype=torch.uint8
            )
            for part, size in zip(parts, self._sizes, strict=True)
        ]
        codes = zip(self._codes([part.size for part in parts]), parts, strict=True)
        bits += [
            code.encode_bits(torch.from_numpy(part)) for code, part in codes if code is not None
        ]
        return pack_bits(torch.cat(bits))

    def _codes(self, counts: list[int]) -> list[PositionCode | None]:
        """The code of each group's places; None if none or all of them are requested."""
        both = zip(self._sizes, counts, strict=True)
        return [PositionCode(size, count) if 0 < count < size else None for size, count in both]

    def decode(self, data: Tensor, most: int) -> Int64Array:
        """Undo :meth:`encode`.

        More than ``most`` places are refused: corrupt bits could claim all of a large table.

        Raises:
            PayloadError: The bytes are not a request.
        """
        widths = [size.bit_length() for size in self._sizes]
        bits = unpack_bits(data.cpu(), 8 * data.numel())
        if bits.numel() < sum(widths):
            raise PayloadError("a request for rows ends too early")
        *written, rest = bits.split([*widths, bits.numel() - sum(widths)])
        counts = [sum(bit << place for place, bit in enumerate(part.tolist())) for part in written]
        if any(count > size for count, size in zip(counts, self._sizes, strict=True)):
            raise PayloadError("a request for rows claims more of them than there are")
        if sum(counts) > most:
            raise PayloadError(
                f"a request for rows claims {sum(counts)} of them, for {most} look-ups"
            )
        codes = self._codes(counts)
        lengths = [0 if code is None else code.num_bits for code in codes]
        if rest.numel() < sum(lengths):
            raise PayloadError("a request for rows ends too early")
        if data.numel() != (needed := num_bytes(sum(widths) + sum(lengths))):
            raise PayloadError(
                f"a request for rows has {data.numel()} bytes, but its content takes {needed}"
            )
        *parts, _ = rest.split([*lengths, rest.numel() - sum(lengths)])
        *grouped, others = [
            np.arange(count) if code is None else code.decode_bits(part, count).numpy()
            for count, code, part in zip(counts, codes, parts, strict=True)
        ]
        found = [members[places] for members, places in zip(self._members, grouped, strict=True)]
        wanted = np.sort(np.concatenate([*found, others]))
        if (wanted[1:] == wanted[:-1]).any():
            raise PayloadError("a request has a row twice")
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """The groups."""
        return {
            "rows": torch.from_numpy(self._rows.copy()),
            "groups": torch.from_numpy(self._groups.astype(np.int64)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved groups."""
        self._group(state["rows"].numpy().copy(), state["groups"].numpy().copy())


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


class SentRows(NamedTuple):
    """A message, and the rest that remains to be sent."""

    payload: Tensor  # shape `[message.layout.num_bytes]`, uint8
    positions: Tensor  # shape `[count]`, int64: positions in the flattened rows
    received: Tensor  # shape `[count]`, fp32: the values as the receiver reads them
    left: Tensor  # shape `[count]`: what remains to be sent at these positions
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


def compress_changes(
    rows: Tensor, addend: Tensor, message: Message, thresholds: Float64Array, scale: float = 1.0
) -> SentRows:
    """Add to rows on a CPU, select entries of the sums, and pack them.

    Zeros are never sent, because 1bit has none. If a table has infinite or NaN sums, only those are
    sent: ``rows`` keeps its old values there, and ``left`` is NaN or infinite.

    Args:
        rows: Shape ``[k, dim]``, fp32 or fp64, contiguous. ``scale * addend`` is added in place.
        addend: Shape ``[k, dim]``. Not changed.
        message: The form of the message.
        thresholds: One for each table of the module; 0 if none was selected yet, or if everything
            is sent. Changed in place: the guard moves them towards their targets by the counts of
            this message.
        scale: 1 or -1.
    """
    layout = message.layout
    flat = rows.view(-1)
    edges = list(accumulate(layout.tensor_sizes, initial=0))
    inputs, references = (
        tensor.split(layout.tensor_sizes) for tensor in (addend.reshape(-1), flat)
    )
    for new, base, table, target in zip(
        inputs, references, message.tables, layout.capacities, strict=True
    ):
        if target == base.numel():
            thresholds[table] = 0  # everything is sent
        elif thresholds[table] == 0:
            thresholds[table] = kth_magnitude(base + scale * new, target)
    limits = np.maximum(thresholds[message.tables], SMALLEST_THRESHOLD)
    flags = torch.zeros(layout.flags_num_bytes, dtype=torch.uint8)
    values, reached = cpu_kernel().select(
        inputs, references, edges[:-1], limits.tolist(), scale, flags
    )
    if not values.isfinite().all():
        positions = positions_of(flags, len(values))
        return send_some(rows, message, thresholds, limits, positions, values, reached)
    guard(message, thresholds, reached, references)
    if len(values) > layout.capacity:
        values, reached = _fit(layout, limits.astype(values.numpy().dtype), flags, values, reached)
    return _sent(layout, flags, positions_of(flags, len(values)), values, reached, True)


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
    left_out = np.flatnonzero(~keep)
    at = positions_of(flags, len(values)).numpy()[left_out]
    # Distinct flags that are set, so no other one changes.
    np.subtract.at(flags.numpy(), at >> 3, (1 << (at & 7)).astype(np.uint8))
    counts = np.array(reached) - np.bincount(table_of[left_out], minlength=len(reached))
    return torch.from_numpy(values.numpy()[keep]), counts.tolist()


def send_some(
    rows: Tensor,
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
        rows: What was selected from; not where it is infinite or NaN.
        message: The form of the message.
        thresholds: One for each table of the module, which the guard moves.
        limits: Those of the tables in the message, from which the entries were selected.
        positions: Shape ``[count]``, int64: the entries' positions in the flattened rows.
        values: The entries.
        reached: The number of them of each table.
    """
    layout = message.layout
    references = rows.view(-1).split(layout.tensor_sizes)
    ends = torch.tensor(list(accumulate(layout.tensor_sizes)), device=rows.device)
    table_of = torch.searchsorted(ends, positions, right=True)
    broken = values.isfinite().logical_not_()
    finite = np.ones(len(references), dtype=np.bool_)
    finite[table_of[broken].cpu().numpy()] = False
    if not finite.all():
        keep = broken | torch.from_numpy(finite).to(rows.device)[table_of]
        positions = positions[keep]
        values = values[keep]
        table_of = table_of[keep]
        reached = torch.bincount(table_of, minlength=len(references)).tolist()
    guard(message, thresholds, reached, references, finite.tolist())
    if len(values) > layout.capacity:
        # Those that exceed their table's threshold by the largest factors are sent.
        over = torch.from_numpy(np.where(finite, limits, np.inf)).to(rows.device, rows.dtype)
        # In fp64 the largest float over the smallest threshold is finite; infinite over infinite is
        # NaN.
        excess = values.to(torch.float64) / over[table_of]
        kept = nonzero_indices(keep_largest(excess.nan_to_num_(nan=math.inf), layout.capacity)[0])
        positions = positions[kept]
        values = values[kept]
        table_of = table_of[kept]
    counts = torch.bincount(table_of, minlength=len(references)).tolist()
    flags = torch.zeros(layout.flags_num_bytes, dtype=torch.uint8, device=rows.device)
    flags.index_add_(0, positions >> 3, (1 << (positions & 7)).to(torch.uint8))
    return _sent(layout, flags, positions, values, counts, bool(finite.all()))


def _sent(
    layout: PayloadLayout,
    flags: Tensor,
    positions: Tensor,
    values: Tensor,
    counts: list[int],
    is_finite: bool,
) -> SentRows:
    none = values.new_empty(0, dtype=torch.uint8)
    payload = pack_payload(layout, flags, values, counts, none)
    received = unpack_values(layout, payload, counts)
    left = values - received.to(values.dtype)
    return SentRows(payload, positions, received, left, is_finite)


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


def encode_some(
    rows: Tensor, known: Tensor, chosen: Tensor, message: Message
) -> tuple[Tensor, Tensor]:
    """Which of the rows, ``[k, dim]``, are chosen (int64, ascending), then these less what is known.

    Returns:
        The bytes, and what a receiver reads of the chosen rows, ``[count, dim]``, fp32.
    """
    places = PositionCode(message.num_rows, len(chosen)).encode(chosen)
    value_format = message.layout.value_format
    changes = rows.index_select(0, chosen) - finite(known.index_select(0, chosen))
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


def read_changes(message: Message, payload: Tensor) -> tuple[Tensor, Tensor]:
    """Undo :func:`compress_changes`: positions in the flattened rows, int64, and values, fp32
    (PayloadError).
    """
    sent = unpack_payload(message.layout, payload)
    return sent.positions, sent.values


def guard(
    message: Message,
    thresholds: Float64Array,
    reached: list[int],
    sums: Sequence[Tensor],
    finite: Sequence[bool] | None = None,
) -> None:
    """Move thresholds towards their targets, or select those anew that far too many entries have
    reached.
    """
    finite = finite or [True] * len(sums)
    parts = zip(sums, message.tables, reached, message.layout.capacities, finite, strict=True)
    for part, table, count, target, is_finite in parts:
        if target == part.numel():
            continue
        if count > GUARD_RESELECT * target and is_finite:
            thresholds[table] = kth_magnitude(part, target)
        else:
            thresholds[table] = nudge(
                float(thresholds[table]), count, target, part.numel(), GUARD_AIM
            )
