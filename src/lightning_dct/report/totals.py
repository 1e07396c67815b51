"""One row of figures for each run: its quality and its cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dct.report.numbers import UNKNOWN, text_of
from lightning_dct.report.quality import higher_is_better, same_on_test, stage_of
from lightning_dct.report.run import Run, Series, best_of, counted_bytes

_BEST = ", best"
_COUNTED = "in steps"


@dataclass(frozen=True)
class Totals:
    """The figures of a run; None if one is not known.

    Attributes:
        steps: Optimizer steps done.
        final: The last value of the quality metric.
        best: The step and value of its best.
        test: The last value of the same metric on the test part.
        bytes_sent: All traffic of rank 0 until bytes were last logged.
        bytes_dense: The bytes of the dense fp32 exchange until then.
        inside_sent: The part of ``bytes_sent`` inside the model.
        inside_dense: The part of ``bytes_dense`` inside the model.
        counted_steps: Optimizer steps that these bytes belong to.
        overhead_ms: Median of the logged compression time, ms a step.
    """

    steps: int
    final: float | None
    best: tuple[int, float] | None
    test: float | None
    bytes_sent: float | None
    bytes_dense: float | None
    inside_sent: float | None
    inside_dense: float | None
    counted_steps: int | None
    overhead_ms: float | None

    @property
    def ratio(self) -> float | None:
        """Dense bytes over bytes sent; None if nothing was sent."""
        return _ratio(self.bytes_dense, self.bytes_sent)

    @property
    def inside_ratio(self) -> float | None:
        """The same for the traffic inside the model."""
        return _ratio(self.inside_dense, self.inside_sent)


def totals_of(run: Run, quality: str | None, test: str | None) -> Totals:
    """The figures of a run, given the logged names of its quality metric and of the same metric on the test part."""
    measured = run.series.get(quality or "")
    way = higher_is_better(quality or "")
    sent = counted_bytes(run.series, "bytes_sent")
    overhead = run.series.get("dct/overhead_ms")
    finite = [value for value in overhead.values if math.isfinite(value)] if overhead else []
    return Totals(
        steps=steps_done(run),
        final=_last(measured),
        best=best_of(measured, way) if measured and way is not None else None,
        test=_last(run.series.get(test or "")),
        bytes_sent=_last(sent),
        bytes_dense=_last(counted_bytes(run.series, "bytes_dense")),
        inside_sent=_last(counted_bytes(run.series, "bytes_sent", ["mp"])),
        inside_dense=_last(counted_bytes(run.series, "bytes_dense", ["mp"])),
        counted_steps=sent.steps[-1] + 1 if sent else None,
        overhead_ms=statistics.median(finite) if finite else None,
    )


def _last(series: Series | None) -> float | None:
    return series.values[-1] if series else None


def steps_done(run: Run) -> int:
    """Optimizer steps done, as ``result.json`` says, else as far as the log tells.

    Training steps, and validations within them, are logged before the step counts: at 19 when 20 are done. A test, or a
    validation after training, is logged at 20.
    """
    if run.steps is not None:
        return run.steps
    done: dict[str, int] = {}
    for name, series in run.series.items():
        part = "train" if name.startswith("dct/") else stage_of(name)
        done[part] = max(done.get(part, 0), series.steps[-1] + (part == "train"))
    if "train" in done or "test" in done:
        return max(done.values())
    return max(series.steps[-1] for series in run.series.values()) + 1


def totals_table(runs: Sequence[Run], quality: str | None) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and for each run as many cells; a column without any figure is left out."""
    test = same_on_test(quality, runs) if quality else None
    all_totals = [totals_of(run, quality, test) for run in runs]
    rows = [
        _cells(run, totals, quality or "quality", test or "test") for run, totals in zip(runs, all_totals, strict=True)
    ]
    heads = [head for head in rows[0] if any(row[head] != UNKNOWN for row in rows)]
    # A column that equals the one before it is left out.
    if all(totals.best is None or totals.best[1] == totals.final for totals in all_totals):
        heads = [head for head in heads if not head.endswith(_BEST)]
    if all(totals.counted_steps in (None, totals.steps) for totals in all_totals):
        heads = [head for head in heads if head != _COUNTED]
    return heads, [[row[head] for head in heads] for row in rows]


def _cells(run: Run, totals: Totals, quality: str, test: str) -> dict[str, str]:
    best = totals.best
    return {
        f"{quality}, last": text_of("number", totals.final),
        f"{quality}{_BEST}": UNKNOWN if best is None else f"{text_of('number', best[1])} at {best[0]:,}",
        test: text_of("number", totals.test),
        "steps": text_of("steps", totals.steps),
        "bytes sent": text_of("bytes", totals.bytes_sent),
        "dense fp32 bytes": text_of("bytes", totals.bytes_dense),
        "ratio": "nothing sent" if totals.bytes_sent == 0 else text_of("ratio", totals.ratio),
        _COUNTED: text_of("steps", totals.counted_steps),
        "inside the model: sent": text_of("bytes", totals.inside_sent),
        "ratio there": text_of("ratio", totals.inside_ratio),
        "ms a step": text_of("milliseconds", run.milliseconds_per_step),
        "ms compressing": text_of("milliseconds", totals.overhead_ms),
        "time": text_of("seconds", run.seconds),
    }


def _ratio(dense: float | None, sent: float | None) -> float | None:
    return dense / sent if dense is not None and sent else None
