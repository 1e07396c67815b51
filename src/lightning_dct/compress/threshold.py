"""Thresholds: selection from a sample every so many steps, and a guard that adjusts them in
between.

Selecting the k-th largest magnitude costs many times as much as comparing with a known threshold,
so it is done every thousand steps (Gupta et al., KDD 2021, section 3), and from a sample of a large
tensor. In between, the scale of the gradient drifts, and with it the number of entries above the
threshold. When a step selects too many or too few, the guard moves the threshold a little, similar
to Ok-Topk (Li and Hoefler, PPoPP 2022).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.kernels.bits import nonzero_indices
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD

# The guard's exponent is this times the square root of the density. Error feedback makes entries
# crowd below the threshold, the more the smaller the density, and there a small move changes the
# count a lot. Twice the exponent makes the count oscillate (simulated at 0.1% density).
GUARD_GAIN = 0.3
GUARD_LARGEST_FACTOR = 1.25
# The guard aims a little low, because what does not fit waits for the next exchange.
GUARD_AIM = 0.98
# Beyond this many times the target, one step would be too small.
GUARD_RESELECT = 2.0
# A sample for a threshold has at least so many entries, and so many wanted ones: within 5% of the
# target.
SMALLEST_SAMPLE = 1 << 14
WANTED_IN_SAMPLE = 400


@lru_cache(maxsize=1024)
def sample_of(size: int, target: int) -> Tensor | None:
    """Which entries of a tensor to select its threshold from: int64, ascending; None for all.

    They are spread evenly, one in each stretch of the tensor. Where in its stretch an entry lies is
    hashed, because a regular sample of a matrix would see a few of its columns only.
    """
    wanted = max(SMALLEST_SAMPLE, math.ceil(WANTED_IN_SAMPLE * size / target))
    if size < 2 * wanted:
        return None
    numbers = torch.arange(wanted)
    stretch = size // wanted
    # Fibonacci hashing: the upper half of a product with 2 ** 32 over the golden ratio (Knuth,
    # TAOCP 3, section 6.4).
    return numbers * stretch + ((numbers * 0x9E3779B1 & 0xFFFFFFFF) >> 16) % stretch


def threshold_from(sampled: Tensor, size: int, target: int) -> float | Tensor:
    """The magnitude that about ``target`` of ``size`` entries reach, from all of them or from those
    of a sample.

    On a GPU it is a tensor of shape ``[]``, so that the host does not wait.
    """
    k = max(1, math.ceil(target * sampled.numel() / size))
    if must_not_wait(sampled.device):
        return _kth_magnitude(sampled, k).clamp(SMALLEST_THRESHOLD)
    return kth_magnitude(sampled, k)


def kth_magnitude(values: Tensor, k: int) -> float:
    """The k-th largest magnitude of values (``[n]``, floating point), at least the smallest normal
    fp32 number.

    Infinite and NaN entries count as zero.
    """
    return max(float(_kth_magnitude(values, k)), SMALLEST_THRESHOLD)


def _kth_magnitude(values: Tensor, k: int) -> Tensor:
    return _kth_largest(values.abs().nan_to_num_(nan=0.0, posinf=0.0), k)


def _kth_largest(values: Tensor, k: int) -> Tensor:
    index = values.numel() - k
    # Both select the k-th smallest without sorting; numpy uses vector instructions.
    if values.device.type == "cuda":
        return torch.kthvalue(values, index + 1).values
    numbers = values.cpu() if values.dtype == torch.float64 else values.cpu().to(torch.float32)
    return torch.as_tensor(np.partition(numbers.numpy(), index)[index])


def keep_largest(values: Tensor, k: int) -> tuple[Tensor, float]:
    """A bool mask (``[n]``) of the ``k`` largest magnitudes, and the smallest of them; of equals
    the first are kept.

    ``values`` has shape ``[n]``, is finite, and ``n > k >= 1``.
    """
    magnitudes = values.abs()
    smallest = _kth_largest(magnitudes, k)
    keep = magnitudes >= smallest
    too_many = int(keep.sum()) - k
    if too_many:
        keep[nonzero_indices(magnitudes == smallest)[-too_many:]] = False
    return keep, float(smallest)


def entries_at(density: float, size: int) -> int:
    """How many of ``size`` entries a density sends, rounded up."""
    # 0.07 * 100 is 7.000000000000001 in floating point and should be 7 entries.
    return min(math.ceil(density * size * (1 - 1e-12)), size)


def nudge(threshold: float, count: int, target: int, size: int, aim: float = GUARD_AIM) -> float:
    """The guard: the next threshold, after ``count`` of ``size`` entries have reached this one.

    ``threshold * ((count + 0.5) / (aim * target + 0.5)) ** (0.3 * sqrt(target / size))``, with the
    factor limited to [1 / 1.25, 1.25].
    """
    exponent = GUARD_GAIN * math.sqrt(target / size)
    # Half an entry keeps the ratio finite, and gentle for targets of one or two entries.
    factor = ((count + 0.5) / (aim * target + 0.5)) ** exponent
    factor = min(max(factor, 1 / GUARD_LARGEST_FACTOR), GUARD_LARGEST_FACTOR)
    return max(threshold * factor, SMALLEST_THRESHOLD)


class Thresholds:
    """One rank's thresholds, by parameter name or by label of a piece.

    A threshold is valid only for the target (number of entries) it was selected for. When the
    density changes, the threshold counts as missing. Those of a bucket on a GPU are one tensor on
    it, because reading a number waits for the GPU; :mod:`~lightning_dct.compress.on_gpu` moves
    them.
    """

    def __init__(self) -> None:
        self.targets: dict[str, int] = {}
        self._values: dict[str, float | Tensor] = {}
        # Thresholds on a GPU, by the names of a bucket's tensors, with their targets. They take
        # precedence over `_values`.
        self.by_bucket: dict[tuple[str, ...], tuple[tuple[int, ...], Tensor]] = {}

    def missing(self, names: tuple[str, ...], targets: tuple[int, ...]) -> list[int]:
        """Which of some names, by their numbers, have no threshold for their target."""
        if names in self.by_bucket and self.by_bucket[names][0] == targets:
            return []
        return [
            i
            for i, (name, target) in enumerate(zip(names, targets, strict=True))
            if self.targets.get(name) != target
        ]

    def get(self, name: str, target: int) -> float | None:
        """The threshold for this target, or None."""
        self._take_back([name])
        return float(self._values[name]) if self.targets.get(name) == target else None

    def of(self, names: tuple[str, ...]) -> list[float]:
        """Some thresholds, none of which is missing."""
        self._take_back(names)
        return [float(self._values[name]) for name in names]

    def set(self, name: str, target: int, threshold: float | Tensor) -> None:
        """Store a threshold (one on a GPU as a tensor of shape ``[]``) and its target."""
        self._take_back([name])
        self._values[name] = threshold
        self.targets[name] = target

    def on_device(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Some thresholds, none of which is missing, without waiting: shape ``[len(names)]``, fp64,
        read-only.
        """
        if names not in self.by_bucket:
            self._take_back(names)
            # `full` passes the number as a kernel argument; a copy from host memory would wait.
            scalars = [
                value.to(device, torch.float64)
                if isinstance(value, Tensor)
                else torch.full((), value, dtype=torch.float64, device=device)
                for value in map(self._values.__getitem__, names)
            ]
            self.by_bucket[names] = (
                tuple(map(self.targets.__getitem__, names)),
                torch.stack(scalars),
            )
        return self.by_bucket[names][1]

    def replace(self, names: tuple[str, ...], thresholds: Tensor) -> None:
        """Replace the thresholds that :meth:`on_device` gave."""
        self.by_bucket[names] = self.by_bucket[names][0], thresholds

    def _take_back(self, names: Sequence[str]) -> None:
        """Split up the buckets on a GPU that hold any of these thresholds."""
        if self.by_bucket:
            some = set(names)
            for bucket in [bucket for bucket in self.by_bucket if not some.isdisjoint(bucket)]:
                self._values |= zip(bucket, self.by_bucket.pop(bucket)[1].unbind(), strict=True)

    def forget(self) -> None:
        """Delete all thresholds."""
        self._values = {}
        self.targets = {}
        self.by_bucket = {}

    def forget_those_of(self, parameters: Collection[str]) -> None:
        """Delete the thresholds of some parameters, of their pieces and of the pieces' sums."""
        for label in list(self.targets):
            whole = label.removeprefix("sum of ")
            if whole in parameters or whole.rpartition("[")[0] in parameters:
                self._take_back([label])
                del self.targets[label], self._values[label]

    def by_label(self) -> dict[str, float]:
        """All thresholds by label: a parameter, or a piece of one. This waits for a GPU."""
        found = {name: float(value) for name, value in self._values.items()}
        for names, (_, values) in self.by_bucket.items():
            found |= zip(names, values.tolist(), strict=True)
        return {name: found[name] for name in self.targets}

    def take_over(self, other: Thresholds) -> None:
        """Copy another object's thresholds without waiting for a GPU."""
        self._values = dict(other._values)
        self.targets = dict(other.targets)
        self.by_bucket = dict(other.by_bucket)

    def state_dict(self) -> dict[str, Any]:
        """Thresholds and targets as plain numbers."""
        return {"values": self.by_label(), "targets": dict(self.targets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved thresholds."""
        self.by_bucket = {}
        self._values = {str(name): float(value) for name, value in state["values"].items()}
        self.targets = {str(name): int(target) for name, target in state["targets"].items()}
