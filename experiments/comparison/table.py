"""A comparison as tables: a row a strategy for the reader, and every figure of every run for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comparison.figures import Figure, Result, difference, metric_figure, result_figure
from comparison.quality import COMPARED, best_validation, higher_is_better, main_metric, metric_of, reported_metrics
from comparison.runs import Entry, Run

_NOTHING = "-"
_FIGURES: tuple[tuple[str, str, Callable[[Result], float | None]], ...] = (
    ("gradient ratio", "{:,.1f}x", lambda result: result["compression_ratio"]),
    ("gradient kB a step", "{:,.1f}", lambda result: _kilobytes(result["bytes_sent_per_step"])),
    # Where a model is split, or its tables are: what crosses inside it.
    ("inside ratio", "{:,.1f}x", lambda result: result["split_ratio"]),
    ("inside kB a step", "{:,.1f}", lambda result: _kilobytes(result["split_bytes_per_step"])),
    ("ms a step", "{:,.1f}", lambda result: result["milliseconds_per_step"]),
)


def tabulate(entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """Lay a comparison out as a table.

    Args:
        entries: Its sides, the baseline first.

    Returns:
        The heads of the columns, and a row for each side.
    """
    results = [run.result for entry in entries for run in entry.runs]
    columns: dict[str, list[str]] = {"seeds": [str(len(entry.runs)) for entry in entries]}
    for setting in dict.fromkeys(setting for entry in entries if entry.choice for setting in entry.choice.values):
        columns[setting] = [entry.choice.values[setting] if entry.choice else _NOTHING for entry in entries]
    for name in reported_metrics(results):
        columns[name] = [_text(metric_figure(entry.runs, name), "{:.4f}") for entry in entries]
        if metric_of(name) in COMPARED and len(entries) > 1:
            pattern = "{:+.4f}" if higher_is_better(name) else "{:+.1%}"
            differences = [_text(difference(entry, entries[0], name), pattern) for entry in entries[1:]]
            columns[f"{metric_of(name)} against {entries[0].label}"] = [_NOTHING, *differences]
    for head, pattern, take in _FIGURES:
        figures = [result_figure(entry.runs, take) for entry in entries]
        # A table need not say of a model that is whole that nothing crosses inside it.
        if any(figures) or not head.startswith("inside"):
            columns[head] = [_NOTHING if figure is None else pattern.format(figure.mean) for figure in figures]
    rows = [[entry.label, *(column[row] for column in columns.values())] for row, entry in enumerate(entries)]
    return ["strategy", *columns], rows


def write_markdown(file: Path, entries: Sequence[Entry], title: str, remarks: Sequence[str] = ()) -> None:
    """Write the table with all it takes to read it.

    Args:
        file: Where it goes.
        entries: The sides of the comparison, the baseline first.
        title: What was compared.
        remarks: Sentences for below it: what failed, for instance.
    """
    heads, rows = tabulate(entries)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    text = [title, "", *table, "", *(f"- {note}" for note in [how_to_read(entries), *sweep_notes(entries), *remarks])]
    file.write_text("\n".join(text) + "\n")


def sweep_notes(entries: Sequence[Entry]) -> list[str]:
    """Say of each strategy how the swept settings were chosen; empty without a sweep."""
    return [f"{entry.label}: {entry.choice.note}." for entry in entries if entry.choice]


def how_to_read(entries: Sequence[Entry]) -> str:
    """Say what the figures of the table are."""
    seeds = sorted({run.seed for entry in entries for run in entry.runs})
    processes = sorted({run.result["world_size"] for entry in entries for run in entry.runs})
    counts = " or ".join(map(str, processes)) + (" process" if processes == [1] else " processes")
    told = [
        f"{counts}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        "Ratio: bytes of the dense fp32 exchange over bytes sent. kB: what a rank sends a step.",
    ]
    if len(seeds) > 1:
        told.insert(1, "Mean ± sample standard deviation over the seeds.")
    if len(entries) > 1:
        told.insert(-1, f"Against {entries[0].label}: seed by seed; losses in percent, scores as the bare difference.")
    return " ".join(told)


def write_runs(file: Path, entries: Sequence[Entry]) -> None:
    """Write a row for each run with all its figures, as comma-separated values; trials of a sweep have theirs too."""
    rows: list[dict[str, Any]] = []
    for entry in entries:
        compared = {run.folder for run in entry.runs}
        for run in {run.folder: run for run in [*entry.trials, *entry.runs]}.values():
            rows.append({"strategy": entry.label, "compared": run.folder in compared, **_all_figures(run)})
    heads = list(dict.fromkeys(head for row in rows for head in row))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, heads)
        writer.writeheader()
        writer.writerows(rows)


def _all_figures(run: Run) -> dict[str, Any]:
    result = run.result
    metric = main_metric(result["metrics"])
    return {
        "swept": " ".join(run.swept),
        "seed": run.seed,
        **result["metrics"],
        f"best val/{metric} of all validations": best_validation(result, metric),
        **{f"best known {name}": value for name, value in result["best_known"].items()},
        **{name: value for name, value in result.items() if not isinstance(value, dict | list)},
        "overrides": " ".join(result["overrides"]),
        "folder": str(run.folder),
    }


def _kilobytes(count: float | None) -> float | None:
    return None if count is None else count / 1000


def _text(figure: Figure | None, pattern: str) -> str:
    return _NOTHING if figure is None else figure.write(pattern)
