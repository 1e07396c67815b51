"""A training run as plain data, and arithmetic on its series: bytes at any step, averages, best values."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class UnreadableRun(ValueError):
    """A log holds nothing to show; the message names the file and the reason."""


@dataclass(frozen=True)
class Series:
    """The values logged under one name.

    Attributes:
        steps: Optimizer steps, strictly increasing. Lightning counts from 0: step 49 is logged when 50 are done.
        values: One for each step, NaN and infinity included.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Series:
        """Sort points by step. Of several at one step the last is kept: a resumed run logs some steps again.

        Example:
            >>> Series.of([(5, 2.0), (0, 4.0), (5, 3.0)])
            Series(steps=(0, 5), values=(4.0, 3.0))
        """
        by_step = dict(points)
        steps = tuple(sorted(by_step))
        return cls(steps, tuple(by_step[step] for step in steps))

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Its name on the page.
        source: The file it was read from.
        kind: The kind of that file.
        series: What was logged, by name; none of them empty.
        settings: Dotted names, and values as text.
        overrides: The command line of ``experiments/train.py``.
        steps: Optimizer steps done, if ``result.json`` says so.
        milliseconds_per_step: Median wall time of a training step, if it was measured.
        seconds: Wall time from the start to the last log, if it was logged.
        notes: What a reader has to know about the figures.
        problems: What could not be read, each with the file's name.
    """

    name: str
    source: Path
    kind: str
    series: Mapping[str, Series]
    settings: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    steps: int | None = None
    milliseconds_per_step: float | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def counted_bytes(series: Mapping[str, Series], key: str, parts: Sequence[str] = ("dp", "mp")) -> Series | None:
    """A byte counter, summed over kinds of traffic, at every step that one of them was logged at.

    Args:
        series: The series of one run.
        key: ``bytes_sent`` or ``bytes_dense``.
        parts: ``dp`` for data parallelism, ``mp`` for traffic inside the model.

    Returns:
        The sum; None if nothing was logged.
    """
    counters = [unwrapped(series[name]) for part in parts if (name := f"dct/{part}/{key}") in series]
    if not counters:
        return None
    steps = sorted({step for counter in counters for step in counter.steps})
    return Series.of((step, sum(_last_known(counter, step) for counter in counters)) for step in steps)


def unwrapped(counter: Series) -> Series:
    """A counter without its restarts, as after a resume without its state.

    Example:
        >>> unwrapped(Series((0, 1, 2, 3), (10.0, 20.0, 5.0, 15.0))).values
        (10.0, 20.0, 25.0, 35.0)
    """
    values: list[float] = []
    before = offset = 0.0
    for value in counter.values:
        if value < before:
            offset += before
        before = value
        values.append(value + offset)
    return Series(counter.steps, tuple(values))


def _last_known(counter: Series, step: int) -> float:
    index = bisect.bisect_right(counter.steps, step)
    return counter.values[index - 1] if index else 0.0


def counter_at(counter: Series, step: float) -> float | None:
    """The value of a counter at any step; None if it is not known.

    The counter is taken to grow linearly between two logged steps, from zero before step 0. After the last one it grows
    as in the interval before, for at most the length of that interval.

    Example:
        >>> every_ten = Series((9, 19), (100.0, 200.0))
        >>> counter_at(every_ten, 14), counter_at(every_ten, 4), counter_at(every_ten, 24), counter_at(every_ten, 30)
        (150.0, 50.0, 250.0, None)
    """
    steps, values = (-1, *counter.steps), (0.0, *counter.values)
    if step < steps[0] or step > steps[-1] + (steps[-1] - steps[-2]):
        return None
    right = max(min(bisect.bisect_left(steps, step), len(steps) - 1), 1)
    slope = (values[right] - values[right - 1]) / (steps[right] - steps[right - 1])
    return values[right] + slope * (step - steps[right])


def against(series: Series, counter: Series) -> list[tuple[float, float]]:
    """Pairs of count and value, where the count is known: say, a validation loss over the bytes sent."""
    counts = ((counter_at(counter, step), value) for step, value in zip(series.steps, series.values, strict=True))
    return [(count, value) for count, value in counts if count is not None]


def averaged(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Replace neighbours by their mean, so that at most ``most`` points are left.

    NaN and infinity are left out of the means. A group of nothing else is NaN.

    Example:
        >>> averaged([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], most=2)
        [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    result = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        values = [value for _, value in group if math.isfinite(value)]
        mean = sum(values) / len(values) if values else math.nan
        result.append((sum(x for x, _ in group) / len(group), mean))
    return result


def best_of(series: Series, higher_is_better: bool) -> tuple[int, float] | None:
    """The step and value of the best finite value; None if there is none."""
    finite = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    return (max if higher_is_better else min)(finite, key=lambda point: point[1], default=None)
