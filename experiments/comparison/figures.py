"""Mean and spread over seeds, and differences to the baseline seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.quality import higher_is_better
from comparison.runs import Entry, Run

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure over several runs.

    Attributes:
        mean: Over the runs that have it.
        deviation: Sample standard deviation; None for a single run.
        count: How many runs have it.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure | None:
        """Sum up what runs say; None where none of them says anything."""
        found = [value for value in values if value is not None]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))

    def write(self, pattern: str) -> str:
        """As text: the mean by the pattern, and the deviation by the same, without sign.

        Example:
            >>> Figure(0.01234, 0.0021, 3).write("{:+.1%}")
            '+1.2% ± 0.2%'
        """
        mean = pattern.format(self.mean)
        return mean if self.deviation is None else f"{mean} ± {pattern.replace('+', '').format(self.deviation)}"


def metric_figure(runs: Sequence[Run], name: str) -> Figure | None:
    """A metric over runs; those that diverged have none."""
    return Figure.of(run.result["metrics"].get(name) for run in runs)


def result_figure(runs: Sequence[Run], take: Callable[[Result], float | None]) -> Figure | None:
    """Anything else of ``result.json`` over runs."""
    return Figure.of(take(run.result) for run in runs)


def difference(entry: Entry, baseline: Entry, name: str) -> Figure | None:
    """How far a metric is from the baseline's, seed by seed: what the seed does to both is not in the spread.

    Args:
        entry: One side of a comparison.
        baseline: The side it is held to.
        name: The metric, as ``test/loss``.

    Returns:
        Of losses a fraction of the baseline's, of scores the bare difference; None without a common seed.
    """
    reference = {run.seed: run.result["metrics"].get(name) for run in baseline.runs}
    values: list[float | None] = []
    for run in entry.runs:
        mine, theirs = run.result["metrics"].get(name), reference.get(run.seed)
        if mine is None or theirs is None or (theirs == 0 and not higher_is_better(name)):
            continue
        values.append(mine - theirs if higher_is_better(name) else mine / theirs - 1)
    return Figure.of(values)


def bytes_per_step(result: Result) -> float | None:
    """Bytes a rank sends a step, gradients and what crosses inside a split model together; None where not counted."""
    parts = [result["bytes_sent_per_step"], result["split_bytes_per_step"]]
    counted = [part for part in parts if part is not None]
    return sum(counted) if counted else None
