"""The figures of a comparison over seeds, as a table, as every figure of every run, and as
pictures.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from comparison.runs import Entry, Run

JUDGED_BY = ("auc", "accuracy", "loss")
"""Metrics that a sweep goes by and a picture shows: the first of them that is reported.

Validation reports them too.
"""
COMPARED = (*JUDGED_BY, "chrf")
"""Metrics that a table sets against the baseline's."""

Result = Mapping[str, Any]
_NOTHING = "-"
_FIGURES: tuple[tuple[str, str, Callable[[Result], float | None]], ...] = (
    ("gradient ratio", "{:,.1f}x", lambda result: result["compression_ratio"]),
    ("gradient kB a step", "{:,.1f}", lambda result: _thousands(result["bytes_sent_per_step"])),
    # Activations of a split model, and rows of sharded tables.
    ("inside ratio", "{:,.1f}x", lambda result: result["split_ratio"]),
    ("inside kB a step", "{:,.1f}", lambda result: _thousands(result["split_bytes_per_step"])),
    ("ms a step", "{:,.1f}", lambda result: result["milliseconds_per_step"]),
)


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
        return (
            mean
            if self.deviation is None
            else f"{mean} ± {pattern.replace('+', '').format(self.deviation)}"
        )


def reported_metrics(entries: Sequence[Entry]) -> list[str]:
    """Metrics to show: the test part's where it was scored, for then validation only steered the
    run.
    """
    names = list(
        dict.fromkeys(
            name for entry in entries for run in entry.runs for name in run.result["metrics"]
        )
    )
    return [name for name in names if name.startswith("test/")] or names


def metric_of(name: str) -> str:
    """A metric's name without the part it was measured on.

    Example:
        >>> metric_of("test/auc"), metric_of("auc")
        ('auc', 'auc')
    """
    part, _, metric = name.partition("/")
    return metric if part in ("test", "val") else name


def higher_is_better(name: str) -> bool:
    """Whether higher values of a metric that a table compares are better: of all but losses."""
    return metric_of(name) != "loss"


def main_metric(names: Iterable[str]) -> str:
    """The metric that quality is judged by, without the part; a ValueError if no known one is
    there.
    """
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


def without_figures(entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """Notes on runs that lack a finite figure, which a mean leaves out."""
    counts = [
        sum(any(run.result["metrics"].get(name) is None for name in names) for run in entry.runs)
        for entry in entries
    ]
    return [
        f"{entry.label}: {count} of {len(entry.runs)} runs have no finite {' or '.join(names)};"
        " means leave them out."
        for entry, count in zip(entries, counts, strict=True)
        if count
    ]


def difference(entry: Entry, baseline: Entry, name: str) -> Figure | None:
    """The difference from the baseline's metric, seed by seed, so that the seed's effect on both is
    not in the spread.

    Of losses it is a fraction of the baseline's, of scores the bare difference. None without a
    common seed.
    """
    reference = {run.seed: run.result["metrics"].get(name) for run in baseline.runs}
    values: list[float | None] = []
    for run in entry.runs:
        mine = run.result["metrics"].get(name)
        theirs = reference.get(run.seed)
        if mine is not None and theirs is not None:
            values.append(
                mine - theirs if higher_is_better(name) else mine / theirs - 1 if theirs else None
            )
    return Figure.of(values)


def bytes_per_step(result: Result) -> float | None:
    """Bytes a rank sends a step, gradients and what crosses inside a split model together; None
    where not counted.
    """
    counted = [
        result[key]
        for key in ("bytes_sent_per_step", "split_bytes_per_step")
        if result[key] is not None
    ]
    return sum(counted) if counted else None


def to_markdown(entries: Sequence[Entry], title: str, remarks: Sequence[str] = ()) -> str:
    """The table with notes below it, the baseline first; ``remarks`` are further notes, such as
    what failed.
    """
    columns: dict[str, list[str]] = {
        "strategy": [entry.label for entry in entries],
        "seeds": [str(len(entry.runs)) for entry in entries],
    }
    for setting in dict.fromkeys(setting for entry in entries for setting in entry.chosen or ()):
        columns[setting] = [
            entry.chosen[setting] if entry.chosen else _NOTHING for entry in entries
        ]
    for name in reported_metrics(entries):
        columns[name] = [
            figure_text(metric_figure(entry.runs, name), "{:.4f}") for entry in entries
        ]
        if metric_of(name) in COMPARED and len(entries) > 1:
            pattern = "{:+.4f}" if higher_is_better(name) else "{:+.1%}"
            differences = [
                figure_text(difference(entry, entries[0], name), pattern) for entry in entries[1:]
            ]
            columns[f"{metric_of(name)} against {entries[0].label}"] = [_NOTHING, *differences]
    for head, pattern, take in _FIGURES:
        figures = [result_figure(entry.runs, take) for entry in entries]
        # A model that is not split has no such columns.
        if any(figures) or not head.startswith("inside"):
            columns[head] = [
                _NOTHING if figure is None else pattern.format(figure.mean) for figure in figures
            ]
    sweeps = [f"{entry.label}: {entry.note}." for entry in entries if entry.note]
    return f"{title}\n\n" + markdown(
        [[*columns], *(list(row) for row in zip(*columns.values(), strict=True))],
        [
            *how_to_read(entries),
            *without_figures(entries, reported_metrics(entries)),
            *sweeps,
            *remarks,
        ],
    )


def markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table, its heads in the first row, with notes below it."""
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*table, "", *(f"- {note}" for note in notes)]) + "\n"


def how_to_read(entries: Sequence[Entry]) -> list[str]:
    """Notes on the figures of a table."""
    runs = [run for entry in entries for run in entry.runs]
    seeds = sorted({run.seed for run in runs})
    processes = sorted({run.result["world_size"] for run in runs})
    notes = [f"{' or '.join(map(str, processes))} processes; seeds {', '.join(map(str, seeds))}."]
    if len(seeds) > 1:
        notes.append("Mean ± sample standard deviation over the seeds.")
    if len(entries) > 1:
        notes.append(
            f"Against {entries[0].label}: seed by seed; losses in percent, scores as the bare"
            " difference."
        )
    return [
        *notes,
        "Ratio: bytes of the dense fp32 exchange over bytes sent. kB: what a rank sends a step.",
    ]


def write_runs(file: Path, entries: Sequence[Entry]) -> None:
    """Write a row for each run with all its figures, as comma-separated values; trials of a sweep
    have theirs too.
    """
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
                    **{
                        f"best known {name}": value
                        for name, value in run.result["best_known"].items()
                    },
                    **{
                        name: value
                        for name, value in run.result.items()
                        if not isinstance(value, dict | list)
                    },
                    "overrides": " ".join(run.result["overrides"]),
                    "folder": str(run.folder),
                }
            )
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys(head for row in rows for head in row)))
        writer.writeheader()
        writer.writerows(rows)


def draw(file: Path, entries: Sequence[Entry], title: str) -> None:
    """Draw quality against bytes a step: the mean of each strategy with its spread, and the
    baseline as a line.

    A strategy that sends nothing has no place on an axis of magnitudes; it is a dotted line.
    """
    names = reported_metrics(entries)
    name = next(name for name in names if metric_of(name) == main_metric(names))
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, entry in enumerate(entries):
        quality = metric_figure(entry.runs, name)
        sent = result_figure(entry.runs, bytes_per_step)
        colour = f"C{(number - 1) % 10}" if number else "black"
        if quality is not None and number == 0:
            axis.axhline(quality.mean, color=colour, linewidth=1, linestyle="--")
        if quality is not None and sent is not None and sent.mean > 0:
            look = {
                "marker": "D",
                "capsize": 4,
                "linestyle": "none",
                "color": colour,
                "label": entry.label,
            }
            axis.errorbar(sent.mean, quality.mean, yerr=quality.deviation, **look)
        elif quality is not None:
            axis.axhline(
                quality.mean, color=colour, linestyle=":", label=f"{entry.label} (no bytes counted)"
            )
    axis.set(xscale="log", xlabel="bytes a rank sends a step")
    axis.set_ylabel(f"{name} ({'higher' if higher_is_better(name) else 'lower'} is better)")
    _finish(figure, axis, file, title)


def draw_pace(file: Path, entries: Sequence[Entry], title: str) -> None:
    """Draw what each validation found over the seconds of training before it: a curve for each
    run.
    """
    names = {name for entry in entries for run in entry.runs for name in run.result["metrics"]}
    name = f"val/{main_metric(names)}"
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, entry in enumerate(entries):
        for place, run in enumerate(entry.runs):
            known = [
                point
                for point in run.result.get("history", [])
                if point["metrics"].get(name) is not None
            ]
            seconds = [point["seconds"] for point in known]
            found = [point["metrics"][name] for point in known]
            look = {"color": f"C{(number - 1) % 10}" if number else "black", "marker": "."}
            axis.plot(seconds, found, label=None if place else entry.label, **look)
            if found and not number and not place:  # where the baseline ends, for the eye
                axis.axhline(found[-1], color="black", linewidth=1, linestyle="--")
    axis.set(xscale="log", xlabel="seconds of training, without validation")
    axis.set_ylabel(f"{name} ({'higher' if higher_is_better(name) else 'lower'} is better)")
    _finish(figure, axis, file, title)


def _finish(figure: Any, axis: Any, file: Path, title: str) -> None:
    axis.set_title(title, fontsize="small", wrap=True)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _thousands(count: float | None) -> float | None:
    return None if count is None else count / 1000


def figure_text(figure: Figure | None, pattern: str) -> str:
    """A figure as text, or a sign that there is none."""
    return _NOTHING if figure is None else figure.write(pattern)
