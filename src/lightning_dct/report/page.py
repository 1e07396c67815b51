"""The page: figures, tables and charts of all runs in one self-contained HTML file."""

import math
import re
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2  # torch depends on it
from markupsafe import Markup, escape

from lightning_dct.__about__ import __version__
from lightning_dct.report.charts import COLOURS, DASHES, make_sections
from lightning_dct.report.find_runs import Reading
from lightning_dct.report.quality import find_training_loss, higher_is_better, words_of
from lightning_dct.report.run import Run, Series
from lightning_dct.tables import format_bytes

UNKNOWN = "-"
"""The text of a figure that is not known."""
DENSE = ("ddp", "DDPStrategy")
"""Names of plain DDP as a strategy."""
Table = tuple[list[str], list[list[str]]]
"""The heads of the columns, and the cells of each row."""


def make_page(reading: Reading, quality: str | None, title: str) -> str:
    """The HTML of at least one run, where ``quality`` is the logged name of the quality metric."""
    runs = reading.runs
    baseline = baseline_of(runs)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["breakable"] = _breakable
    return environment.from_string(_resource("page.html")).render(
        title=title,
        style=_resource("page.css"),
        runs=runs,
        quality=quality,
        problems=reading.problems,
        tables=tables_of(runs, baseline, quality or "quality"),
        baseline=baseline.name if len(runs) > 1 else None,
        sections=make_sections(runs, find_training_loss(run.series for run in runs), quality),
        settings=_settings(runs),
        colours=COLOURS,
        dashes=DASHES,
        version=__version__,
    )


def write_page(file: Path, page: str) -> None:
    """Write the complete page or nothing; make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.part")
    # Names of folders may hold bytes that are not UTF-8.
    unfinished.write_text(page, encoding="utf-8", errors="replace")
    unfinished.replace(file)


def baseline_of(runs: Sequence[Run]) -> Run:
    """The first run under plain DDP; without any, the first."""
    return next((run for run in runs if run.strategy in DENSE), runs[0])


def tables_of(runs: Sequence[Run], baseline: Run, quality: str) -> dict[str, Table]:
    """Quality, bytes and time of each run beside those of the baseline, and what else is known of each."""
    return {
        "Comparison": _without_empty([_compared(run, baseline, quality, len(runs) > 1) for run in runs]),
        "Totals": _without_empty([_totals(run, quality) for run in runs]),
    }


def _without_empty(rows: list[dict[str, str]]) -> Table:
    """The heads of the columns that have a figure, and the cells of each run."""
    heads = [head for head in rows[0] if any(row[head] != UNKNOWN for row in rows)]
    return heads, [[row[head] for head in heads] for row in rows]


def _compared(run: Run, baseline: Run, quality: str, several: bool) -> dict[str, str]:
    own, its, higher = (*(_last(one.series.get(quality)) for one in (run, baseline)), higher_is_better(quality))
    against, needed = UNKNOWN, None
    if several and own is not None and its is not None:
        # A share of what starts at zero, such as a loss; a difference of what has a scale, such as an AUC.
        against = f"{100 * (own / its - 1):+.1f}%" if higher is False and its > 0 else f"{own - its:+.4f}"
        against = "the baseline" if run is baseline else against
        needed = None if higher is None else run.seconds_to(quality, its, higher)
    sent, dense = (_last(run.counted_bytes(f"bytes_{kind}")) for kind in ("sent", "dense"))
    return {
        "strategy": run.strategy or UNKNOWN,
        "ranks": run.ranks or UNKNOWN,
        f"{quality}, last": _number(own),
        f"against {baseline.name}": against,
        "bytes sent": _size(sent),
        "ratio": _ratio(dense, sent),
        "ms a step": _number(run.milliseconds),
        f"time to the {quality} of {baseline.name}, min:s": _minutes(needed),
    }


def _totals(run: Run, quality: str) -> dict[str, str]:
    measured = {step: value for step, value in run.series.get(quality, {}).items() if math.isfinite(value)}
    way, best = higher_is_better(quality), UNKNOWN
    if measured and way is not None:
        step = (max if way else min)(measured, key=measured.__getitem__)
        best = f"{_number(measured[step])} at {step:,}"
    test = next((name for name in run.series if words_of(name) == ["test", *words_of(quality)[1:]]), "")
    compressing = [value for value in run.series.get("dct/overhead_ms", {}).values() if math.isfinite(value)]
    inside_sent, inside_dense = (_last(run.counted_bytes(f"bytes_{kind}", ("mp",))) for kind in ("sent", "dense"))
    return {
        f"{quality}, best": best,
        "the same on test": UNKNOWN if test == quality else _number(_last(run.series.get(test))),
        "steps": f"{run.steps_done:,}",
        "dense fp32 bytes": _size(_last(run.counted_bytes("bytes_dense"))),
        "inside the model: sent": _size(inside_sent),
        "ratio there": _ratio(inside_dense, inside_sent),
        "ms compressing, median": _number(statistics.median(compressing) if compressing else None),
        "time, min:s": _minutes(_last(run.counted_seconds) if run.seconds is None else run.seconds),
    }


def _last(series: Series | None) -> float | None:
    return None if series is None else [*series.values()][-1]


def _ratio(dense: float | None, sent: float | None) -> str:
    return UNKNOWN if dense is None or sent is None else f"{dense / sent:,.1f}x" if sent else "nothing sent"


def _size(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def _minutes(seconds: float | None) -> str:
    return UNKNOWN if seconds is None or not math.isfinite(seconds) else "{}:{:02d}".format(*divmod(round(seconds), 60))


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}" if not abs(value) >= 1000 else f"{value:,.0f}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _breakable(name: str) -> Markup:
    """A long name as HTML that may break after separators, not within a word or a number."""
    return Markup(re.sub(r"(?<=[/=_,])|(?<=\.)(?!\d)", "<wbr>", str(escape(name))))


def _settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Rows of the settings that are different and of those that are the same, and the runs that have none."""
    known = [run.settings for run in runs if run.settings]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    different = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    return {
        "missing": [run.name for run in runs if not run.settings],
        "different": [(_breakable(name), [run.settings.get(name, UNKNOWN) for run in runs]) for name in different],
        "same": [(_breakable(name), [known[0][name]]) for name in names if name not in set(different)],
    }
