"""Which figures tell the quality of a run, their mean and spread over seeds, and differences seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.runs import Entry, Run
from lightning_dct.report.quality import higher_is_better

JUDGED_BY = ("auc", "accuracy", "loss")
"""Metrics that a sweep goes by and a picture shows: the first of them that is reported. Validation reports them too."""
COMPARED = (*JUDGED_BY, "chrf")
"""Metrics that a table sets against the baseline's."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """The mean over several runs, and the sample standard deviation; None for a single run."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure | None:
        """Over the values that are known; None where none is."""
        found = [value for value in values if value is not None]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None)

    def write(self, pattern: str) -> str:
        """As text: the mean by the pattern, and the deviation by the same, without sign.

        Example:
            >>> Figure(0.01234, 0.0021).write("{:+.1%}")
            '+1.2% ± 0.2%'
        """
        mean = pattern.format(self.mean)
        return mean if self.deviation is None else f"{mean} ± {pattern.replace('+', '').format(self.deviation)}"


def reported_metrics(entries: Sequence[Entry]) -> list[str]:
    """Metrics to show: the test part's where it was scored, for then validation only steered the run."""
    names = list(dict.fromkeys(name for entry in entries for run in entry.runs for name in run.result["metrics"]))
    return [name for name in names if name.startswith("test/")] or names


def metric_of(name: str) -> str:
    """A metric's name without the part it was measured on.

    Example:
        >>> metric_of("test/auc"), metric_of("auc")
        ('auc', 'auc')
    """
    part, _, metric = name.partition("/")
    return metric if part in ("test", "val") else name


def main_metric(names: Iterable[str]) -> str:
    """The metric that quality is judged by, without the part; a ValueError if no known one is there."""
    found = {metric_of(name) for name in names}
    for metric in JUDGED_BY:
        if metric in found:
            return metric
    reported = ", ".join(sorted(found)) or "nothing"
    raise ValueError(f"a comparison goes by auc, accuracy or loss, and the runs report {reported}")


def metric_figure(runs: Sequence[Run], name: str) -> Figure | None:
    """A metric over runs; those that diverged have none."""
    return Figure.of(run.result["metrics"].get(name) for run in runs)


def result_figure(runs: Sequence[Run], take: Callable[[Result], float | None]) -> Figure | None:
    """Anything else of ``result.json`` over runs."""
    return Figure.of(take(run.result) for run in runs)


def difference(entry: Entry, baseline: Entry, name: str) -> Figure | None:
    """The difference from the baseline's metric, seed by seed, so that the seed's effect on both is not in the spread.

    Of losses it is a fraction of the baseline's, of scores the bare difference. None without a common seed.
    """
    reference = {run.seed: run.result["metrics"].get(name) for run in baseline.runs}
    values: list[float | None] = []
    for run in entry.runs:
        mine, theirs = run.result["metrics"].get(name), reference.get(run.seed)
        if mine is not None and theirs is not None:
            values.append(mine - theirs if higher_is_better(name) else mine / theirs - 1 if theirs else None)
    return Figure.of(values)


def bytes_per_step(result: Result) -> float | None:
    """Bytes a rank sends a step, gradients and what crosses inside a split model together; None where not counted."""
    counted = [result[key] for key in ("bytes_sent_per_step", "split_bytes_per_step") if result[key] is not None]
    return sum(counted) if counted else None
