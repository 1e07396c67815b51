"""Thresholds: selected exactly now and then, kept near their target by a guard in between.

To select the k-th largest magnitude costs twenty to forty times as much as to compare with a known threshold, so it is
done every thousand steps (Gupta et al., KDD 2021, section 3). In between, the scale of the gradient drifts, and with
it the number of entries above the threshold. Whenever a step shows too many or too few, the guard moves the threshold a
little, in the spirit of Ok-Topk (Li and Hoefler, PPoPP 2022), at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.wire.bits import nonzero_indices

# The guard's exponent is this times the square root of the density. With error feedback an entry waits about
# 1 / density steps below the threshold and entries crowd there, so a smaller density answers a move of the threshold
# with a larger change of the count: twice the exponent makes the count swing (seen in simulation at 0.1% density).
GUARD_GAIN = 0.3
GUARD_LARGEST_FACTOR = 1.25
# The guard aims a little high: a surplus is cut to the largest entries, a shortfall is sent as padding.
GUARD_AIM = 1.05
# Where a step shows more than this many times the target, its own selection becomes the new threshold.
GUARD_RESELECT = 2.0
# Selection from more entries than this begins with a sample of about SAMPLE_SIZE.
EXACT_UP_TO = 1 << 18
SAMPLE_SIZE = 1 << 16
# kthvalue counts in int32 on CUDA.
MOST_TO_SELECT_FROM = 2**31 - 1
SMALLEST_THRESHOLD = torch.finfo(torch.float32).tiny


def kth_magnitude(values: Tensor, k: int) -> float:
    """The k-th largest magnitude of the values (``[n]``, floating point): the threshold that keeps ``k`` of them.

    Infinite and NaN entries count as zero. It is at least the smallest normal float: zeros are never worth sending.
    """
    magnitudes = values.abs().nan_to_num_(nan=0.0, posinf=0.0)
    candidates = _candidates(magnitudes, k) if magnitudes.numel() > EXACT_UP_TO else magnitudes
    return max(float(_kth_largest(candidates, k)), SMALLEST_THRESHOLD)


def _candidates(magnitudes: Tensor, k: int) -> Tensor:
    """A small part of many magnitudes that holds the ``k`` largest; all of them where a sample misleads.

    A regular sample shows roughly where the k-th magnitude lies. Only a few more than ``k`` entries lie above a
    slightly lower bound, by four standard deviations of the sample's rank. The k-th largest of these is the k-th
    largest of all, so the answer is exact however good the sample was.
    """
    sample = magnitudes[:: magnitudes.numel() // SAMPLE_SIZE]
    expected = k / magnitudes.numel() * sample.numel()
    rank = min(math.ceil(expected + 4 * math.sqrt(expected) + 4), sample.numel())
    candidates = magnitudes[nonzero_indices(magnitudes >= _kth_largest(sample, rank))]
    return candidates if candidates.numel() >= k else magnitudes


def _kth_largest(values: Tensor, k: int) -> Tensor:
    # Both select without sorting, from the smallest; numpy uses vector instructions.
    index = values.numel() - k
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.as_tensor(np.partition(values.numpy(), index)[index])
    if values.numel() > MOST_TO_SELECT_FROM:
        return _kth_largest_by_halving(values, k)
    return torch.kthvalue(values, index + 1).values


def _kth_largest_by_halving(magnitudes: Tensor, k: int) -> Tensor:
    """The ``k``-th largest of any number of magnitudes: the largest that ``k`` of them reach.

    Floating-point numbers of one sign keep their order when read as whole numbers. This walks over all of them once for
    each bit and waits for a GPU each time. It serves what a sample does not make few, such as billions of zeros.
    """
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[magnitudes.element_size()]
    patterns = magnitudes.view(whole)
    low, high = 0, torch.iinfo(whole).max
    while low < high:
        middle = high - (high - low) // 2
        low, high = (middle, high) if int((patterns >= middle).sum()) >= k else (low, middle - 1)
    return torch.tensor(low, dtype=whole, device=magnitudes.device).view(magnitudes.dtype)


def keep_largest(values: Tensor, k: int) -> tuple[Tensor, float]:
    """Which ``k`` of the values (``[n]``, finite, ``n > k >= 1``) are largest in magnitude; the first of equals win.

    Returns:
        A bool mask of shape ``[n]`` with exactly ``k`` set, and the smallest magnitude kept.
    """
    magnitudes = values.abs()
    smallest = _kth_largest(magnitudes, k)
    keep = magnitudes >= smallest
    too_many = int(keep.sum()) - k
    if too_many:
        keep[nonzero_indices(magnitudes == smallest)[-too_many:]] = False
    return keep, float(smallest)


def entries_at(density: float, size: int) -> int:
    """The entries that a density means, of ``size``: rounded up, except for a rounding error of the product."""
    return min(math.ceil(density * size * (1 - 1e-12)), size)


def nudge(threshold: float, count: int, target: int, size: int, aim: float = GUARD_AIM) -> float:
    """The guard: moves a threshold, which ``count`` of ``size`` entries reached, towards ``aim * target`` of them."""
    exponent = GUARD_GAIN * math.sqrt(target / size)
    # Half an entry keeps the ratio finite and gentle for tensors of which only one or two entries are sent.
    factor = ((count + 0.5) / (aim * target + 0.5)) ** exponent
    factor = min(max(factor, 1 / GUARD_LARGEST_FACTOR), GUARD_LARGEST_FACTOR)
    return max(threshold * factor, SMALLEST_THRESHOLD)


def nudge_all(thresholds: Tensor, counts: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    """The guard for many thresholds at once, without waiting for a GPU; the formula of :func:`nudge`.

    ``thresholds`` (fp32 or fp64, positive), ``counts``, ``targets`` and ``sizes`` have shape ``[thresholds]``, the last
    two in the thresholds' dtype. The result is like ``thresholds``.
    """
    exponents = GUARD_GAIN * (targets / sizes) ** 0.5
    factors = ((counts.to(thresholds.dtype) + 0.5) / (GUARD_AIM * targets + 0.5)) ** exponents
    factors.clamp_(1 / GUARD_LARGEST_FACTOR, GUARD_LARGEST_FACTOR)
    return (thresholds * factors).clamp_(SMALLEST_THRESHOLD, torch.finfo(thresholds.dtype).max)


class Observed(NamedTuple):
    """How many entries of a parameter reached its threshold in a step, and how many of all should have."""

    name: str
    reached: int
    target: int
    size: int


class Thresholds:
    """The thresholds of all compressed parameters of one rank, by parameter name.

    Each threshold belongs to the number of entries it was selected for. When the density changes, in a warm-up or
    because a run resumes with another setting, it no longer applies and counts as missing.

    Thresholds of gradients on a GPU stay there as fp64 scalars, because to read one as a number waits for the GPU.
    """

    def __init__(self) -> None:
        self._values: dict[str, float | Tensor] = {}
        self._targets: dict[str, int] = {}
        self._stacked: dict[tuple[str, ...], Tensor] = {}

    def has(self, name: str, target: int) -> bool:
        """Whether a threshold of this parameter was selected for this target."""
        return self._targets.get(name) == target

    def get(self, name: str, target: int) -> float | None:
        """The threshold of a parameter, or None where none was selected for this target."""
        return float(self._values[name]) if self.has(name, target) else None

    def set(self, name: str, target: int, threshold: float) -> None:
        """Remember a threshold and the target that it was selected for."""
        self._values[name], self._targets[name] = threshold, target
        self._stacked = {names: stacked for names, stacked in self._stacked.items() if name not in names}

    def on_device(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """The thresholds of some parameters without waiting: shape ``[len(names)]``, fp64, read-only."""
        if names not in self._stacked:
            values = [self._values[name] for name in names]
            # A number reaches the device as the argument of a kernel; a copy from host memory would wait.
            scalars = [
                v.to(device) if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device)
                for v in values
            ]
            empty = torch.empty(0, dtype=torch.float64, device=device)
            self.replace(names, torch.stack(scalars) if scalars else empty)
        return self._stacked[names]

    def replace(self, names: tuple[str, ...], thresholds: Tensor) -> None:
        """Set the thresholds of some parameters, shape ``[len(names)]``, fp64; their targets stay."""
        if names not in self._stacked:
            moved = set(names)
            self._stacked = {old: stacked for old, stacked in self._stacked.items() if not moved.intersection(old)}
        self._stacked[names] = thresholds
        self._values.update(zip(names, thresholds.unbind(), strict=True))

    def guard(self, observed: Iterable[Observed]) -> None:
        """Nudge each threshold towards its target by what the step has shown."""
        for name, reached, target, size in observed:
            threshold = self.get(name, target)
            if threshold is not None:
                self.set(name, target, nudge(threshold, reached, target, size))

    def forget(self) -> None:
        """Forget all thresholds."""
        self._values, self._targets, self._stacked = {}, {}, {}

    def forget_those_of(self, parameters: Collection[str]) -> None:
        """Forget the thresholds of some parameters, of their pieces, and of the sums of these."""
        for label in list(self._targets):
            whole = label.removeprefix("sum of ")
            if whole in parameters or whole.rpartition("[")[0] in parameters:
                del self._targets[label], self._values[label]
        self._stacked = {}

    def values(self) -> list[float]:
        """All thresholds, in no particular order."""
        return list(self.by_label().values())

    def by_label(self) -> dict[str, float]:
        """Each threshold by its label: a parameter, or a piece of one. This waits for a GPU."""
        return {name: float(value) for name, value in self._values.items()}

    def take_over(self, other: Thresholds) -> None:
        """Copy the thresholds of another object without waiting for a GPU."""
        self._values, self._targets, self._stacked = dict(other._values), dict(other._targets), dict(other._stacked)

    def state_dict(self) -> dict[str, Any]:
        """The thresholds and their targets as plain numbers."""
        return {"values": self.by_label(), "targets": dict(self._targets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved thresholds."""
        self.forget()
        self._values = {str(name): float(value) for name, value in state["values"].items()}
        self._targets = {str(name): int(target) for name, target in state["targets"].items()}
