"""The charts of a report, drawn by matplotlib as SVG elements of the page.

The page's style sheet sets colours and fonts, so one drawing serves light and dark themes: matplotlib draws with
placeholder colours, which become CSS variables.
"""

import io
import logging
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
)

from lightning_dct.report.quality import higher_is_better
from lightning_dct.report.run import Run, Series, counter_at

MOST_POINTS = 150
"""The most points of a line; more are averaged."""
LARGEST = 1e300
"""The largest magnitude of a value in a line; from about 1e308 on the length of an axis is infinite."""
COLOURS = 8
"""How many runs have a colour of their own; further ones also have dashes."""
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""The dashes of lines that repeat a colour, in points: drawn, left out, ..."""

_LOGARITHMIC_FROM = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_SIZE = (5.0, 3.0)  # inches; 5 are 360 units, about as wide as a telephone; the style sheet relies on this
_INK, _MUTED, _GRID = "#000001", "#000002", "#000003"
_ROLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _GRID: "var(--grid)"}
_ROLES |= {f"#0001{index:02x}": f"var(--run-{index})" for index in range(COLOURS)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11.0,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
}
_TICKS: dict[str, Any] = {
    "bytes": EngFormatter("B"),
    "ratio": "{x:,g}x",
    "share": FuncFormatter(lambda share, _: f"{100 * share:.4g}%"),
    "steps": "{x:,.0f}",
}
Line = tuple[np.ndarray, np.ndarray]
"""Horizontal and vertical values of a line; NaN leaves a gap."""


def make_sections(runs: Sequence[Run], training_loss: str | None, quality: str | None) -> dict[str, list[str]]:
    """All charts to which a run contributes, as HTML, by the title of their section.

    ``training_loss`` and ``quality`` are logged names.
    """

    def found(name: str) -> list[Series | None]:
        return [run.series.get(name) for run in runs]

    sections: dict[str, list[str]] = {"Loss and quality": []}
    sent = [run.counted_bytes("bytes_sent") for run in runs]
    for name in (training_loss, quality):
        if name is not None:
            way = {True: ", higher is better", False: ", lower is better", None: ""}[higher_is_better(name)]
            sections["Loss and quality"] += [
                chart(f"{name} against steps{way}", name, "number", runs, found(name)),
                chart(f"{name} against bytes sent{way}", name, "number", runs, found(name), sent),
            ]
    sections["Traffic"] = [
        chart("Bytes sent until each step", "bytes sent", "bytes", runs, sent),
        chart("Compression ratio, all traffic", "ratio", "ratio", runs, found("dct/compression_ratio")),
        chart("Time spent compressing", "ms a step", "amount", runs, found("dct/overhead_ms")),
    ]
    for part, title in (("dp", "Data parallelism"), ("mp", "Inside the model")):
        sections[title] = [
            chart(f"{title}: {words}", name.replace("_", " "), unit, runs, found(f"dct/{part}/{name}"))
            for name, unit, words in (
                ("compression_ratio", "ratio", "compression ratio"),
                ("density", "share", "share of entries sent"),
                ("threshold", "amount", "threshold, median over tensors"),
                ("residual_norm", "amount", "norm of the residual"),
            )
        ]
    return {title: charts for title, drawn in sections.items() if (charts := [one for one in drawn if one])}


def chart(
    title: str, y_label: str, unit: str, runs: Sequence[Run], found: Sequence[Series | None],
    counters: Sequence[Series | None] | None = None,
) -> str:  # fmt: skip
    """A chart as a ``<figure>``, of the logged series of each run; empty if no run has a finite value.

    ``unit`` is that of the vertical axis: ``number``, or an amount, which starts at zero: ``amount``, ``bytes``,
    ``ratio``, ``share``. The horizontal axis has steps, or the bytes sent of each run if these are given.
    """
    lines = lines_of(found, counters)
    if not lines:
        return ""
    remarks = []
    if missing := [run.name for index, run in enumerate(runs) if index not in lines]:
        remarks.append(
            f"Not shown: {', '.join(missing)} (not logged{' with bytes' if counters else ''}, or not finite)."
        )
    if any(series is not None and len(series) > MOST_POINTS for series in found):
        remarks.append(f"Each point is a mean of neighbours, {MOST_POINTS} at most a run.")
    drawing = draw(title, y_label, unit, lines, "bytes" if counters else "steps")
    notes = "".join(f'<p class="remarks">{escape(remark)}</p>' for remark in remarks)
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}{notes}</figure>"


def lines_of(found: Sequence[Series | None], counters: Sequence[Series | None] | None = None) -> dict[int, Line]:
    """The line of each run that has one, by its index; see :func:`chart`."""
    lines = {}
    for index, series in enumerate(found):
        if series is None or (counters is not None and counters[index] is None):
            continue
        counter = None if counters is None else counters[index]
        across = _drawable([*series] if counter is None else counter_at(counter, [*series]))
        upwards = _drawable([*series.values()])
        known = np.isfinite(across) & (across > 0 if counter is not None else True)
        if not known.any():
            continue
        groups = -(-known.sum() // -(-known.sum() // MOST_POINTS))
        x, y = (np.array([part.mean() for part in np.array_split(v[known], groups)]) for v in (across, upwards))
        if np.isfinite(y).any():
            lines[index] = x, y
    return lines


def _drawable(values: Sequence[float]) -> np.ndarray:
    """Values as an array, with NaN for all that no axis can show."""
    found = np.array(values, dtype=float)
    return np.where(np.abs(found) <= LARGEST, found, np.nan)


def draw(title: str, y_label: str, unit: str, lines: dict[int, Line], x_unit: str) -> str:
    """Draw lines as an ``<svg>`` element of an HTML page."""
    # Text stays text in SVG, so warnings about fonts do not matter.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    key = re.sub(r"\W+", "-", title.lower())
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for place, (run, (x, y)) in enumerate(lines.items()):
            axes.plot(
                x,
                y,
                color=f"#0001{run % COLOURS:02x}",
                linestyle=(0, DASHES[run // COLOURS % len(DASHES)] or None),
                # If lines coincide, the lower one is visible at the edges.
                linewidth=2.4 - 1.1 * place / len(lines),
                marker="o" if len(x) <= 40 else None,
                markersize=3,
                gid=f"run-{run}",
            )
        axes.set_xlabel("bytes sent by rank 0" if x_unit == "bytes" else "optimizer steps")
        axes.set_ylabel(y_label, parse_math=False)
        axes.grid(True)
        _set_axis(axes, "x", x_unit, [x[-1:] for x, _ in lines.values()], x_unit == "bytes")
        _set_axis(axes, "y", unit, [y for _, y in lines.values()], unit != "number")
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = re.sub(r"<style.*?</style>", "", file.getvalue()[file.getvalue().index("<svg") :], flags=re.DOTALL)
    # Unique names, as a page has several charts, and its own font and size.
    svg = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{key}-", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub("|".join(_ROLES), lambda colour: _ROLES[colour[0]], svg)
    # A function, because a title may contain backslashes.
    return re.sub(
        r'<svg.*?(viewBox="[^"]*").*?>', lambda tag: f'<svg {tag[1]} role="img" aria-label="{escape(title)}">', svg,
        count=1, flags=re.DOTALL,
    )  # fmt: skip


def _set_axis(axes: Axes, which: str, unit: str, values: Sequence[np.ndarray], may_be_logarithmic: bool) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if may_be_logarithmic and wants_logarithm(np.concatenate(values)):
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=unit == "steps"))
        if unit != "number":
            # Amounts start at zero, so that a constant line looks constant.
            high = axis.get_data_interval()[1]
            (axes.set_xlim if which == "x" else axes.set_ylim)(0, 1.05 * high if high > 0 else 1)
    ticks = _TICKS.get(unit, "{x:g}")
    axis.set_major_formatter(ticks if isinstance(ticks, Formatter) else StrMethodFormatter(ticks))


def wants_logarithm(values: np.ndarray) -> bool:
    """Whether values are so far apart that only a logarithmic axis shows them all, and none is negative.

    Example:
        >>> wants_logarithm(np.array([1.0, 131.0])), wants_logarithm(np.array([-1.0, 131.0]))
        (True, False)
    """
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return bool(positive.size and finite.min() >= 0 and positive.max() >= _LOGARITHMIC_FROM * positive.min())
