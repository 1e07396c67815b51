"""One row of figures for each run: what it came to and what it cost. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dct.report.numbers import UNKNOWN, text_of
from lightning_dct.report.quality import higher_is_better, same_on_test, stage_of
from lightning_dct.report.run import Run
from lightning_dct.report.series import best_of, counted_bytes

_BEST = ", best"
_COUNTED = "in steps"


@dataclass(frozen=True)
class Totals:
    """The figures of a run; None where one is not known.

    Attributes:
        steps: Optimizer steps done at the last log.
        final: The last value of the quality metric.
        best: Its best value, and the step of that.
        test: The last value of the same metric on the test part.
        bytes_sent: Until the last time bytes were logged, rank 0, all kinds of traffic.
        bytes_dense: What the dense fp32 exchange would have sent until then.
        inside_sent: The part of ``bytes_sent`` that crossed inside the model.
        inside_dense: The part of ``bytes_dense`` likewise.
        counted_steps: Optimizer steps that these bytes belong to.
        milliseconds_per_step: Median wall time of a training step.
        overhead_ms: Median of the logged time spent compressing, ms a step.
        seconds: Wall time from the start to the last log.
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
    milliseconds_per_step: float | None
    overhead_ms: float | None
    seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Bytes of the dense fp32 exchange over bytes sent; None where nothing was sent."""
        return _ratio(self.bytes_dense, self.bytes_sent)

    @property
    def inside_ratio(self) -> float | None:
        """The same for what crossed inside the model."""
        return _ratio(self.inside_dense, self.inside_sent)


def totals_of(run: Run, quality: str | None, test: str | None) -> Totals:
    """Sum up a run.

    Args:
        run: Any.
        quality: A logged name.
        test: The name of the same metric on the test part.
    """
    measured = run.series.get(quality or "")
    way = higher_is_better(quality or "")
    tested = run.series.get(test or "")
    sent = counted_bytes(run.series, "bytes_sent")
    dense = counted_bytes(run.series, "bytes_dense")
    inside_sent = counted_bytes(run.series, "bytes_sent", ["mp"])
    inside_dense = counted_bytes(run.series, "bytes_dense", ["mp"])
    overhead = run.series.get("dct/overhead_ms")
    finite = [value for value in overhead.values if math.isfinite(value)] if overhead else []
    return Totals(
        steps=steps_done(run),
        final=measured.values[-1] if measured else None,
        best=best_of(measured, way) if measured and way is not None else None,
        test=tested.values[-1] if tested else None,
        bytes_sent=sent.values[-1] if sent else None,
        bytes_dense=dense.values[-1] if dense else None,
        inside_sent=inside_sent.values[-1] if inside_sent else None,
        inside_dense=inside_dense.values[-1] if inside_dense else None,
        counted_steps=sent.steps[-1] + 1 if sent else None,
        milliseconds_per_step=run.milliseconds_per_step,
        overhead_ms=statistics.median(finite) if finite else None,
        seconds=run.seconds,
    )


def steps_done(run: Run) -> int:
    """Optimizer steps done: as ``result.json`` says, else as far as the log tells.

    Steps of training, and validations within it, are logged before the step counts: at 19 when 20 are done. A test, and
    a validation after training, is logged at 20.

    Args:
        run: Any.
    """
    if run.steps is not None:
        return run.steps
    done: dict[str, int] = {}
    for name, series in run.series.items():
        part = "train" if name.startswith("dct/") else stage_of(name)
        done[part] = max(done.get(part, 0), series.steps[-1] + (part == "train"))
    if "train" in done or "test" in done:
        return max(done.values())
    return run.last_step + 1


def totals_table(runs: Sequence[Run], quality: str | None) -> tuple[list[str], list[list[str]]]:
    """The figures of all runs as text; a column of which no run knows anything is left out.

    Args:
        runs: All that stand on the page.
        quality: A logged name.

    Returns:
        The heads of the columns, and for each run as many cells.
    """
    test = same_on_test(quality, runs) if quality else None
    all_totals = [totals_of(run, quality, test) for run in runs]
    rows = [_cells(totals, quality or "quality", test or "test") for totals in all_totals]
    heads = [head for head in rows[0] if any(row[head] != UNKNOWN for row in rows)]
    # What says the same as the column before it in every row is left out.
    if all(totals.best is None or totals.best[1] == totals.final for totals in all_totals):
        heads = [head for head in heads if not head.endswith(_BEST)]
    if all(totals.counted_steps in (None, totals.steps) for totals in all_totals):
        heads = [head for head in heads if head != _COUNTED]
    return heads, [[row[head] for head in heads] for row in rows]


def _cells(totals: Totals, quality: str, test: str) -> dict[str, str]:
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
        "ms a step": text_of("milliseconds", totals.milliseconds_per_step),
        "ms compressing": text_of("milliseconds", totals.overhead_ms),
        "time": text_of("seconds", totals.seconds),
    }


def _ratio(dense: float | None, sent: float | None) -> float | None:
    return dense / sent if dense is not None and sent else None
