"""A training run as plain data: what it logged at which step, how it was set up, what could not be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class UnreadableRun(ValueError):
    """A log that holds nothing to show; the message names the file and says why."""


@dataclass(frozen=True)
class Series:
    """The values logged under one name.

    Attributes:
        steps: Optimizer steps, strictly increasing. Lightning counts from 0: step 49 is logged when 50 are done.
        values: As many; NaN and infinity where that was logged.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Series:
        """Sort points by step; of several at one step the last is kept: a resumed run logs some steps anew.

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
        name: What it is called on the page.
        source: The file it was read from.
        kind: What that file is.
        series: What was logged, by name; none of them empty.
        settings: Names with dots, and values as text.
        overrides: What the command line of ``experiments/train.py`` said.
        steps: Optimizer steps done, where ``result.json`` says so.
        milliseconds_per_step: Median wall time of a training step, where it was measured.
        seconds: Wall time from the start to the last log, where it was logged.
        notes: What a reader has to know about the figures.
        problems: What of the log could not be read, each with the file's name.
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

    @property
    def last_step(self) -> int:
        """The last step at which anything was logged."""
        return max(series.steps[-1] for series in self.series.values())
