"""The benchmark's figures as plots; matplotlib draws them without a screen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmark.job import Run
from benchmark.synchronisations import NOTHING
from benchmark.tables import Column, figure_of, link_name, links_in, step_ms
from benchmark.timeline import BACKWARD, FORWARD, SHARING, WAITING

# Steps over which a loss is averaged.
SMOOTHING = 10
OURS = "tab:orange"
FLOOR = "tab:green"
OTHERS = "tab:gray"
SPANS: dict[str, dict[str, str]] = {
    FORWARD: {"facecolor": "tab:blue"},
    BACKWARD: {"facecolor": "tab:orange"},
    WAITING: {"facecolor": "0.9", "edgecolor": "0.6", "hatch": "////"},
    SHARING: {"facecolor": "tab:purple"},
}


def colour(name: str) -> str:
    """The colour of a synchronisation: ours, the floor, or the rest."""
    return FLOOR if name == NOTHING else OURS if name.startswith("DCT") else OTHERS


def plot_bars(
    file: Path, runs: Sequence[Run], names: Sequence[str], columns: Sequence[Column]
) -> None:
    """Draw bars, the first name on top, with the range over the rounds, side by side for each
    column.
    """
    size = (5 * len(columns), 0.4 * len(names) + 1.5)
    figure, axes = plt.subplots(1, len(columns), figsize=size, sharey=True, squeeze=False)
    for column, axis in zip(columns, axes[0], strict=True):
        for place, name in enumerate(names):
            found = figure_of(runs, name, column.link, column.take)
            if found is None or found.median <= 0:
                continue
            spread = [[found.median - found.low], [found.high - found.median]]
            axis.barh(
                place, found.median, color=colour(name), xerr=spread, error_kw={"linewidth": 1}
            )
            text = f" {found.median:,.0f}" if found.median >= 100 else f" {found.median:.3g}"
            axis.annotate(text, (found.high, place), va="center", fontsize="small")
        axis.set_yticks(range(len(names)), names)
        axis.set_xscale(column.scale)
        axis.margins(x=0.25)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlabel(column.head)
    save(figure, file)


def plot_losses(file: Path, runs: Sequence[Run], scored: Sequence[Run]) -> None:
    """Draw the training loss over time: the losses of the scored runs, at the pace measured on each
    link.
    """
    links = links_in(runs)
    has_links = runs[0].interface_bytes is not None
    figure, axes = plt.subplots(
        1, len(links), figsize=(6 * len(links), 4), sharey=True, squeeze=False
    )
    for link, axis in zip(links, axes[0], strict=True):
        for run in scored:
            pace = figure_of(runs, run.synchronisation, link, step_ms)
            if pace is None:
                continue
            window = min(SMOOTHING, len(run.losses))
            means = [
                sum(run.losses[i : i + window]) / window
                for i in range(len(run.losses) - window + 1)
            ]
            seconds = [(i + window) * pace.median / 1e3 for i in range(len(means))]
            ours = run.synchronisation.startswith("DCT")
            axis.plot(seconds, means, label=run.synchronisation, linestyle="-" if ours else "--")
        axis.set_xscale("log")
        axis.set_xlabel(f"seconds, {link_name(link, has_links)}")
    axes[0][0].set_ylabel("training loss, nats a byte, of the ranks' own weights")
    axes[0][-1].legend(fontsize="x-small")
    save(figure, file)


def plot_timelines(file: Path, link: str, runs: Sequence[Run]) -> None:
    """Draw one step of each run, one above the other: the work of each stage, and the numbers of
    its micro-batches.
    """
    figure, axes = plt.subplots(
        len(runs),
        1,
        figsize=(13, 0.8 + 1.4 * len(runs)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for run, axis in zip(runs, axes[:, 0], strict=True):
        for stage, spans in enumerate(run.spans):
            for what, number, began, ended in spans:
                began = 1e3 * began
                ended = 1e3 * ended
                axis.barh(stage, ended - began, 0.8, began, **SPANS[what])
                if number >= 0:
                    axis.text(
                        (began + ended) / 2,
                        stage,
                        number,
                        ha="center",
                        va="center",
                        fontsize="x-small",
                    )
        axis.set_yticks(
            range(len(run.spans)), [f"stage {stage}" for stage in range(len(run.spans))]
        )
        axis.invert_yaxis()
        axis.set_title(f"{run.synchronisation}, {link}", fontsize="medium", loc="left")
    axes[-1, 0].set_xlim(left=0)  # now that all is drawn: it ends the automatic limits of all axes
    axes[-1, 0].set_xlabel("ms since the step began")
    handles = [Patch(label=what, **look) for what, look in SPANS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize="small")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save(figure: Any, file: Path) -> None:
    """Write a figure as PNG and close it."""
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
