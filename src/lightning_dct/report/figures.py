"""Charts as SVG for a page: the page decides colours and fonts, so light and dark themes need one drawing only.

matplotlib draws with colours that stand for roles; they become CSS variables. What a page has no use for is removed:
metadata with addresses, the global style, numbered names.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lightning_dct.report.charts import Chart, describe
from lightning_dct.report.numbers import tick_of

COLOURS = 8
"""How many runs have a colour of their own; further ones also have dashes."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""The dashes of lines that repeat a colour, in points: drawn, left out, ..."""

_SIZE = (5.0, 3.0)  # inches; 5 are 360 units, about as wide as a telephone; the style sheet relies on this
_INK, _MUTED, _GRID = "#000001", "#000002", "#000003"
_ROLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _GRID: "var(--grid)"}
_ROLES |= {f"#0001{index:02x}": f"var(--run-{index})" for index in range(COLOURS)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11.0,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
}
_WIDTH, _WIDER = 1.3, 1.1
"""Width of the line on top, and how much wider the lowest is; points."""

_FEW_POINTS = 40
"""A line of up to so many points marks each of them."""


def draw(chart: Chart, names: Sequence[str]) -> str:
    """Draw a chart as an ``<svg>`` element of an HTML page, given the names of all runs."""
    # Its warnings about fonts do not concern text that stays text.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.key}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for place, line in enumerate(chart.lines):
            few = len(line.points) <= _FEW_POINTS
            axes.plot(
                [x for x, _ in line.points],
                [y for _, y in line.points],
                color=f"#0001{line.run % COLOURS:02x}",
                linestyle=(0, DASHES[line.run // COLOURS % len(DASHES)] or None),
                # If lines coincide, the lower one is seen at the edges.
                linewidth=_WIDTH + _WIDER * (len(chart.lines) - 1 - place) / len(chart.lines),
                marker="o" if few else None,
                markersize=3,
                gid=f"run-{line.run}",
            )
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.grid(True)
        axes.set_axisbelow(True)
        _set_axis(axes, "x", chart.x_logarithmic, chart.x_unit)
        _set_axis(axes, "y", chart.y_logarithmic, chart.y_unit)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return for_page(file.getvalue(), chart, names)


def _set_axis(axes: Axes, which: str, logarithmic: bool, unit: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if logarithmic:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=unit == "steps"))
        if unit != "number":
            # Amounts start at zero; a line that does not change must not look as if it did.
            high = axis.get_data_interval()[1]
            (axes.set_xlim if which == "x" else axes.set_ylim)(0, 1.05 * high if high > 0 else 1)
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_of(unit, value)))


def for_page(svg: str, chart: Chart, names: Sequence[str]) -> str:
    """Make an element of matplotlib's SVG document: no addresses, unique names, and a description in words."""
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    used = set(
        re.findall(r"#([\w-]+)", " ".join(value for element in root.iter() for value in element.attrib.values()))
    )
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(name): value for name, value in element.attrib.items()}
        name = element.attrib.pop("id", "")
        if name in used:
            element.set("id", f"{chart.key}-{name}")
        if run := re.fullmatch(r"run-(\d+)", name):
            element.set("class", name)
            title = ElementTree.Element("title")
            title.text = names[int(run[1])]
            element.insert(0, title)
        for key, value in element.attrib.items():
            element.set(key, _in_page(value, key, chart.key, used))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", describe(chart, names))
    return ElementTree.tostring(root, encoding="unicode")


def _in_page(value: str, attribute: str, key: str, used: set[str]) -> str:
    if attribute == "style":
        # The page's font, in the size of the drawing.
        value = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", value)
        return re.sub("|".join(_ROLES), lambda colour: _ROLES[colour[0]], value) if "#" in value else value
    return re.sub(r"#([\w-]+)", lambda name: f"#{key}-{name[1]}" if name[1] in used else name[0], value)


def _local(name: str) -> str:
    return name.rpartition("}")[2]
