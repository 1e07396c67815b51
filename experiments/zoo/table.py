"""The zoo as a table and a picture: for each member and strategy the quality lost and the bytes
saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from comparison.runs import Entry
from comparison.table import (
    Figure,
    Result,
    difference,
    higher_is_better,
    how_to_read,
    main_metric,
    markdown,
    metric_figure,
    result_figure,
)

ALLOWED = {"loss": 0.01, "accuracy": 0.005, "auc": 0.001}
"""The most that may be lost at parity: of a loss a fraction, of scores the bare difference."""

_UNITS = {"loss": "{:+.2%}", "accuracy": "{:+.4f}", "auc": "{:+.4f}"}


@dataclass(frozen=True)
class Row:
    """A member at ``rate`` times its tuned learning rate, with its runs under each strategy, the
    baseline first.
    """

    member: str
    rate: float
    entries: Sequence[Entry]

    @property
    def name(self) -> str:
        """Its name in a table."""
        return self.member if self.rate == 1 else f"{self.member} x {self.rate:g}"

    @property
    def metric(self) -> str:
        """The metric of its quality: ``auc``, ``accuracy`` or ``loss``."""
        return main_metric(
            name for entry in self.entries for run in entry.runs for name in run.result["metrics"]
        )

    def quality(self, entry: Entry) -> Figure | None:
        """The metric of validation after the last step; None where no run has a finite one."""
        return metric_figure(entry.runs, f"val/{self.metric}")

    def lost(self, entry: Entry) -> Figure | None:
        """Quality lost against the baseline, seed by seed: of a loss a part, of scores the bare
        difference.
        """
        gained = difference(entry, self.entries[0], f"val/{self.metric}")
        if gained is None or not higher_is_better(self.metric):
            return gained
        return Figure(-gained.mean, gained.deviation)

    def broken(self, entry: Entry) -> int:
        """How many runs have no finite metric where the baseline's of the same seed has one."""
        name = f"val/{self.metric}"
        sound = {
            run.seed for run in self.entries[0].runs if run.result["metrics"].get(name) is not None
        }
        return sum(
            run.seed in sound and run.result["metrics"].get(name) is None for run in entry.runs
        )

    def at_parity(self, entry: Entry) -> bool:
        """Whether no run broke, and the mean of the seeds loses no more than allowed."""
        lost = self.lost(entry)
        return lost is not None and not self.broken(entry) and lost.mean <= ALLOWED[self.metric]


def saved(result: Result) -> float | None:
    """Bytes of the dense exchange over bytes sent, of gradients and what crosses inside a split
    model together.
    """
    sent = result["bytes_sent_per_step"] or 0.0
    dense = result["bytes_dense_per_step"] or 0.0
    inside = result["split_bytes_per_step"] or 0.0
    ratio = result["split_ratio"] or 0.0
    return (dense + inside * ratio) / (sent + inside) if sent + inside else None


def to_markdown(rows: Sequence[Row], remarks: Sequence[str] = ()) -> str:
    """The table of members with a run of the baseline, and notes; ``remarks`` are further notes."""
    baseline, *others = [entry.label for entry in rows[0].entries]
    heads = ["member", "judged by", baseline]
    for label in others:
        heads += [f"{label}: lost", "fewer bytes"]
    rows_of_text = [heads]
    for row in rows:
        quality = row.quality(row.entries[0])
        cells = [row.name, row.metric, quality.write("{:.4f}") if quality else "-"]
        for entry in row.entries[1:]:
            cells += [_lost(row, entry), _saved(entry)]
        rows_of_text.append(cells)
    bounds = ", ".join(
        f"{_UNITS[metric].format(bound).lstrip('+')} of {metric}"
        for metric, bound in ALLOWED.items()
    )
    notes = [
        (
            "Validation after training. Lost: below 0 is better than the first strategy. Bold is"
            f" more than may be lost: {bounds}."
        ),
        *how_to_read([entry for row in rows for entry in row.entries]),
        *(verdict(rows, place) for place in range(1, len(others) + 1)),
        *remarks,
    ]
    return markdown(rows_of_text, notes)


def verdict(rows: Sequence[Row], place: int) -> str:
    """How many members a strategy trains as well as the baseline does."""
    entries = [(row, row.entries[place]) for row in rows if row.entries[place].runs]
    good = sum(row.at_parity(entry) for row, entry in entries)
    broken = sum(row.broken(entry) for row, entry in entries)
    return (
        f"{rows[0].entries[place].label}: {good} of {len(entries)} at parity; {broken} runs broke."
    )


def _lost(row: Row, entry: Entry) -> str:
    lost = row.lost(entry)
    broken = row.broken(entry)
    parts = [lost.write(_UNITS[row.metric])] if lost else []
    parts += [f"{broken} broke"] if broken else []
    text = ", ".join(parts) or "-"
    return text if row.at_parity(entry) or text == "-" else f"**{text}**"


def _saved(entry: Entry) -> str:
    ratio = result_figure(entry.runs, saved)
    return f"{ratio.mean:,.0f}x" if ratio else "-"


def draw(file: Path, rows: Sequence[Row]) -> None:
    """Draw quality lost, in units of what may be lost, and bytes saved, a row for each member."""
    figure, (loss_axis, byte_axis) = plt.subplots(
        1, 2, sharey=True, figsize=(10, 1.5 + 0.4 * len(rows)), layout="constrained"
    )
    labels = [entry.label for entry in rows[0].entries]
    for place, label in enumerate(labels[1:], start=1):
        look = {
            "color": f"C{place - 1}",
            "marker": "oDs^vPX"[(place - 1) % 7],
            "capsize": 3,
            "linestyle": "none",
        }
        shift = 0.6 * (place - len(labels) / 2) / len(labels)
        for number, row in enumerate(rows):
            entry = row.entries[place]
            bound = ALLOWED[row.metric]
            if lost := row.lost(entry):
                deviation = None if lost.deviation is None else lost.deviation / bound
                loss_axis.errorbar(lost.mean / bound, number + shift, xerr=deviation, **look)
            if ratio := result_figure(entry.runs, saved):
                byte_axis.errorbar(ratio.mean, number + shift, **look)
        loss_axis.plot(
            [], [], label=label, color=look["color"], marker=look["marker"], linestyle="none"
        )
    loss_axis.axvline(0, color="black", linewidth=1, label=labels[0])
    loss_axis.axvline(1, color="black", linewidth=1, linestyle="--", label="what may be lost")
    # A run that is many times worse must not hide the differences of the others.
    loss_axis.set_xscale("symlog", linthresh=2)
    byte_axis.set_xscale("log")
    loss_axis.set_yticks(range(len(rows)), [f"{row.name} ({row.metric})" for row in rows])
    loss_axis.invert_yaxis()
    loss_axis.set_xlabel("quality lost, 1 being what may be lost", fontsize="small")
    byte_axis.set_xlabel("bytes of the dense exchange over bytes sent", fontsize="small")
    for axis in (loss_axis, byte_axis):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file, dpi=150)
    plt.close(figure)
