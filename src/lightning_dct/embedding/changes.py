"""One message of changed entries: what moved by more than its table's threshold, as bytes and back. No communication.

A message is about some rows that both ends know already, in an order both know. Its size follows from their number
alone: for each table, ``density`` times its entries among them. So nobody has to be told how long it is, and what
does not fit waits, because nothing is ever lost here: the sender keeps the difference.

    accumulated [k, d]     what the receiver does not know yet
    sent                   its entries with |a| >= tau(table), the largest of them where there are too many
    left                   accumulated - decoded(sent)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.activations.layout import entries_at
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.threshold import GUARD_RESELECT, SMALLEST_THRESHOLD, keep_largest, kth_magnitude, nudge
from lightning_dct.wire import PayloadLayout, pack, unpack

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
    tables, counts = np.unique(row_tables, return_counts=True)
    sizes = tuple(int(count) * dim for count in counts)
    capacities = tuple(entries_at(density, size) for size in sizes)
    return Message(PayloadLayout(sizes, capacities, value_format), tables.tolist(), row_tables.size, dim)


def compress_changes(accumulated: Tensor, message: Message, thresholds: Float64Array, guard: bool) -> Sent:
    """Choose what is sent.

    Zeros never go: 1bit has none. From a table with infinite or NaN entries only those go, and ``left`` is NaN or
    infinite there: the caller keeps what it had.

    Args:
        accumulated: Shape ``[k, dim]``, fp32 or fp64. Not changed.
        message: What it is about.
        thresholds: One for each table of the module; 0 where none was selected yet, or everything goes. Changed in
            place.
        guard: Move the thresholds towards their targets by what this message shows.
    """
    flat = accumulated.reshape(-1)
    sizes, targets = message.layout.tensor_sizes, message.layout.capacities
    for part, table, target in zip(flat.split(sizes), message.tables, targets, strict=True):
        if target == part.numel():
            thresholds[table] = 0  # everything goes
        elif thresholds[table] == 0:
            thresholds[table] = kth_magnitude(part, target)
    finite = _finite_tables(flat, sizes)
    known = np.where(finite, np.maximum(thresholds[message.tables], SMALLEST_THRESHOLD), np.inf)
    limits = torch.from_numpy(known).to(flat.dtype).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    limits = limits.to(flat.device)
    # "Not below" instead of "at or above": it is true for NaN.
    positions = (flat.abs() < limits).logical_not_().nonzero().squeeze(1)
    values = flat[positions]
    # How many there are of each table: positions ascend, so the place where a table ends among them tells.
    ends = torch.tensor(sizes, dtype=torch.int64, device=positions.device).cumsum(0)
    reached = np.diff(torch.searchsorted(positions, ends).cpu().numpy(), prepend=0).tolist()
    if positions.numel() > message.layout.capacity:
        # What exceeds its table's threshold by the largest factor goes.
        # In fp64, where over the smallest threshold the largest float is finite; infinite over infinite is NaN.
        excess = (values.to(torch.float64) / limits[positions]).nan_to_num_(nan=math.inf)
        keep, _ = keep_largest(excess, message.layout.capacity)
        positions, values = positions[keep], values[keep]
    if guard:
        _guard(message, thresholds, reached, finite, flat)
    payload, received = pack(message.layout, positions, values, flat.new_empty(0, dtype=torch.uint8))
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


def _finite_tables(flat: Tensor, sizes: tuple[int, ...]) -> BoolArray:
    """Which tables have finite entries only."""
    finite = flat.isfinite()
    if bool(finite.all()):
        return np.ones(len(sizes), dtype=np.bool_)
    return torch.stack([part.all() for part in finite.split(sizes)]).cpu().numpy()


def _guard(message: Message, thresholds: Float64Array, reached: list[int], finite: BoolArray, flat: Tensor) -> None:
    parts, targets = flat.split(message.layout.tensor_sizes), message.layout.capacities
    for part, table, count, target, is_finite in zip(parts, message.tables, reached, targets, finite, strict=True):
        if target == part.numel():
            continue
        if count > GUARD_RESELECT * target and is_finite:
            thresholds[table] = kth_magnitude(part, target)
        else:
            thresholds[table] = max(nudge(thresholds[table], count, target, part.numel()), SMALLEST_THRESHOLD)
