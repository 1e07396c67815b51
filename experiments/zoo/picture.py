"""The zoo as a picture: members as rows, the quality that each strategy loses beside the bytes it saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from comparison.figures import result_figure
from zoo.table import ALLOWED, Row, saved

_MARKERS = "oDs^vPX"


def draw(file: Path, rows: Sequence[Row]) -> None:
    """Draw quality lost, in units of what may be lost, and bytes saved, a row for each member.

    Args:
        file: Where it goes.
        rows: Members of which the baseline has a run.
    """
    figure, (loss_axis, byte_axis) = plt.subplots(1, 2, sharey=True, figsize=(10, 1.5 + 0.4 * len(rows)))
    labels = [entry.label for entry in rows[0].entries]
    for place, label in enumerate(labels[1:], start=1):
        marker = _MARKERS[(place - 1) % len(_MARKERS)]
        look = {"color": f"C{place - 1}", "marker": marker, "capsize": 3, "linestyle": "none"}
        shift = 0.6 * (place - len(labels) / 2) / len(labels)
        for number, row in enumerate(rows):
            entry, named = row.entries[place], {"label": label} if number == 0 else {}
            lost, ratio = row.lost(entry), result_figure(entry.runs, saved)
            if lost:
                bound = ALLOWED[row.metric]
                deviation = None if lost.deviation is None else lost.deviation / bound
                loss_axis.errorbar(lost.mean / bound, number + shift, xerr=deviation, **look, **named)
            if ratio:
                byte_axis.errorbar(ratio.mean, number + shift, **look)
    loss_axis.axvline(0, color="black", linewidth=1, label=labels[0])
    loss_axis.axvline(1, color="black", linewidth=1, linestyle="--", label="what may be lost")
    # Even where a run came out many times worse, the others can be told apart.
    loss_axis.set_xscale("symlog", linthresh=2)
    byte_axis.set_xscale("log")
    loss_axis.set_yticks(range(len(rows)), [f"{row.name} ({row.metric})" for row in rows])
    loss_axis.invert_yaxis()
    bounds = ", ".join(f"{bound:g} of {metric}" for metric, bound in ALLOWED.items())
    loss_axis.set_xlabel(f"quality lost, 1 being what may be lost\n({bounds})", fontsize="small")
    byte_axis.set_xlabel("bytes of the dense exchange over bytes sent", fontsize="small")
    loss_axis.xaxis.set_major_formatter("{x:g}")
    for axis in (loss_axis, byte_axis):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=150)
    plt.close(figure)
