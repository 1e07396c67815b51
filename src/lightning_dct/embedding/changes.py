"""One message of changed entries: what moved by more than its table's threshold, as bytes and back. No communication.

A message is about some rows that both ends know already, in an order both know. Its size follows from their number
alone: for each table, ``density`` times its entries among them. So nobody has to be told how long it is, and what
does not fit waits, because nothing is ever lost here: the sender keeps the difference.

    rows [k, d]            what the receiver does not know yet: rows + addend
    sent                   its entries with |a| >= tau(table), the largest of them where there are too many
    left                   rows - decoded(sent)
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.activations.layout import entries_at
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.kernels import Selection, fastest_kernel, select
from lightning_dct.threshold import GUARD_RESELECT, SMALLEST_THRESHOLD, keep_largest, kth_magnitude, nudge
from lightning_dct.wire import PayloadLayout, pack, unpack
from lightning_dct.wire.bits import nonzero_indices

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Message(NamedTuple):
    """What the rows of a message have in common with every other message about the same rows.

    Attributes:
        layout: The payload's shape, one tensor for each table that has rows in it.
        tables: Which tables those are, ascending.
        num_rows: Rows the message is about.
        dim: Entries a row.
    """

    layout: PayloadLayout
    tables: list[int]
    num_rows: int
    dim: int


class Sent(NamedTuple):
    """What goes out.

    Attributes:
        payload: Shape ``[message.layout.num_bytes]``, uint8.
        positions: Shape ``[count]``, int64: places in the flattened rows.
        received: Shape ``[count]``, fp32: the values as they will be read.
        left: Shape ``[count]``: what is still to be sent there.
    """

    payload: Tensor
    positions: Tensor
    received: Tensor
    left: Tensor


def message_about(row_tables: Int64Array, dim: int, density: float, value_format: str) -> Message:
    """The message for some rows.

    Args:
        row_tables: Shape ``[k]``, ascending: the table of each row.
        dim: Entries a row.
        density: Share of them that may be sent.
        value_format: How they are written; see :mod:`lightning_dct.wire.values`.
    """
    counts = np.bincount(row_tables)
    tables = np.flatnonzero(counts)
    sizes = tuple((counts[tables] * dim).tolist())
    capacities = tuple(entries_at(density, size) for size in sizes)
    return Message(PayloadLayout(sizes, capacities, value_format), tables.tolist(), row_tables.size, dim)


def compress_changes(
    rows: Tensor, addend: Tensor, message: Message, thresholds: Float64Array, guard: bool, scale: float = 1.0
) -> Sent:
    """Add to rows and choose what is sent of the sums.

    Zeros never go: 1bit has none. From a table with infinite or NaN sums only those go; their ``left`` is NaN or
    infinite, and in ``rows`` stays what was there before.

    Args:
        rows: Shape ``[k, dim]``, fp32 or fp64, contiguous. ``scale * addend`` is added in place.
        addend: Shape ``[k, dim]``. Not changed.
        message: What it is about.
        thresholds: One for each table of the module; 0 where none was selected yet, or everything goes. Changed in
            place.
        guard: Move the thresholds towards their targets by what this message shows.
        scale: 1 or -1.
    """
    layout, flat, added = message.layout, rows.view(-1), addend.reshape(-1)
    edges = list(accumulate(layout.tensor_sizes, initial=0))
    segments = list(pairwise(edges))
    for (start, stop), table, target in zip(segments, message.tables, layout.capacities, strict=True):
        if target == stop - start:
            thresholds[table] = 0  # everything goes
        elif thresholds[table] == 0:
            thresholds[table] = kth_magnitude(flat[start:stop] + scale * added[start:stop], target)
    limits = np.maximum(thresholds[message.tables], SMALLEST_THRESHOLD)
    chosen = select if fastest_kernel(flat.device.type) == "numba" else _select_at_once
    positions, values, reached = chosen(added, flat, segments, limits.tolist(), scale)
    finite = np.ones(len(segments), dtype=np.bool_)
    broken = values.isfinite().logical_not_()
    if bool(broken.any()):
        table_of = torch.searchsorted(torch.tensor(edges[1:], device=flat.device), positions, right=True)
        finite[table_of[broken].cpu().numpy()] = False
        keep = broken | torch.from_numpy(finite).to(flat.device)[table_of]
        positions, values = positions[keep], values[keep]
        reached = torch.bincount(table_of[keep], minlength=len(segments)).tolist()
    if positions.numel() > layout.capacity:
        # What exceeds its table's threshold by the largest factor goes.
        table_of = torch.searchsorted(torch.tensor(edges[1:], device=flat.device), positions, right=True)
        over = torch.from_numpy(np.where(finite, limits, np.inf)).to(flat.device, flat.dtype).index_select(0, table_of)
        # In fp64, where over the smallest threshold the largest float is finite; infinite over infinite is NaN.
        excess = (values.to(torch.float64) / over).nan_to_num_(nan=math.inf)
        kept = nonzero_indices(keep_largest(excess, layout.capacity)[0])
        positions, values = positions.index_select(0, kept), values.index_select(0, kept)
    if guard:
        _guard(message, thresholds, reached, finite, flat)
    payload, received = pack(layout, positions, values, flat.new_empty(0, dtype=torch.uint8))
    return Sent(payload, positions, received, values - received.to(values.dtype))


def read_changes(payload: Tensor, message: Message) -> tuple[Tensor, Tensor]:
    """Read a message.

    Args:
        payload: Shape ``[message.layout.num_bytes]``, uint8.
        message: What it is about.

    Returns:
        Places in the flattened rows (int64) and the values there (fp32), both shape ``[count]``.

    Raises:
        PayloadError: The bytes are not a message about these rows.
    """
    received = unpack(message.layout, payload)
    return received.positions, received.values


def _select_at_once(
    addend: Tensor, rows: Tensor, segments: list[tuple[int, int]], limits: list[float], scale: float
) -> Selection:
    """What :func:`lightning_dct.kernels.select` does, in operations on all tables together."""
    sizes = torch.tensor([stop - start for start, stop in segments], dtype=torch.int64, device=rows.device)
    before = rows.clone()
    rows.add_(addend.to(rows.dtype), alpha=scale)
    limit = torch.tensor(limits, dtype=rows.dtype, device=rows.device).repeat_interleave(sizes)
    # "Not below" instead of "at or above": it is true for NaN.
    positions = nonzero_indices((rows.abs() < limit).logical_not_())
    values = rows.index_select(0, positions)
    broken = positions[values.isfinite().logical_not_()]
    rows[broken] = before[broken]
    # Positions ascend, so the place where a table ends among them tells how many it has.
    counts = torch.searchsorted(positions, sizes.cumsum(0)).diff(prepend=sizes.new_zeros(1))
    return Selection(positions, values, counts.tolist())


def _guard(message: Message, thresholds: Float64Array, reached: list[int], finite: BoolArray, flat: Tensor) -> None:
    sizes, targets = message.layout.tensor_sizes, message.layout.capacities
    numbers = zip(sizes, message.tables, reached, targets, finite.tolist(), strict=True)
    for place, (size, table, count, target, is_finite) in enumerate(numbers):
        if target == size:
            continue
        if count > GUARD_RESELECT * target and is_finite:
            thresholds[table] = kth_magnitude(flat.split(sizes)[place], target)
        else:
            thresholds[table] = nudge(float(thresholds[table]), count, target, size)
