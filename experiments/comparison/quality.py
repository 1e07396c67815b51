"""Which figures tell the quality of a run, and which way is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_dct.report.quality import higher_is_better as more_is_better

JUDGED_BY = ("auc", "accuracy", "loss")
"""Metrics that a sweep goes by and a picture shows: the first of them that is reported. Validation reports them too."""

COMPARED = (*JUDGED_BY, "chrf")
"""Metrics that a table sets against the baseline's."""

_PARTS = ("test", "val")


def reported_metrics(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the metrics to show: the test part's where it was scored, for then validation only steered the run.

    Args:
        results: What ``result.json`` says, of each run.

    Returns:
        Names such as ``test/auc``, in the order of the runs.
    """
    names = list(dict.fromkeys(name for result in results for name in result["metrics"]))
    return [name for name in names if name.startswith("test/")] or names


def main_metric(names: Iterable[str]) -> str:
    """The metric that quality is judged by.

    Args:
        names: Names of metrics, with or without the part they were measured on.

    Returns:
        Its name without the part.

    Raises:
        ValueError: None of the known ones is there.
    """
    found = {metric_of(name) for name in names}
    for metric in JUDGED_BY:
        if metric in found:
            return metric
    reported = ", ".join(sorted(found)) or "nothing"
    raise ValueError(f"a comparison goes by auc, accuracy or loss, and the runs report {reported}")


def metric_of(name: str) -> str:
    """A metric's name without the part it was measured on.

    Example:
        >>> metric_of("test/auc"), metric_of("auc")
        ('auc', 'auc')
    """
    part, _, metric = name.partition("/")
    return metric if part in _PARTS else name


def higher_is_better(name: str) -> bool:
    """Say whether more of a metric is better; of those that its name tells nothing of, less is."""
    return bool(more_is_better(name))


def validation_quality(result: Mapping[str, Any], metric: str) -> float | None:
    """What validation after the last step found: of the very weights that the test part is scored with.

    Args:
        result: What ``result.json`` says.
        metric: A metric's name without its part.

    Returns:
        The figure; None where the run diverged or did not report it.
    """
    quality: float | None = result["metrics"].get(f"val/{metric}")
    return quality


def best_validation(result: Mapping[str, Any], metric: str) -> float | None:
    """The best that any validation of a run found, at whatever step; None where there is none."""
    reported = [found.get(f"val/{metric}") for found in result["validations"]]
    figures: list[float] = [figure for figure in reported if figure is not None]
    if not figures:
        return None
    return max(figures) if higher_is_better(metric) else min(figures)
