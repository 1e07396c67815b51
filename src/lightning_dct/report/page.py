"""The page: figures, tables and charts of all runs in one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from lightning_dct.__about__ import __version__
from lightning_dct.report.charts import Section, make_sections
from lightning_dct.report.figures import COLOURS, DASHES, draw
from lightning_dct.report.numbers import UNKNOWN
from lightning_dct.report.quality import find_training_loss
from lightning_dct.report.reading import Reading
from lightning_dct.report.run import Run
from lightning_dct.report.settings import differing
from lightning_dct.report.totals import totals_table

_DOCTYPE = b"<!doctype html"

_TOTALS_TEXT = (
    "Bytes are those of rank 0, until the last time they were logged. A ratio is dense fp32 bytes over bytes sent,"
    " whatever the dtype of training. Milliseconds are medians. What was not logged is a dash."
)


def make_page(reading: Reading, quality: str | None, title: str) -> str:
    """The HTML of at least one run, where ``quality`` is the logged name of the quality metric."""
    runs = reading.runs
    sections = make_sections(runs, find_training_loss(runs), quality)
    heads, rows = totals_table(runs, quality)
    return Template(_resource("page.html")).substitute(
        title=escape(title),
        style=_resource("page.css"),
        run_styles="\n".join(
            f"body:has(#show-{index}:not(:checked)) g.run-{index} {{ display: none; }}" for index in range(len(runs))
        ),
        summary=_summary(reading, quality),
        problems=_problems(reading.problems),
        totals_text=_TOTALS_TEXT,
        totals=_table("numbers", "Totals", "run", heads, [(_named(runs, i), row) for i, row in enumerate(rows)]),
        notes=_notes(runs),
        key="\n".join(
            f'<label><input type="checkbox" id="show-{index}" checked> {_named(runs, index)}</label>'
            for index in range(len(runs))
        ),
        sections="\n".join(_section(section, [run.name for run in runs]) for section in sections),
        settings=_settings(runs),
        footer=_footer(runs),
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


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _summary(reading: Reading, quality: str | None) -> str:
    count = len(reading.runs)
    runs = "One run" if count == 1 else f"{count} runs"
    judged = f"quality is <b>{escape(quality)}</b>" if quality else "no metric of a validation or test was logged"
    return f"{runs}; {judged}."


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return (
        '<section class="problems" aria-labelledby="problems">'
        f'<h2 id="problems">Not everything could be read: {count}</h2><ul>{items}</ul></section>'
    )


def _notes(runs: Sequence[Run]) -> str:
    items = "".join(f"<li>{escape(run.name)}: {escape(note)}.</li>" for run in runs for note in run.notes)
    return f'<ul class="quiet">{items}</ul>' if items else ""


def _swatch(index: int) -> str:
    dashes = " ".join(str(length) for length in DASHES[index // COLOURS % len(DASHES)])
    dash_array = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        '<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5"'
        f' style="stroke: var(--run-{index % COLOURS}); stroke-width: 3"{dash_array}/></svg>'
    )


def _named(runs: Sequence[Run], index: int) -> str:
    return f'<span class="run">{_swatch(index)}<span>{_breakable(runs[index].name)}</span></span>'


def _breakable(name: str) -> str:
    """A long name as HTML that may break after separators, not within a word or a number."""
    return re.sub(r"(?<=[/=_,])|(?<=\.)(?!\d)", "<wbr>", escape(name))


def _section(section: Section, names: Sequence[str]) -> str:
    # An even number of charts stands in pairs: the same values against steps and against bytes.
    pairs = " pairs" if len(section.charts) % 2 == 0 else ""
    identity = section.title.lower().replace(" ", "-")
    charts = "\n".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{draw(chart, names)}"
        + "".join(f'<p class="remarks">{escape(remark)}</p>' for remark in chart.remarks)
        + "</figure>"
        for chart in section.charts
    )
    return (
        f'<section aria-labelledby="{identity}"><h2 id="{identity}">{escape(section.title)}</h2>'
        f'<p class="quiet">{escape(section.introduction)}</p><div class="charts{pairs}">\n{charts}\n</div></section>'
    )


def _settings(runs: Sequence[Run]) -> str:
    differ, same = differing([run.settings for run in runs])
    without = [run.name for run in runs if not run.settings]
    parts = []
    if without:
        parts.append(f"<p>No settings were found for: {escape(', '.join(without))}.</p>")
    if differ:
        parts.append("<h3>What differs between the runs</h3>")
        heads = [run.name for run in runs]
        cells = [(_breakable(name), [run.settings.get(name, UNKNOWN) for run in runs]) for name in differ]
        parts.append(_table("settings", "Settings that differ", "setting", heads, cells))
    elif len(runs) > 1 and same:
        parts.append("<p>All that are known are the same in all runs.</p>")
    if same:
        value = {name: next(run.settings[name] for run in runs if name in run.settings) for name in same}
        table = _table(
            "settings", "Settings that are the same", "setting", ["value"], [(_breakable(n), [value[n]]) for n in same]
        )
        heading = f"{len(same)} settings that are the same" if len(runs) > 1 else f"{len(same)} settings"
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


def _footer(runs: Sequence[Run]) -> str:
    items = "".join(f"<li>{escape(run.name)}: {escape(run.kind)}, {escape(str(run.source))}</li>" for run in runs)
    return f"<p>Read from</p><ul>{items}</ul><p>Made by lightning-dct {escape(__version__)}.</p>"
