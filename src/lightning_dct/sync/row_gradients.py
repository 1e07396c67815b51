"""Averages sparse gradients before an optimizer's step, as DistributedDataParallel does.

SparseAdam changes what it knows of a row only in steps whose batch has the row. The batches of one
rank have a rare row in fewer steps than the batches of all. So the mean of the ranks' steps is not
the step for the mean gradient, whatever its length. Therefore the ranks exchange these gradients
and not the updates::

    rank r         numbers of its rows, by parameter                    all-gather
                   g_r = places, 8 bits an entry, a scale a row         all-gather, as large as most need
    every rank     g   = 1 / W * sum over ranks of g_r                  the gradient of its step

All ranks make the same step then, and their own weights are the shared ones. Rows are few and whole,
so there is no threshold and no residual.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_dct.exchange.collectives import Link, all_gather_payload
from lightning_dct.traffic import all_gather_bytes
from lightning_dct.wire.positions import PayloadError, PositionCode, reading
from lightning_dct.wire.rows import (
    WHOLE_FORMATS,
    decode_rows,
    encode_rows,
    row_scales_num_bytes,
    row_values_num_bytes,
)


def weights_of_rows(module: nn.Module) -> set[Tensor]:
    """The weights of all embeddings that have sparse gradients.

    Those with ``max_norm`` are left out: each rank shortens the rows that it looks up, so the ranks
    would not make the same steps.
    """
    embeddings = (
        one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)
    )
    return {
        embedding.weight
        for embedding in embeddings
        if embedding.sparse and embedding.max_norm is None
    }


@torch.no_grad()
def average_rows(parameters: Mapping[str, Tensor], value_format: str, link: Link) -> None:
    """Replace the gradients of some parameters by their means over all ranks; a collective call.

    A parameter without a gradient counts as one of zeros. One that had a dense gradient gets a
    dense one.

    Args:
        parameters: By name, in the same order on all ranks; each of two dimensions or more.
        value_format: That of entries in other exchanges; 8 bits stand for fewer.
        link: The ranks.

    Raises:
        PayloadError: A rank has sent what is no gradient of these parameters.
    """
    tensors = list(parameters.values())
    gradients = [_rows_of(parameter) for parameter in tensors]
    numbers = _gather_numbers([len(places) for places, _ in gradients], tensors[0].device, link)
    most = [max(column) for column in zip(*numbers, strict=True)]
    codes = [
        RowCode(len(parameter), parameter[0].numel(), capacity, WHOLE_FORMATS[value_format])
        for parameter, capacity in zip(tensors, most, strict=True)
    ]
    payload = torch.cat([code.encode(*own) for code, own in zip(codes, gradients, strict=True)])
    entries = sum(values.numel() for _, values in gradients)
    link.traffic.add(entries=entries, entries_sent=entries)
    work, gathered = all_gather_payload(payload, link)
    work.wait()
    edges = list(pairwise(accumulate([code.num_bytes for code in codes], initial=0)))
    named = zip(parameters.items(), codes, edges, zip(*numbers, strict=True), strict=True)
    for (name, parameter), code, (begin, end), counts in named:
        with reading(f"The gradient of {name!r}"):
            rows = [
                code.decode(message, count)
                for message, count in zip(gathered[:, begin:end], counts, strict=True)
            ]
        places = torch.cat([places for places, _ in rows])
        values = torch.cat([values for _, values in rows]).div_(link.size)
        mean = torch.sparse_coo_tensor(
            places.unsqueeze(0),
            values.view(-1, *parameter.shape[1:]).to(parameter.dtype),
            parameter.shape,
            check_invariants=False,
        ).coalesce()
        was_dense = parameter.grad is not None and not parameter.grad.is_sparse
        parameter.grad = mean.to_dense() if was_dense else mean


def bytes_of_gradients(parameters: Sequence[Tensor], ranks: int) -> int:
    """The bytes that DistributedDataParallel sends for the gradients that these parameters have."""
    found = [one.grad for one in parameters if one.grad is not None and one.grad.is_sparse]
    return sum(
        all_gather_bytes(gradient._indices().nbytes + gradient._values().nbytes, ranks)
        for gradient in found
    )


class RowCode(NamedTuple):
    """How the rows of a gradient are written: places, scales and values, in messages of one size.

    Attributes:
        num_rows: Of the parameter.
        width: Entries of a row.
        capacity: The most rows of a message.
        row_format: See :mod:`lightning_dct.wire.rows`.
    """

    num_rows: int
    width: int
    capacity: int
    row_format: str

    @property
    def _edges(self) -> list[int]:
        """Where each part begins, and the end."""
        parts = [
            self._positions.num_bytes if self.capacity else 0,
            row_scales_num_bytes(self.row_format, self.capacity),
            row_values_num_bytes(self.row_format, self.capacity * self.width),
        ]
        return list(accumulate(parts, initial=0))

    @property
    def _positions(self) -> PositionCode:
        return PositionCode(self.num_rows, self.capacity)

    @property
    def num_bytes(self) -> int:
        """The size of a message, in bytes."""
        return self._edges[-1]

    def encode(self, places: Tensor, values: Tensor) -> Tensor:
        """The message of rows: uint8, ``[num_bytes]``.

        Args:
            places: Shape ``[rows]``, int64, ascending.
            values: Shape ``[rows, width]``, fp32.
        """
        message = torch.zeros(self.num_bytes, dtype=torch.uint8, device=values.device)
        if not len(places):
            return message
        data, scales = encode_rows(values.reshape(-1), None, len(places), self.row_format)
        for begin, part in zip(
            self._edges, (self._positions.encode(places), scales, data), strict=False
        ):
            message[begin : begin + len(part)] = part
        return message

    def decode(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Read a message of ``count`` rows: places ``[count]``, int64, and values ``[count,
        width]``, fp32.

        Raises:
            PayloadError: It holds other rows.
        """
        if not count:
            return message.new_empty(0, dtype=torch.int64), message.new_empty(
                0, self.width, dtype=torch.float32
            )
        if count > self.capacity:
            raise PayloadError(f"{count} rows do not fit into a message for {self.capacity}")
        positions, scales, data = (message[begin:end] for begin, end in pairwise(self._edges))
        places = self._positions.decode(positions.contiguous(), count)
        scales = scales[: row_scales_num_bytes(self.row_format, count)]
        entries = count * self.width
        data = data[: row_values_num_bytes(self.row_format, entries)].contiguous()
        values = decode_rows(data, entries, None, scales, self.row_format)
        return places, values.view(count, self.width)


def _rows_of(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a parameter's gradient: places ``[rows]``, ascending, and values ``[rows,
    width]``, fp32.
    """
    gradient = parameter.grad
    width = parameter[0].numel()
    if gradient is None:
        none = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return none, torch.empty(0, width, device=parameter.device)
    if not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    gradient = gradient.coalesce()
    values = gradient.values().float()
    return gradient.indices()[0], values.reshape(-1, width)


def _gather_numbers(numbers: Sequence[int], device: torch.device, link: Link) -> list[list[int]]:
    """The numbers of rows of all ranks, by rank and parameter."""
    own = torch.tensor(numbers, dtype=torch.int64).to(device)
    work, gathered = all_gather_payload(own.view(torch.uint8), link)
    work.wait()
    return gathered.view(torch.int64).tolist()
