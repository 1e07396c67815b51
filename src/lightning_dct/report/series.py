"""Arithmetic on what was logged: bytes at any step, averages of neighbours, the best of a series. Pure functions."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from lightning_dct.report.run import Series

PARTS = ("dp", "mp")
"""Gradients, and what crosses inside a model, as the logged names have them."""


def counted_bytes(series: Mapping[str, Series], key: str, parts: Sequence[str] = PARTS) -> Series | None:
    """A byte counter over all kinds of traffic.

    Args:
        series: Of one run.
        key: ``bytes_sent`` or ``bytes_dense``.
        parts: The kinds of traffic that count.

    Returns:
        The sum, at every step that one of them was logged at; None where none was.
    """
    counters = [unwrapped(series[name]) for part in parts if (name := f"dct/{part}/{key}") in series]
    if not counters:
        return None
    steps = sorted({step for counter in counters for step in counter.steps})
    return Series.of((step, sum(_last_known(counter, step) for counter in counters)) for step in steps)


def unwrapped(counter: Series) -> Series:
    """Let a counter that began anew, as after a resume without its state, go on from where it was.

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
    """What a counter stood at.

    Between two logged steps it is taken to grow evenly, from nothing before step 0; after the last one as it did in the
    interval before, and for no longer than that interval.

    Args:
        counter: Not empty.
        step: Any.

    Returns:
        The count; None where it is not known.

    Example:
        >>> every_ten = Series((9, 19), (100.0, 200.0))
        >>> counter_at(every_ten, 14), counter_at(every_ten, 4), counter_at(every_ten, 24), counter_at(every_ten, 30)
        (150.0, 50.0, 250.0, None)
    """
    steps, values = (-1, *counter.steps), (0.0, *counter.values)
    if step < steps[0] or step > steps[-1] + (steps[-1] - steps[-2]):
        return None
    right = min(bisect.bisect_left(steps, step), len(steps) - 1)
    right = max(right, 1)
    slope = (values[right] - values[right - 1]) / (steps[right] - steps[right - 1])
    return values[right] + slope * (step - steps[right])


def against(series: Series, counter: Series) -> list[tuple[float, float]]:
    """The points of a series over what a counter stood at; those where that is not known are left out.

    Args:
        series: Say, a validation loss.
        counter: Say, the bytes sent.

    Returns:
        Pairs of count and value.
    """
    counts = ((counter_at(counter, step), value) for step, value in zip(series.steps, series.values, strict=True))
    return [(count, value) for count, value in counts if count is not None]


def averaged(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Replace neighbours by their mean, so that few enough points are left.

    Args:
        points: In the order they are drawn in.
        most: How many may be left.

    Returns:
        The points themselves where they are no more than that. NaN and infinity are averaged with nothing: what a
        group has besides counts, and a group of nothing else is NaN.

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
    """The best value and its step; None where no value is finite.

    Args:
        series: Any.
        higher_is_better: Which way is better.
    """
    finite = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    if not finite:
        return None
    pick = max if higher_is_better else min
    return pick(finite, key=lambda point: point[1])
