"""The benchmark's tables: rows of text from figures, printed and written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmark.results import Figure, Run, names_in, summarise
from benchmark.synchronisations import NOTHING
from comparison.table import markdown


def link_name(megabits: float | None, has_links: bool = True) -> str:
    """What a kind of link is called.

    Example:
        >>> link_name(1000), link_name(2.5), link_name(None, has_links=False)
        ('1 Gbit/s', '2.5 Mbit/s', 'loopback')
    """
    if not has_links:
        return "loopback"
    if megabits is None:
        return "no limit"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits:g} Mbit/s"


def tabulate_steps(runs: Sequence[Run], scored: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Lay the benchmark of steps out as a table.

    Args:
        runs: The measured runs, on all kinds of links.
        scored: The runs that ended in a loss on held-out text.

    Returns:
        The heads of the columns, and the rows.
    """
    links = list(dict.fromkeys(run.megabits for run in runs))
    scores = {run.synchronisation: run.score for run in scored}
    has_links = runs[0].interface_bytes is not None
    heads = ["synchronisation"]
    for link in links:
        heads += [f"ms a step, {link_name(link, has_links)}", "times none", "faster than DDP"]
    heads += ["kB a step", "off by", "fewer than DDP", "ms compressing"]
    if scored:
        heads.append("loss")
    rows = []
    for name in names_in(runs):
        cells = [name]
        for link in links:
            here = summarise([run for run in runs if run.megabits == link], name)
            cells += [
                with_range(here.step_ms, "{:.0f}"),
                _median(here.against_nothing, "{:.2f}x"),
                _median(here.faster_than_ddp, "{:.1f}x"),
            ]
        everywhere = summarise([run for run in runs if run.megabits == links[0]], name)
        cells += [
            _median(everywhere.sent_bytes, "{:,.1f}", 1e-3),
            _median(everywhere.off_by, "{:+.1%}"),
            _median(everywhere.fewer_than_ddp, "{:,.1f}x"),
            "-" if name == NOTHING else _median(everywhere.compressing_ms, "{:.1f}"),
        ]
        if scored:
            score = scores.get(name)
            cells.append("-" if score is None else f"{score:.3f}")
        rows.append(cells)
    return heads, rows


def publish(file: Path, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Print a table with notes below it, and write it as Markdown."""
    text = f"**{title}**\n\n{markdown([heads, *rows], notes)}"
    print(text, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _median(figure: Figure | None, pattern: str, factor: float = 1.0) -> str:
    return "-" if figure is None else pattern.format(factor * figure.median)


def with_range(figure: Figure | None, pattern: str) -> str:
    """The median, and the range where there is one."""
    if figure is None:
        return "-"
    low, high = pattern.format(figure.low), pattern.format(figure.high)
    return pattern.format(figure.median) + (f" ({low}-{high})" if low != high else "")
