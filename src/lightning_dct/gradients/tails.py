"""Shares the entries that are sent out over tensors, so that one threshold in units of each tensor's size does for all.

Density ``d`` for every tensor sends ``d`` of one whose entries are all alike, and ``d`` of one in which a few entries
hold nearly everything. Dividing the same number of entries by a common threshold ``z``,

    k(tensor)  =  how many entries of a = g + e have |a| >= z * rms(a)

is what makes the sum over all entries of the squared error, each in units of its tensor's mean square, smallest. It
knows nothing of the tensors' scales, which an optimizer like Adam evens out; a threshold on bare magnitudes would give
all entries to the tensors with large gradients. L-GreCo (Markov et al., MLSys 2024) weighs tensors by such relative
errors too, and finds the best of a few given levels of compression by dynamic programming; for top-k a threshold does.

Each rank counts its own entries beyond many ``z`` where thresholds are selected anyway. The ranks add their counts up,
which are whole numbers, and each draws the same conclusion in whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

# The first counts all entries; then from about 0.5 to 80 in steps of 2%.
MULTIPLES = (0.0, *(0.5 * 1.02**step for step in range(256)))
# Between two neighbouring multiples lie so many steps.
STEPS_BETWEEN = 16


class Tails:
    """How many entries of each tensor lie beyond multiples of its root mean square.

    Args:
        names: The tensors.

    Attributes:
        counts: Shape ``[tensors, len(MULTIPLES)]``, int64, on the CPU; a row of zeros for a tensor not looked at.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self._rows = {name: row for row, name in enumerate(self.names)}
        self.counts = torch.zeros(len(self.names), len(MULTIPLES), dtype=torch.int64)

    def add(self, label: str, values: Tensor) -> None:
        """Count a tensor, or a piece of it in units of its own; what is neither does not count.

        Args:
            label: The tensor's name, for a piece followed by its range.
            values: Shape ``[n]``; infinite and NaN entries count as zero. This waits for a GPU.
        """
        row = self._rows.get(label, self._rows.get(label.rpartition("[")[0]))
        magnitudes = values.abs().nan_to_num_(nan=0.0, posinf=0.0)
        rms = float(magnitudes.norm(dtype=torch.float64)) / math.sqrt(max(values.numel(), 1))
        if row is not None and rms:
            edges = torch.tensor(MULTIPLES[1:], dtype=magnitudes.dtype, device=magnitudes.device) * rms
            below = torch.bincount(torch.bucketize(magnitudes, edges, right=True), minlength=len(MULTIPLES))
            self.counts[row] += below.flip(0).cumsum(0).flip(0).cpu()

    def clear(self) -> None:
        """Forget all counts."""
        self.counts.zero_()


def share_out_entries(
    counts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    targets: Sequence[int],
    bits_per_value: int,
    bound: int,
) -> list[int]:
    """How many entries of each tensor to send, for no more entries and no more bits in all than now.

    Args:
        counts: For each tensor how many of its entries lie beyond each of ``MULTIPLES``; the first is positive.
        sizes: Entries of each.
        targets: Entries of each that its own density sends, at least 1.
        bits_per_value: Bits of a sent value.
        bound: At most so many times as many, and at least one part in so many.
    """

    def beyond(column: int) -> list[int]:
        return [
            min(max(row[column] * size // row[0], -(-target // bound)), target * bound, size)
            for row, size, target in zip(counts, sizes, targets, strict=True)
        ]

    def bits(entries: Sequence[int]) -> int:
        return sum(
            round(1024 * k * (bits_per_value + 2 + math.log2(size / k))) for k, size in zip(entries, sizes, strict=True)
        )

    def fits(entries: Sequence[int]) -> bool:
        return sum(entries) <= sum(targets) and bits(entries) <= bits(targets)

    column = _first(len(MULTIPLES), lambda column: fits(beyond(column)))
    few = beyond(column)
    if column == 0:
        return few
    many = beyond(column - 1)

    def between(step: int) -> list[int]:
        return [
            less + (more - less) * (STEPS_BETWEEN - step) // STEPS_BETWEEN for less, more in zip(few, many, strict=True)
        ]

    return between(_first(STEPS_BETWEEN, lambda step: fits(between(step))))


def _first(stop: int, holds: Callable[[int], bool]) -> int:
    """The first number below ``stop`` for which something holds that goes on to hold; ``stop`` if there is none."""
    low, high = 0, stop
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
