"""The benchmark's figures as plots; matplotlib draws them without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmark.results import Figure, Run, names_in, summarise
from benchmark.synchronisations import NOTHING
from benchmark.tables import link_name
from benchmark.timeline import BACKWARD, FORWARD, SHARING, WAITING

# Steps over which a loss is averaged.
SMOOTHING = 10
OURS, FLOOR, OTHERS = "tab:orange", "tab:green", "tab:gray"
SPANS: dict[str, dict[str, str]] = {
    FORWARD: {"facecolor": "tab:blue"},
    BACKWARD: {"facecolor": "tab:orange"},
    WAITING: {"facecolor": "0.9", "edgecolor": "0.6", "hatch": "////"},
    SHARING: {"facecolor": "tab:purple"},
}


def colour(name: str) -> str:
    """The colour of a synchronisation: ours, the floor, or the rest."""
    return FLOOR if name == NOTHING else OURS if name.startswith("DCT") else OTHERS


def plot_steps(file: Path, runs: Sequence[Run]) -> None:
    """Draw bars: the time of a step on each kind of link, and the bytes of a step."""
    links = list(dict.fromkeys(run.megabits for run in runs))
    names = names_in(runs)
    has_links = runs[0].interface_bytes is not None
    figure, axes = plt.subplots(1, len(links) + 1, figsize=(5 * (len(links) + 1), 0.4 * len(names) + 1.5), sharey=True)
    for link, axis in zip(links, axes, strict=False):
        summaries = [summarise([run for run in runs if run.megabits == link], name) for name in names]
        draw_bars(axis, names, [summary.step_ms for summary in summaries])
        axis.set_xlabel(f"ms a step, {link_name(link, has_links)}")
    first = [run for run in runs if run.megabits == links[0]]
    sent = {name: [run.sent_bytes / 1e3 for run in first if run.synchronisation == name] for name in names}
    draw_bars(axes[-1], names, [Figure.of(sent[name]) for name in names], scale="log")
    axes[-1].set_xlabel("kB a step and host, at the interface" if has_links else "kB a step, counted")
    save(figure, file)


def plot_losses(file: Path, runs: Sequence[Run], scored: Sequence[Run]) -> None:
    """Draw the training loss over time: the losses of the scored runs, at the pace measured on each kind of link."""
    links = list(dict.fromkeys(run.megabits for run in runs))
    has_links = runs[0].interface_bytes is not None
    by_name = {run.synchronisation: run for run in scored}
    figure, axes = plt.subplots(1, len(links), figsize=(6 * len(links), 4), sharey=True, squeeze=False)
    for link, axis in zip(links, axes[0], strict=True):
        for run in (by_name[name] for name in names_in(scored)):
            pace = summarise([other for other in runs if other.megabits == link], run.synchronisation).step_ms
            if pace is None:
                continue
            window = min(SMOOTHING, len(run.losses))
            means = [sum(run.losses[i : i + window]) / window for i in range(len(run.losses) - window + 1)]
            seconds = [(i + window) * pace.median / 1e3 for i in range(len(means))]
            ours = run.synchronisation.startswith("DCT")
            axis.plot(seconds, means, label=run.synchronisation, linestyle="-" if ours else "--")
        axis.set_xscale("log")
        axis.set_xlabel(f"seconds, {link_name(link, has_links)}")
    axes[0][0].set_ylabel("training loss, nats a byte")
    axes[0][-1].legend(fontsize="x-small")
    save(figure, file)


def draw_bars(axis: Any, names: Sequence[str], figures: Sequence[Figure | None], scale: str = "linear") -> None:
    """Draw horizontal bars, the first on top, with the range over the rounds."""
    for place, (name, found) in enumerate(zip(names, figures, strict=True)):
        if found is None or found.median <= 0:
            continue
        spread = [[found.median - found.low], [found.high - found.median]]
        axis.barh(place, found.median, color=colour(name), xerr=spread, error_kw={"linewidth": 1})
        figure = f"{found.median:,.0f}" if found.median >= 100 else f"{found.median:.3g}"
        axis.annotate(f" {figure}", (found.high, place), va="center", fontsize="small")
    axis.set_yticks(range(len(names)), names)
    axis.set_xscale(scale)
    axis.margins(x=0.25)
    axis.set_ylim(len(names) - 0.5, -0.5)


def plot_timelines(file: Path, link: str, runs: Sequence[Run]) -> None:
    """Draw one step of each run, one above the other: what each stage does, micro-batches by their numbers."""
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(13, 0.8 + 1.4 * len(runs)), sharex=True, squeeze=False, layout="constrained"
    )
    for run, axis in zip(runs, axes[:, 0], strict=True):
        for stage, spans in enumerate(run.spans):
            for what, number, began, ended in spans:
                began, ended = 1e3 * began, 1e3 * ended
                axis.barh(stage, ended - began, 0.8, began, **SPANS[what])
                if number >= 0:
                    axis.text((began + ended) / 2, stage, number, ha="center", va="center", fontsize="x-small")
        axis.set_yticks(range(len(run.spans)), [f"stage {stage}" for stage in range(len(run.spans))])
        axis.invert_yaxis()
        axis.set_title(f"{run.synchronisation}, {link}", fontsize="medium", loc="left")
    axes[-1, 0].set_xlim(left=0)  # now that all is drawn: it ends the automatic limits of all axes
    axes[-1, 0].set_xlabel("ms since the step began")
    handles = [Patch(label=what, **look) for what, look in SPANS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize="small")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save(figure: Any, file: Path) -> None:
    """Write a figure as PNG and let go of it."""
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
