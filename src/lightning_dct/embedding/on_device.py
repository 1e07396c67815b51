"""Messages about changes of rows on a device: the same bits as on a CPU, and few waits of its host.

All tables are treated at once. Where the host must know something to go on, a function is a
generator: it yields a tensor of whole numbers, and is sent them. So :func:`together` reads those of
the messages with all ranks at once.
"""

import math
from collections.abc import Generator, Mapping
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.kernels.bits import positions_in, unpack_bits
from lightning_dct.wire.payload import PayloadLayout, pack_parts, read_count, read_scales
from lightning_dct.wire.values import SCALED_FORMATS, decode_values, encode_values

Result = TypeVar("Result")
Key = TypeVar("Key")
# Yields int64 tensors of one dimension, and is sent their numbers.
Reading = Generator[Tensor, list[int], Result]


def together(parts: Mapping[Key, Reading[Result]]) -> dict[Key, Result]:
    """Run generators side by side; what all of them have to know is read in one piece."""
    results: dict[Key, Result] = {}
    waiting = dict(parts)
    known: dict[Key, list[int]] | None = None
    while waiting:
        asked: dict[Key, Tensor] = {}
        for key, part in list(waiting.items()):
            try:
                asked[key] = next(part) if known is None else part.send(known[key])
            except StopIteration as end:
                results[key] = end.value
                del waiting[key]
        numbers = torch.cat(list(asked.values())).tolist() if asked else []
        known = {}
        for key, tensor in asked.items():
            known[key] = numbers[: tensor.numel()]
            numbers = numbers[tensor.numel() :]
    return {key: results[key] for key in parts}


class Selected(NamedTuple):
    """Entries of rows that are to be sent."""

    positions: Tensor  # shape `[count]`, int64, ascending: in the flattened rows
    values: Tensor  # shape `[count]`
    counts: list[int]  # how many are of each table
    some_broken: bool  # whether some of them are infinite or NaN


def edges_of(layout: PayloadLayout, device: torch.device) -> Tensor:
    """Where each table's entries begin and the last's end: int64, ``[tables + 1]``."""
    return torch.tensor(list(accumulate(layout.tensor_sizes, initial=0)), device=device)


def select(
    rows: Tensor,
    addend: Tensor,
    layout: PayloadLayout,
    limits: npt.NDArray[np.float64],
    scale: float,
) -> Reading[Selected]:
    """Add ``scale * addend`` to rows, both ``[k, dim]``, and select what reaches its table's limit.

    Sums that are infinite or NaN are selected, and rows keep their old values there.
    """
    dim = rows.shape[1]
    rows_of = [size // dim for size in layout.tensor_sizes]
    row_limits = torch.from_numpy(np.repeat(limits, rows_of)).to(rows.device, rows.dtype)
    scaled = addend.to(rows.dtype)
    sums = rows + (scaled if scale == 1.0 else scaled * scale)
    # "Not below" instead of "at or above", because it is true for NaN.
    marks = (sums.abs() < row_limits.unsqueeze(1)).logical_not_().view(-1)
    finite = sums.isfinite()
    rows.copy_(torch.where(finite, sums, rows))
    ends = edges_of(layout, rows.device)[1:] - 1
    reached = marks.cumsum(0).index_select(0, ends) if ends.numel() else ends
    *found, num_finite = yield torch.cat([reached, finite.sum().view(1)])
    counts = np.diff(found, prepend=0).tolist()
    positions = positions_in(marks, sum(counts))
    values = sums.view(-1).index_select(0, positions)
    return Selected(positions, values, counts, num_finite < sums.numel())


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """The places of the ``k`` largest of ``[n]`` magnitudes, ascending; of equals the first."""
    smallest = torch.kthvalue(magnitudes, magnitudes.numel() - k + 1).values
    above = magnitudes > smallest
    equal = magnitudes == smallest
    keep = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return positions_in(keep, k)


def pack(
    layout: PayloadLayout, positions: Tensor, values: Tensor, limits: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack finite entries, which have reached their tables' limits: those that exceed them by the
    largest factors, if there are too many.

    Returns:
        The payload; the positions and values that are in it; and the values as the receiver reads
        them, fp32.
    """
    if len(values) > layout.capacity:
        kept = largest(over_limits(values, positions, layout, limits), layout.capacity)
        positions = positions.index_select(0, kept)
        values = values.index_select(0, kept)
    starts = torch.searchsorted(positions, edges_of(layout, positions.device))
    data, scales = encode_values(values, starts.diff(), layout.value_format, "torch")
    coded = layout.position_code.encode(positions)
    empty = data.new_empty(0)
    payload = pack_parts(layout, values.numel(), scales, coded, data, empty)
    received = _decoded(layout, data, scales, positions, values.numel())
    return payload, positions, values, received


class Unchecked(NamedTuple):
    """The content of a payload, before the host knows whether it is sound."""

    positions: Tensor  # shape `[count]`, int64
    values: Tensor  # shape `[count]`, fp32
    facts: Tensor  # for the check of positions


def unpack(layout: PayloadLayout, payload: Tensor, header: bytes | None) -> Unchecked:
    """Unpack a payload, of which the host may have the header (PayloadError: it is another one)."""
    count = read_count(layout, payload, header=header)
    code = layout.position_code
    coded = payload[layout.edges[2] :][: code.num_bytes]
    positions, facts = code.decode_unchecked(unpack_bits(coded, code.num_bits), count)
    data = payload[layout.edges[3] : layout.edges[4]]
    values = _decoded(layout, data, read_scales(layout, payload), positions, count)
    return Unchecked(positions, values, facts)


def _decoded(
    layout: PayloadLayout, data: Tensor, scales: Tensor, positions: Tensor, count: int
) -> Tensor:
    if layout.value_format not in SCALED_FORMATS:
        return decode_values(data, [count], scales, layout.value_format)
    table_of = torch.searchsorted(edges_of(layout, data.device)[1:], positions, right=True)
    ones = torch.ones(1, device=data.device)
    return decode_values(data, [count], ones, layout.value_format).mul_(
        scales.index_select(0, table_of)
    )


def over_limits(
    values: Tensor, positions: Tensor, layout: PayloadLayout, limits: npt.NDArray[np.float64]
) -> Tensor:
    """By which factor values exceed their table's limit, fp64."""
    table_of = torch.searchsorted(edges_of(layout, values.device)[1:], positions, right=True)
    over = torch.from_numpy(limits).to(values.device, values.dtype).index_select(0, table_of)
    # In fp64 the largest float over the smallest threshold is finite; infinite over infinite is
    # NaN.
    return (values.abs().to(torch.float64) / over).nan_to_num_(nan=math.inf)
