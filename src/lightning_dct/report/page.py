"""The page: figures, tables and charts of all runs in one self-contained HTML file."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from lightning_dct.__about__ import __version__
from lightning_dct.report.charts import COLOURS, DASHES, make_sections
from lightning_dct.report.quality import find_training_loss, higher_is_better, words_of
from lightning_dct.report.reading import Reading
from lightning_dct.report.run import Run
from lightning_dct.tables import format_bytes

UNKNOWN = "-"
"""The text of a figure that is not known."""
_DOCTYPE = b"<!doctype html"


def make_page(reading: Reading, quality: str | None, title: str) -> str:
    """The HTML of at least one run, where ``quality`` is the logged name of the quality metric."""
    runs = reading.runs
    sections = make_sections(runs, find_training_loss(run.series for run in runs), quality)
    heads, rows = totals_table(runs, quality)
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    judged = f"quality is <b>{escape(quality)}</b>" if quality else "no metric of a validation or test was logged"
    return Template(_resource("page.html")).substitute(
        title=escape(title),
        style=_resource("page.css"),
        run_styles="\n".join(
            f'body:has(#show-{index}:not(:checked)) g[id$="-run-{index}"] {{ display: none; }}'
            for index in range(len(runs))
        ),
        summary=f"{count}; {judged}.",
        problems=_problems(reading.problems),
        totals=_table("numbers", "Totals", "run", heads, [(_named(runs, i), row) for i, row in enumerate(rows)]),
        key="\n".join(
            f'<label><input type="checkbox" id="show-{index}" checked> {_named(runs, index)}</label>'
            for index in range(len(runs))
        ),
        sections="\n".join(_section(title, charts) for title, charts in sections.items()),
        settings=_settings(runs),
        sources="".join(f"<li>{escape(run.name)}: {escape(str(run.source))}</li>" for run in runs),
        version=escape(__version__),
    )


def check_page(file: Path) -> None:
    """Refuse to overwrite anything but a page: a log, a checkpoint, a folder.

    Raises:
        ValueError: Something else is there.
        OSError: The file cannot be read.
    """
    if file.exists():
        if not file.is_file():
            raise ValueError(f"{'a folder' if file.is_dir() else 'no file that can be replaced'}; name a file")
        with file.open("rb") as content:
            if content.read(len(_DOCTYPE)).lower() not in (b"", _DOCTYPE):
                raise ValueError("there already, and no HTML page; it would be lost. Name another file, or remove it")


def write_page(file: Path, page: str) -> None:
    """Write the complete page or nothing; make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.part")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(file)


def totals_table(runs: Sequence[Run], quality: str | None) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and for each run as many cells; a column without any figure is left out."""
    rows = [_totals(run, quality or "quality") for run in runs]
    heads = [head for head in rows[0] if any(row[head] != UNKNOWN for row in rows)]
    return heads, [[row[head] for head in heads] for row in rows]


def _totals(run: Run, quality: str) -> dict[str, str]:
    def last(series: dict[int, float] | None) -> float | None:
        return None if series is None else [*series.values()][-1]

    def ratio(dense: float | None, sent: float | None) -> str:
        return UNKNOWN if dense is None or sent is None else f"{dense / sent:,.1f}x" if sent else "nothing sent"

    def size(num_bytes: float | None) -> str:
        return UNKNOWN if num_bytes is None else format_bytes(num_bytes)

    measured = {step: value for step, value in run.series.get(quality, {}).items() if math.isfinite(value)}
    way, best = higher_is_better(quality), UNKNOWN
    if measured and way is not None:
        step = (max if way else min)(measured, key=measured.__getitem__)
        best = f"{_number(measured[step])} at {step:,}"
    test = next((name for name in run.series if words_of(name) == ["test", *words_of(quality)[1:]]), "")
    compressing = [value for value in run.series.get("dct/overhead_ms", {}).values() if math.isfinite(value)]
    sent, dense, inside_sent, inside_dense = (
        last(run.counted_bytes(f"bytes_{kind}", parts))
        for parts in (("dp", "mp"), ("mp",))
        for kind in ("sent", "dense")
    )
    minutes, seconds = divmod(round(run.seconds or 0), 60)
    return {
        f"{quality}, last": _number(last(run.series.get(quality))),
        f"{quality}, best": best,
        "the same on test": UNKNOWN if test == quality else _number(last(run.series.get(test))),
        "steps": f"{run.steps_done:,}",
        "bytes sent": size(sent),
        "dense fp32 bytes": size(dense),
        "ratio": ratio(dense, sent),
        "inside the model: sent": size(inside_sent),
        "ratio there": ratio(inside_dense, inside_sent),
        "ms compressing": _number(statistics.median(compressing) if compressing else None),
        "time, min:s": UNKNOWN if run.seconds is None else f"{minutes}:{seconds:02d}",
    }


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}" if not abs(value) >= 1000 else f"{value:,.0f}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return (
        '<section class="problems" aria-labelledby="problems">'
        f'<h2 id="problems">Not everything could be read: {count}</h2><ul>{items}</ul></section>'
    )


def _named(runs: Sequence[Run], index: int) -> str:
    """A run's name, with its line as the charts have it."""
    dashes = " ".join(str(length) for length in DASHES[index // COLOURS % len(DASHES)])
    return (
        '<span class="run"><svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        '<line x1="1" y1="5" x2="25" y2="5"'
        f' style="stroke: var(--run-{index % COLOURS}); stroke-width: 3; stroke-dasharray: {dashes or "none"}"/></svg>'
        f"<span>{_breakable(runs[index].name)}</span></span>"
    )


def _breakable(name: str) -> str:
    """A long name as HTML that may break after separators, not within a word or a number."""
    return re.sub(r"(?<=[/=_,])|(?<=\.)(?!\d)", "<wbr>", escape(name))


def _section(title: str, charts: Sequence[str]) -> str:
    # An even number of charts stands in pairs: the same values against steps and against bytes.
    pairs = " pairs" if len(charts) % 2 == 0 else ""
    drawn = "\n".join(charts)
    return f'<section aria-label="{title}"><h2>{title}</h2><div class="charts{pairs}">\n{drawn}\n</div></section>'


def _settings(runs: Sequence[Run]) -> str:
    """First the settings whose values differ or that only some runs have, then the others."""
    known = [run.settings for run in runs if run.settings]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    differ = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    parts = []
    if without := [run.name for run in runs if not run.settings]:
        parts.append(f"<p>No settings were found for: {escape(', '.join(without))}.</p>")
    if differ:
        cells = [(_breakable(name), [run.settings.get(name, UNKNOWN) for run in runs]) for name in differ]
        parts.append("<h3>What differs between the runs</h3>")
        parts.append(_table("settings", "Settings that differ", "setting", [run.name for run in runs], cells))
    if same := [(_breakable(name), [known[0][name]]) for name in names if name not in set(differ)]:
        table = _table("settings", "Settings that are the same", "setting", ["value"], same)
        heading = f"{len(same)} settings{' that are the same' if len(runs) > 1 else ''}"
        parts.append(f"<details{'' if differ else ' open'}><summary>{heading}</summary>{table}</details>")
    return "\n".join(parts)


def _table(kind: str, label: str, first: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table that scrolls in its own box; the first cell of a row is HTML, the others are text."""
    head = "".join(f'<th scope="col">{_breakable(text)}</th>' for text in (first, *heads))
    body = "\n".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
