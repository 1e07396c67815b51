"""Bitmaps of positions on a GPU, read and written for all entries at once: no position is ever computed.

A bitmap has a flag for each entry, so everything here is done to entries in their places: the number of flags before an
entry says which of the payload's values is its own. Otherwise this is :mod:`lightning_dct.wire.payloads_on_device`:
shapes do not depend on data, no index from a payload leaves its bounds, and the host waits for nothing. What is kept on
the device has the size of the list of tensors, not of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.payloads_on_device import Payloads
from lightning_dct.wire.values import BITS_PER_VALUE, SCALED_FORMATS, decode_units


class ReadEntries(NamedTuple):
    """What ``n`` senders have sent of ``T`` tensors, counted through all payloads."""

    values: Tensor  # shape `[n, width]`, fp32: each tensor's entries at its `bounds`; zero where nothing is sent
    dense: Tensor  # shape `[n, dense bytes]`, uint8: the tensors sent dense, one after the other
    told: Tensor  # shape `[n, 4 payloads]`, int64: see :meth:`Payloads.are_valid`


class Bitmaps(Payloads):
    """The layouts of ``S`` payloads, one after the other, with the same value format and bitmaps for positions.

    Rows are as long as the longest payload needs, so that several payloads of a sender are read as several senders.

    Attributes:
        bounds: Of each of the ``T`` tensors in a row of values.
    """

    def __init__(self, layouts: Sequence[PayloadLayout], device: torch.device) -> None:
        super().__init__(layouts, device)
        self._bits = BITS_PER_VALUE[self.value_format]
        # At least as many bytes of flags as a value has, because values are read from one before the first on.
        flag_bytes, self._value_bytes = (max(layout.part_sizes[part] for layout in layouts) for part in (2, 3))
        self._flag_bytes = flag_bytes if len(layouts) == 1 else max(flag_bytes, 4)
        width, column = 8 * self._flag_bytes, 0
        self.bounds: list[tuple[int, int]] = []
        # Of each stretch of a row with one scale: the scale's column, and its entries, padding included.
        self._stretches: list[tuple[int, int]] = []
        for number, layout in enumerate(layouts):
            stop = number * width
            for size in layout.tensor_sizes:
                self.bounds.append((stop, stop + size))
                self._stretches.append((column, size))
                stop, column = stop + size, column + 1
            self._stretches.append((max(column - 1, 0), (number + 1) * width - stop))
        # The last entry of each payload in a row of values; that of one payload is a view.
        self._end = sum(layouts[0].tensor_sizes)
        last = [number * width + max(sum(layout.tensor_sizes), 1) - 1 for number, layout in enumerate(layouts)]
        self._last = torch.tensor(last).to(device)
        self._signs = torch.tensor([-1.0, 1.0], dtype=torch.float32).to(device)

    def unpack(self, payloads: Tensor) -> ReadEntries:
        """Read payloads, shape ``[n, num_bytes]``, uint8, one row a sender; see :meth:`Payloads.split` for errors."""
        senders, ((_, _, *parts, dense), words, scales) = len(payloads), self.split(payloads)
        rows, first = self._rows(payloads, *parts)
        values_from = first + self._flag_bytes
        one_bit = self.value_format == "1bit"
        bits = rows[:, first : values_from + self._value_bytes * one_bit].unsqueeze(2)
        bits = ((bits >> self.eight) & 1).flatten(1).view(torch.bool)
        flags = bits[:, : 8 * self._flag_bytes]
        # Of a flag in its payload, from one on.
        numbers = flags.cumsum(1)
        raised = numbers.view(senders, -1)
        raised = raised[:, self._end - 1 : self._end] if len(self.layouts) == 1 else raised[:, self._last]
        # The host compares them once it knows them: that starts fewer operations.
        told = torch.cat([words, raised], dim=1)
        # The values of a row, after one that is nobody's: where no flag was set yet.
        if one_bit:
            values = torch.where(bits[:, 8 * self._flag_bytes - 1 :], self._signs[1], self._signs[0])
        else:
            before = max(1, self._bits // 8)
            data = rows[:, values_from - before : values_from + self._value_bytes].flatten()
            every = decode_units(data, 8 * data.numel() // self._bits, self.value_format).view(rows.shape[0], -1)
            values = every[:, 8 * before // self._bits - 1 :]
        values = values.gather(1, numbers.clamp_(max=values.shape[1] - 1))
        if self.value_format in SCALED_FORMATS:
            values.view(senders, -1).mul_(self._spread(scales))
        values = torch.where(flags, values, 0.0).view(senders, -1)
        return ReadEntries(values, torch.cat(list(dense), dim=1), told)

    def _rows(self, payloads: Tensor, every: Sequence[Tensor], sent: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Flags and values of one payload in each row, and where the flags begin."""
        if len(self.layouts) == 1:
            return payloads, sum(self.layouts[0].part_sizes[:2])
        pieces = []
        for flags, values in zip(every, sent, strict=True):
            for part, width in ((flags, self._flag_bytes), (values, self._value_bytes)):
                pieces += [part, self.zero.expand(len(payloads), width - part.shape[1])]
        return torch.cat(pieces, dim=1).view(len(payloads) * len(self.layouts), -1), 0

    def _spread(self, scales: Tensor) -> Tensor:
        """Each entry's scale."""
        if len(self._stretches) <= 2:
            return scales[:, :1]
        spread = [scales[:, column : column + 1].expand(-1, width) for column, width in self._stretches]
        return torch.cat(spread, dim=1)
