"""Marks the entries that are sent on a GPU, so that the host does not wait for a count.

The tensors that send something lie in one *row*, with zeros between them: padding, and the places of tensors that send
nothing. No shape depends on data. As in :mod:`lightning_dct.kernels.plain`

- an entry is marked unless its magnitude is below the threshold of its tensor;
- of a tensor with infinite or NaN entries only those are marked;
- of a tensor with more marked entries than its target, those that reach a second threshold stay marked, and of more
  than fit that do, a regular sample.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.compress.threshold import LIMIT_SAMPLE

# Of floating-point numbers.
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
# Payloads begin with a byte of flags, so their rows begin at a multiple of eight entries, not counting the first.
ALIGNED = 8


class Marked(NamedTuple):
    """The marks of ``U`` tensors in a row of ``M`` entries, the first of which belongs to no tensor."""

    marks: Tensor  # shape `[M - 1]`, bool: of all entries but the first; in padding anything
    numbers: Tensor  # shape `[M]`, int64, ascending: of a marked entry the number of its slot, from one on
    magnitudes: Tensor  # shape `[M]`
    reached: Tensor  # shape `[U]`, int64: entries of each tensor that have reached its threshold
    limits: Tensor  # shape `[U]`: a second threshold for those, 0 if all fit; anything of a tensor that is not whole
    kept: Tensor  # shape `[U]`, int64: marked entries of each tensor
    whole: Tensor  # shape `[U]`, bool: whether all its entries are finite
    counts: Tensor  # shape `[payloads]`, int64: marked entries of each payload


class RowLayout:
    """Where the tensors of some payloads lie in a row.

    Attributes:
        begins: The place of each tensor.
        first: The place of each payload's first entry.
        ends: The end of each payload's tensors, and then of its padding, payload by payload.
        length: Of the row.
    """

    def __init__(self, payloads: Sequence[Sequence[int]]) -> None:
        self.sizes = [size for sizes in payloads for size in sizes]
        self.begins: list[int] = []
        self.first: list[int] = []
        self.ends: list[int] = []
        place = 1
        for sizes in payloads:
            self.first.append(place)
            for size in sizes:
                self.begins.append(place)
                place += size
                self.ends.append(place)
            # Unused slots take the padding behind their payload.
            place += -(place - 1) % ALIGNED + ALIGNED
            self.ends.append(place)
        self.length = place


class Senders:
    """The ``U`` tensors of a row that send something, and their constants on a device.

    Attributes:
        bounds: Of each in the row.
    """

    def __init__(
        self, row: RowLayout, used: Sequence[int], targets: Sequence[int], slots: Sequence[int], device: torch.device
    ) -> None:
        """``used`` are the tensors, at least one; ``targets`` are theirs, ``slots`` those of each payload."""
        self.bounds = [(row.begins[index], row.begins[index] + row.sizes[index]) for index in used]
        # What lies between the tensors, and with each tensor what lies before it: of another payload from that one's
        # padding on, whose entries have the number of that payload's first slot less one.
        edges = [0, *(place for bound in self.bounds for place in bound), row.length]
        self._gaps = [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        payload = [sum(start >= first for first in row.first) - 1 for start, _ in self.bounds]
        starts = [
            row.first[own] - ALIGNED if own and own != before else stop
            for own, before, (_, stop) in zip(payload[1:], payload, self.bounds, strict=False)
        ]
        self._widths = [stop - start for start, stop in zip([0, *starts], [*starts, row.length], strict=True)]
        last = [self.bounds[0][0] - 1] * 2 + [stop - 1 for _, stop in self.bounds]
        self._last = torch.tensor(last).to(device)
        wanted = torch.tensor([min(LIMIT_SAMPLE, stop - start) for start, stop in self.bounds]).unsqueeze(1)
        sample, own_targets = torch.arange(int(wanted.max())), torch.tensor([0, *targets])
        self._sample, self._wanted = sample.to(device), wanted.to(device)
        self._is_sampled = (sample < wanted).to(device)
        self._last_sampled = (wanted * own_targets[1:].unsqueeze(1) - 1).to(device)
        self._targets = own_targets.to(device)
        # The first tensor of each payload, and of each tensor its payload; of one payload nobody asks.
        firsts = [sum(own < number for own in payload) for number in range(len(row.first) + 1)]
        self._firsts, self._payload = (torch.tensor(numbers).to(device) for numbers in (firsts, payload))
        self._slots = torch.tensor([0, *accumulate(slots)][:-1]).to(device)

    def lay_out(self, tensors: Sequence[Tensor], zero: Tensor) -> Tensor:
        """The row of these tensors; ``zero`` has shape ``[1]`` and their dtype."""
        gaps = [zero.expand(gap) for gap in self._gaps]
        return torch.cat([part for pair in zip(gaps, tensors, strict=False) for part in pair] + gaps[-1:])

    def spread(self, numbers: Tensor) -> Tensor:
        """Numbers of each tensor (shape ``[..., U]``) for each entry of the row."""
        if len(self.bounds) == 1:
            return numbers
        parts = zip(numbers.unbind(-1), self._widths, strict=True)
        return torch.cat([part.unsqueeze(-1).expand(*part.shape, width) for part, width in parts], dim=-1)

    def parts(self, row: Tensor, start: int = 0) -> list[Tensor]:
        """The tensors of a row, which begins at a place."""
        return [row[begin - start : stop - start] for begin, stop in self.bounds]

    def mark(self, row: Tensor, thresholds: Tensor) -> Marked:
        """Mark what is sent of a row; ``thresholds`` have shape ``[U]``, fp64."""
        # Integers order the bits of magnitudes as numbers are ordered, and NaN above all of them.
        bits = row.view(BITS[row.dtype])
        bits = bits & torch.iinfo(bits.dtype).max
        magnitudes, targets = bits.view(row.dtype), self._targets[1:]
        whole = torch.stack(torch._foreach_norm(self.parts(magnitudes), math.inf)) < math.inf
        # Over zero they are infinite, so that only infinite and NaN entries reach them.
        limits = torch.div(thresholds, whole, out=row.new_empty(len(self.bounds)))
        counting = torch.int32 if len(row) <= torch.iinfo(torch.int32).max else torch.int64
        ranks = (bits >= self.spread(limits).view(bits.dtype)).cumsum(0, dtype=counting)
        before = ranks[self._last]
        all_reached = before.diff()[1:]
        second = self._limits(magnitudes, ranks, before[1:-1], all_reached)
        # The larger of both, and the first if the second is NaN.
        ranks = (bits >= self.spread(torch.fmax(limits, second)).view(bits.dtype)).cumsum(0, dtype=counting)
        before = ranks[self._last]
        reached = before.diff()
        kept = torch.minimum(reached, self._targets)
        ends = kept.cumsum(0)
        counts, first = ends[-1:], ends[:-1]
        if len(self._slots) > 1:
            at = ends[self._firsts]
            counts, first = at.diff(), first + (self._slots - at[:-1])[self._payload]
        # Of `n` entries that have reached the threshold, number `i` stays marked where `i * target // n` grows.
        shares = torch.maximum(reached[1:], targets)
        offsets = torch.addcmul(first * shares, before[1:-1], targets, value=-1)
        factors, offsets, shares = self.spread(torch.stack([targets, offsets, shares])).unbind()
        numbers = torch.addcmul(offsets, ranks, factors).floor_divide_(shares)
        marks = numbers[1:] > numbers[:-1]
        return Marked(marks, numbers, magnitudes, all_reached, second, kept[1:], whole, counts)

    def _limits(self, magnitudes: Tensor, ranks: Tensor, before: Tensor, reached: Tensor) -> Tensor:
        """:func:`~lightning_dct.compress.threshold.limit_of` each tensor: shape ``[U]``, 0 if all that reach it fit.

        ``ranks`` count the entries of the row that have reached their threshold, ``before`` those before each tensor.
        """
        targets = self._targets[1:]
        count = torch.maximum(reached, targets).unsqueeze(1)
        numbers = self._sample * count // self._wanted + before.unsqueeze(1)
        places = torch.searchsorted(ranks, numbers.to(ranks.dtype), right=True).clamp_(max=ranks.numel() - 1)
        sampled = torch.where(self._is_sampled, magnitudes[places], 0.0).sort(dim=1, descending=True).values
        limits = sampled.gather(1, self._last_sampled // count).squeeze(1)
        return torch.where(reached > targets, limits, 0.0)

    def mean_magnitudes(self, marked: Marked) -> Tensor:
        """The mean magnitude of each tensor's marked entries: shape ``[U]``, fp32, 0 of none."""
        magnitudes = torch.where(marked.marks, marked.magnitudes[1:], 0.0)
        sums = torch.stack(torch._foreach_norm(self.parts(magnitudes, 1), 1, dtype=torch.float64))
        # Divided as fp64, and then rounded.
        return torch.div(sums, marked.kept.clamp(min=1), out=sums.new_empty(len(sums), dtype=torch.float32))
