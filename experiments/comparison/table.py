"""A comparison as a table for the reader, as every figure of every run for a spreadsheet, and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from comparison.figures import (
    COMPARED,
    Figure,
    Result,
    bytes_per_step,
    difference,
    main_metric,
    metric_figure,
    metric_of,
    reported_metrics,
    result_figure,
)
from comparison.runs import Entry
from lightning_dct.report.quality import higher_is_better

_NOTHING = "-"
_FIGURES: tuple[tuple[str, str, Callable[[Result], float | None]], ...] = (
    ("gradient ratio", "{:,.1f}x", lambda result: result["compression_ratio"]),
    ("gradient kB a step", "{:,.1f}", lambda result: _thousands(result["bytes_sent_per_step"])),
    # Activations of a split model, and rows of sharded tables.
    ("inside ratio", "{:,.1f}x", lambda result: result["split_ratio"]),
    ("inside kB a step", "{:,.1f}", lambda result: _thousands(result["split_bytes_per_step"])),
    ("ms a step", "{:,.1f}", lambda result: result["milliseconds_per_step"]),
)


def to_markdown(entries: Sequence[Entry], title: str, remarks: Sequence[str] = ()) -> str:
    """The table with notes below it, the baseline first; ``remarks`` are further notes, such as what failed."""
    columns: dict[str, list[str]] = {
        "strategy": [entry.label for entry in entries],
        "seeds": [str(len(entry.runs)) for entry in entries],
    }
    for setting in dict.fromkeys(setting for entry in entries for setting in entry.chosen or ()):
        columns[setting] = [entry.chosen[setting] if entry.chosen else _NOTHING for entry in entries]
    for name in reported_metrics(entries):
        columns[name] = [_text(metric_figure(entry.runs, name), "{:.4f}") for entry in entries]
        if metric_of(name) in COMPARED and len(entries) > 1:
            pattern = "{:+.4f}" if higher_is_better(name) else "{:+.1%}"
            differences = [_text(difference(entry, entries[0], name), pattern) for entry in entries[1:]]
            columns[f"{metric_of(name)} against {entries[0].label}"] = [_NOTHING, *differences]
    for head, pattern, take in _FIGURES:
        figures = [result_figure(entry.runs, take) for entry in entries]
        # A model that is not split has no such columns.
        if any(figures) or not head.startswith("inside"):
            columns[head] = [_NOTHING if figure is None else pattern.format(figure.mean) for figure in figures]
    sweeps = [f"{entry.label}: {entry.note}." for entry in entries if entry.note]
    return f"{title}\n\n" + markdown(
        [[*columns], *(list(row) for row in zip(*columns.values(), strict=True))],
        [*how_to_read(entries), *sweeps, *remarks],
    )


def markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table, its heads in the first row, with notes below it."""
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*table, "", *(f"- {note}" for note in notes)]) + "\n"


def how_to_read(entries: Sequence[Entry]) -> list[str]:
    """Say what the figures of a table are."""
    runs = [run for entry in entries for run in entry.runs]
    seeds, processes = sorted({run.seed for run in runs}), sorted({run.result["world_size"] for run in runs})
    notes = [f"{' or '.join(map(str, processes))} processes; seeds {', '.join(map(str, seeds))}."]
    if len(seeds) > 1:
        notes.append("Mean ± sample standard deviation over the seeds.")
    if len(entries) > 1:
        notes.append(f"Against {entries[0].label}: seed by seed; losses in percent, scores as the bare difference.")
    return [*notes, "Ratio: bytes of the dense fp32 exchange over bytes sent. kB: what a rank sends a step."]


def write_runs(file: Path, entries: Sequence[Entry]) -> None:
    """Write a row for each run with all its figures, as comma-separated values; trials of a sweep have theirs too."""
    rows: list[dict[str, Any]] = []
    for entry in entries:
        compared = {run.folder for run in entry.runs}
        for run in {run.folder: run for run in [*entry.trials, *entry.runs]}.values():
            rows.append(
                {
                    "strategy": entry.label,
                    "compared": run.folder in compared,
                    "swept": " ".join(run.swept),
                    **run.result["metrics"],
                    **{f"best known {name}": value for name, value in run.result["best_known"].items()},
                    **{name: value for name, value in run.result.items() if not isinstance(value, dict | list)},
                    "overrides": " ".join(run.result["overrides"]),
                    "folder": str(run.folder),
                }
            )
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys(head for row in rows for head in row)))
        writer.writeheader()
        writer.writerows(rows)


def draw(file: Path, entries: Sequence[Entry], title: str) -> None:
    """Draw quality against bytes a step: the mean of each strategy with its spread, and the baseline as a line.

    A strategy that sends nothing has no place on an axis of magnitudes; it is a dotted line.
    """
    names = reported_metrics(entries)
    name = next(name for name in names if metric_of(name) == main_metric(names))
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, entry in enumerate(entries):
        quality, sent = metric_figure(entry.runs, name), result_figure(entry.runs, bytes_per_step)
        colour = f"C{(number - 1) % 10}" if number else "black"
        if quality is not None and number == 0:
            axis.axhline(quality.mean, color=colour, linewidth=1, linestyle="--")
        if quality is not None and sent is not None and sent.mean > 0:
            look = {"marker": "D", "capsize": 4, "linestyle": "none", "color": colour, "label": entry.label}
            axis.errorbar(sent.mean, quality.mean, yerr=quality.deviation, **look)
        elif quality is not None:
            axis.axhline(quality.mean, color=colour, linestyle=":", label=f"{entry.label} (no bytes counted)")
    axis.set(xscale="log", xlabel="bytes a rank sends a step")
    axis.set_ylabel(f"{name} ({'higher' if higher_is_better(name) else 'lower'} is better)")
    axis.set_title(title, fontsize="small", wrap=True)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _thousands(count: float | None) -> float | None:
    return None if count is None else count / 1000


def _text(figure: Figure | None, pattern: str) -> str:
    return _NOTHING if figure is None else figure.write(pattern)
