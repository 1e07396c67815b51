"""A comparison as a picture: quality against bytes a step; matplotlib draws it without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from comparison.figures import Figure, bytes_per_step, metric_figure
from comparison.quality import higher_is_better, main_metric, metric_of, reported_metrics
from comparison.runs import Entry

_BASELINE = "black"


def draw(file: Path, entries: Sequence[Entry], title: str) -> None:
    """Draw every run faintly, the mean of each strategy boldly, and the baseline as a line with its spread.

    A strategy that sends nothing has no place on an axis of magnitudes; it is a dotted line.

    Args:
        file: Where it goes.
        entries: The sides of the comparison, the baseline first.
        title: What was compared.
    """
    names = reported_metrics([run.result for entry in entries for run in entry.runs])
    metric = main_metric(names)
    name = next(name for name in names if metric_of(name) == metric)
    figure, axis = plt.subplots(figsize=(8, 5))
    _draw_baseline(axis, metric_figure(entries[0].runs, name))
    for number, entry in enumerate(entries):
        colour = _BASELINE if number == 0 else f"C{(number - 1) % 10}"
        _draw_entry(axis, entry, name, colour)
    axis.set_xscale("log")
    axis.set_xlabel("bytes a rank sends a step")
    axis.set_ylabel(f"{name} ({'higher' if higher_is_better(name) else 'lower'} is better)")
    axis.set_title(title, fontsize="small", wrap=True)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _draw_baseline(axis: Any, quality: Figure | None) -> None:
    if quality is None:
        return
    axis.axhline(quality.mean, color=_BASELINE, linewidth=1, linestyle="--")
    if quality.deviation is not None:
        axis.axhspan(
            quality.mean - quality.deviation, quality.mean + quality.deviation, color=_BASELINE, alpha=0.08, linewidth=0
        )


def _draw_entry(axis: Any, entry: Entry, name: str, colour: str) -> None:
    quality = metric_figure(entry.runs, name)
    sent = Figure.of(bytes_per_step(run.result) for run in entry.runs)
    if quality is None:
        return
    if sent is None or sent.mean <= 0:
        axis.axhline(quality.mean, color=colour, linestyle=":", label=f"{entry.label} (no bytes counted)")
        return
    points = [
        (bytes_per_step(run.result), run.result["metrics"][name])
        for run in entry.runs
        if run.result["metrics"].get(name) is not None and bytes_per_step(run.result)
    ]
    axis.plot(*zip(*points, strict=True), linestyle="none", marker="o", markersize=5, alpha=0.3, color=colour)
    axis.errorbar(
        sent.mean, quality.mean, yerr=quality.deviation, marker="D", markersize=8, capsize=4, linewidth=1.5,
        linestyle="none", color=colour, label=entry.label,
    )  # fmt: skip
