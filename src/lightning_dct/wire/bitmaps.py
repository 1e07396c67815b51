"""Bitmaps of positions on a GPU, read for many entries at once: no position is ever computed.

A bitmap has a flag for each entry, so everything here is done to entries in their places: the number of flags before an
entry says which of the payload's values is its own. Otherwise this is :mod:`lightning_dct.wire.payloads_on_device`:
shapes do not depend on data, no index from a payload leaves its bounds, and the host waits for nothing. What is kept on
the device has the size of the list of tensors, not of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.payloads_on_device import Payloads
from lightning_dct.wire.values import BITS_PER_VALUE, SCALED_FORMATS, decode_units

# Entries of all payloads together that are read at once; each takes about 30 bytes.
AT_ONCE = 1 << 21


class Bitmaps(Payloads):
    """The layouts of ``S`` payloads, one after the other, with the same value format and bitmaps for positions.

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
        sent. Returns the tensors sent dense (``[n, dense bytes]``, uint8), and what :meth:`are_valid` takes
        (``[n, 4 S]``, int64).
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
            numbers = flags.cumsum(1) if before is None else flags.cumsum(1).add_(before)
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
