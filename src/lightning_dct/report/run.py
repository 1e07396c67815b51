"""A training run as plain data, and the bytes that it had sent and the seconds it had taken at any step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_dct.report.quality import stage_of

Series = dict[int, float]
"""Values by optimizer step, in ascending order. Lightning counts from 0: it logs step 49 after 50 steps."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Its name on the page.
        source: The file it was read from.
        series: What was logged, by name; none of them empty.
        settings: Dotted names, and values as text.
        overrides: Hydra's overrides on its command line.
        strategy: The name of its strategy, where it was logged.
        ranks: Their number as text, likewise.
        seconds: Wall time from the start to the last log, if it was logged.
        problems: Messages on parts that could not be read.
    """

    name: str
    source: Path
    series: Mapping[str, Series]
    settings: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    strategy: str | None = None
    ranks: str | None = None
    seconds: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, according to the log."""
        # Training logs before the step counts, a test after the last one.
        return max(max(series) + (stage_of(name) not in ("val", "test")) for name, series in self.series.items())

    @property
    def counted_seconds(self) -> Series | None:
        """Seconds of training; None if they were not logged."""
        return _unwrapped(self.series["dct/seconds"]) if "dct/seconds" in self.series else None

    @property
    def milliseconds(self) -> float | None:
        """The mean of a step, from the first logged one to the last; None without two of them."""
        # Most steps between two exchanges send nothing, so a median would not show what an exchange costs.
        counted = self.counted_seconds or {}
        if len(counted) < 2:
            return None
        (first, since), *_, (last, until) = counted.items()
        return 1e3 * (until - since) / (last - first)

    def seconds_to(self, name: str, value: float, higher: bool) -> float | None:
        """Seconds of training until a metric was first as good as ``value``; None if it never was."""
        reached = (
            at for at, found in self.series.get(name, {}).items() if (found >= value if higher else found <= value)
        )
        step = next(reached, None)
        counted = self.counted_seconds
        seconds = math.nan if step is None or counted is None else counter_at(counted, [step])[0]
        return seconds if math.isfinite(seconds) else None

    def counted_bytes(self, key: str, parts: Sequence[str] = ("dp", "mp")) -> Series | None:
        """``bytes_sent`` or ``bytes_dense``, of data parallelism and inside the model; None if neither was logged."""
        counters = [_unwrapped(self.series[name]) for part in parts if (name := f"dct/{part}/{key}") in self.series]
        if not counters:
            return None
        steps = sorted({step for counter in counters for step in counter})
        sums = sum(np.interp(steps, list(counter), list(counter.values()), left=0.0) for counter in counters)
        return dict(zip(steps, np.asarray(sums).tolist(), strict=True))


def counter_at(counter: Series, steps: Sequence[int]) -> list[float]:
    """The value of a counter at any steps; NaN if unknown.

    It grows linearly between logged steps, from zero before step 0. After the last one it grows as in the interval
    before, for at most the length of that interval.

    Example:
        >>> counter_at({9: 100.0, 19: 200.0}, [4, 14, 24, 30])
        [50.0, 150.0, 250.0, nan]
    """
    known, values = [-1, *counter], [0.0, *counter.values()]
    known.append(2 * known[-1] - known[-2])
    values.append(2 * values[-1] - values[-2])
    return np.interp(steps, known, values, right=np.nan).tolist()


def _unwrapped(counter: Series) -> Series:
    """A counter without the restarts of resumed runs."""
    grown = np.diff(list(counter.values()), prepend=0.0)
    values = np.where(grown < 0, list(counter.values()), grown).cumsum()
    return dict(zip(counter, values.tolist(), strict=True))
