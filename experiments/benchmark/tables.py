"""The benchmarks' tables: figures over the rounds of runs as text, printed and written as
Markdown.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark.job import Run
from comparison.table import markdown
from network.hosts import Link, give_to_invoking_user

BUSY_LOAD = 0.5
Take = Callable[[Run, Mapping[str, Run]], float | None]
"""A figure of a run, given also all runs of its link and round by name; None if the run has no such
figure.
"""


@dataclass(frozen=True)
class Figure:
    """One figure over the rounds: its median, and the smallest and the largest value."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Figure | None:
        """Over these values; None when there is none."""
        found = sorted(values)
        return Figure(statistics.median(found), found[0], found[-1]) if found else None

    def text(self, pattern: str, has_range: bool = False) -> str:
        """The median, and the range if it is wanted and there is one."""
        low = pattern.format(self.low)
        high = pattern.format(self.high)
        return pattern.format(self.median) + (
            f" ({low}-{high})" if has_range and low != high else ""
        )


def figure_of(runs: Sequence[Run], name: str, link: Link, take: Take) -> Figure | None:
    """A figure of one synchronisation on one link.

    ``take`` compares runs of one round: what slows the machine down for a while slows all of them.
    """
    here = [run for run in runs if run.link == link]
    rounds: dict[int, dict[str, Run]] = {}
    for run in here:
        rounds.setdefault(run.round, {})[run.synchronisation] = run
    values = [take(run, rounds[run.round]) for run in here if run.synchronisation == name]
    return Figure.of(value for value in values if value is not None)


def step_ms(run: Run, others: Mapping[str, Run]) -> float:
    """Milliseconds a step."""
    return run.step_ms


def times(reference: str) -> Take:
    """The step over that of another synchronisation."""
    return lambda run, others: (
        run.step_ms / others[reference].step_ms if reference in others else None
    )


def faster_than(reference: str) -> Take:
    """The step of another synchronisation over this one."""
    return lambda run, others: (
        others[reference].step_ms / run.step_ms if reference in others else None
    )


@dataclass(frozen=True)
class Column:
    """A column of a table, or an axis of a plot: a figure on one link."""

    head: str
    take: Take
    pattern: str
    link: Link
    has_range: bool = False
    scale: str = "linear"


def columns_by_link(
    runs: Sequence[Run], *compared: tuple[str, Take, str], has_range: bool = True
) -> list[Column]:
    """For each link the milliseconds a step, and what is compared with others: its head, the figure
    and a pattern.

    ``has_range`` is for these.
    """
    columns = []
    has_links = runs[0].interface_bytes is not None
    for link in links_in(runs):
        columns.append(
            Column(
                f"ms a step, {link_name(link, has_links)}", step_ms, "{:.0f}", link, has_range=True
            )
        )
        columns += [
            Column(head, take, pattern, link, has_range) for head, take, pattern in compared
        ]
    return columns


def tabulate(
    head: str, runs: Sequence[Run], names: Sequence[str], columns: Sequence[Column]
) -> list[list[str]]:
    """The heads of the columns, ``head`` that of the names, and a row of cells for each name."""
    rows = [[head, *(column.head for column in columns)]]
    for name in names:
        figures = [figure_of(runs, name, column.link, column.take) for column in columns]
        cells = [
            "-" if figure is None else figure.text(column.pattern, column.has_range)
            for figure, column in zip(figures, columns, strict=True)
        ]
        rows.append([name, *cells])
    return rows


def links_in(runs: Sequence[Run]) -> list[Link]:
    """The links that occur, in their order."""
    return list(dict.fromkeys(run.link for run in runs))


def link_name(link: Link, has_links: bool = True) -> str:
    """The name of a link in tables.

    Example:
        >>> link_name(Link(1000)), link_name(Link(2.5, 50)), link_name(Link(), has_links=False)
        ('1 Gbit/s', '2.5 Mbit/s, 50 ms', 'loopback')
    """
    if not has_links:
        return "loopback"
    rate, delay = link
    name = (
        "no limit"
        if rate is None
        else f"{rate / 1000:g} Gbit/s"
        if rate >= 1000
        else f"{rate:g} Mbit/s"
    )
    return f"{name}, {delay:g} ms" if delay else name


def describe_machine() -> dict[str, Any]:
    """Processor, number of cores, versions, and how many processes have wanted a core in the last
    minute.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0],
    }


def publish(
    file: Path,
    title: str,
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    machine: Mapping[str, Any],
    **measured: Any,
) -> None:
    """Print a table with notes below it, and write it as Markdown, and everything that was measured
    as JSON beside it.

    The first row holds the heads. Under sudo, the folder and its files become the user's own.
    """
    notes = list(notes)
    if (load := machine["load"]) >= BUSY_LOAD:
        notes.append(
            f"The machine was busy when this began (load {load:.1f}): do not rely on times; bytes"
            " and losses hold."
        )
    text = f"**{title}**\n\n{markdown(rows, notes)}"
    print(text, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "notes": notes, **measured}, indent=1) + "\n"
    )
    for path in (file.parent, *file.parent.iterdir()):
        give_to_invoking_user(path)
