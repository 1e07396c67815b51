"""What is drawn: every chart as lines of plain numbers, and which runs have no line in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dct.report.numbers import text_of
from lightning_dct.report.quality import higher_is_better
from lightning_dct.report.run import Run, Series, against, averaged, counted_bytes

Point = tuple[float, float]

MOST_POINTS = 150
"""The most points of a noisy series; more are averaged."""

_LOGARITHMIC_FROM = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True)
class Line:
    """One run in a chart: its index on the page, and points from left to right, where NaN leaves a gap."""

    run: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: Its name in the page's source.
        x_unit: ``steps`` or ``bytes``.
        y_unit: ``number``, for which differences count, or an amount: ``amount``, ``bytes``, ``ratio``, ``share``,
            ``milliseconds``.
        lines: One for each run that has points.
        remarks: Which lines are missing, and why; what was averaged.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    x_unit: str
    y_unit: str
    x_logarithmic: bool
    y_logarithmic: bool
    lines: tuple[Line, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """At least one chart under a heading, with an introduction."""

    title: str
    introduction: str
    charts: tuple[Chart, ...]


def make_sections(runs: Sequence[Run], training_loss: str | None, quality: str | None) -> list[Section]:
    """All charts to which a run contributes, given the logged names of training loss and quality."""
    sections = [
        Section("Loss and quality", _QUALITY_TEXT, _charts(_quality_charts(runs, training_loss, quality))),
        Section("Traffic", _TRAFFIC_TEXT, _charts(_traffic_charts(runs))),
        Section("Data parallelism", _DATA_PARALLELISM_TEXT, _charts(_part_charts(runs, "dp"))),
        Section("Inside the model", _INSIDE_TEXT, _charts(_part_charts(runs, "mp"))),
    ]
    return [section for section in sections if section.charts]


_QUALITY_TEXT = (
    "The same values twice: against optimizer steps, and against the bytes that rank 0 had sent until then. Bytes are"
    " interpolated linearly between two logged steps."
)
_TRAFFIC_TEXT = (
    "Bytes are those of rank 0, since training began. A ratio is bytes of the dense fp32 exchange over bytes sent,"
    " positions, headers and padding included."
)
_DATA_PARALLELISM_TEXT = (
    "The exchange of updates or gradients: the share of entries that is sent, the threshold, and the residual."
)
_INSIDE_TEXT = "The same for traffic inside a split model: activations, embedding rows, and their gradients."


def _charts(charts: Sequence[Chart | None]) -> tuple[Chart, ...]:
    return tuple(chart for chart in charts if chart is not None)


def _quality_charts(runs: Sequence[Run], training_loss: str | None, quality: str | None) -> list[Chart | None]:
    charts: list[Chart | None] = []
    for key, name in (("training", training_loss), ("quality", quality)):
        if name is None:
            continue
        way = {True: ", higher is better", False: ", lower is better", None: ""}[higher_is_better(name)]
        most = MOST_POINTS if key == "training" else None
        found = [run.series.get(name) for run in runs]
        charts.append(over_steps(f"{key}-steps", f"{name} against steps{way}", name, "number", runs, found, most=most))
        charts.append(over_bytes(f"{key}-bytes", f"{name} against bytes sent{way}", name, runs, found, most=most))
    return charts


def _traffic_charts(runs: Sequence[Run]) -> list[Chart | None]:
    sent = [counted_bytes(run.series, "bytes_sent") for run in runs]
    ratio = [run.series.get("dct/compression_ratio") for run in runs]
    overhead = [run.series.get("dct/overhead_ms") for run in runs]
    return [
        over_steps("sent", "Bytes sent until each step", "bytes sent", "bytes", runs, sent),
        over_steps("ratio", "Compression ratio, all traffic", "ratio", "ratio", runs, ratio, most=MOST_POINTS),
        over_steps(
            "overhead", "Time spent compressing", "ms a step", "milliseconds", runs, overhead, most=MOST_POINTS
        ),
    ]  # fmt: skip


def _part_charts(runs: Sequence[Run], part: str) -> list[Chart | None]:
    def chart(name: str, title: str, label: str, unit: str) -> Chart | None:
        found = [run.series.get(f"dct/{part}/{name}") for run in runs]
        return over_steps(f"{part}-{name.replace('_', '-')}", title, label, unit, runs, found, most=MOST_POINTS)

    return [
        chart("compression_ratio", "Compression ratio", "ratio", "ratio"),
        chart("density", "Density: share of entries sent", "density", "share"),
        chart("threshold", "Threshold, median over tensors", "threshold", "amount"),
        chart("residual_norm", "Norm of the residual", "norm", "amount"),
    ]


def over_steps(
    key: str, title: str, y_label: str, y_unit: str, runs: Sequence[Run], found: Sequence[Series | None], *,
    most: int | None = None,
) -> Chart | None:  # fmt: skip
    """A chart of what each run has ``found`` (None: nothing) against steps; lines average to ``most`` points."""
    points = [
        [] if series is None else list(zip(map(float, series.steps), series.values, strict=True)) for series in found
    ]
    missing = [(run.name, "not logged") for run, series in zip(runs, found, strict=True) if series is None]
    return _chart(key, title, "optimizer steps", "steps", y_label, y_unit, runs, points, missing, most)


def over_bytes(
    key: str, title: str, y_label: str, runs: Sequence[Run], found: Sequence[Series | None], *, most: int | None = None
) -> Chart | None:
    """The same against the bytes sent until then; a run whose bytes are not known has no line."""
    points: list[list[Point]] = []
    missing = []
    for run, series in zip(runs, found, strict=True):
        counter = counted_bytes(run.series, "bytes_sent")
        if series is None or counter is None:
            points.append([])
            missing.append((run.name, "not logged" if series is None else "its bytes were not logged"))
            continue
        known = [(count, value) for count, value in against(series, counter) if count > 0]
        points.append(known)
        if not known:
            missing.append(
                (run.name, "no bytes were sent" if not max(counter.values) else "its bytes are not known there")
            )
    return _chart(key, title, "bytes sent by rank 0", "bytes", y_label, "number", runs, points, missing, most)


def _chart(
    key: str, title: str, x_label: str, x_unit: str, y_label: str, y_unit: str, runs: Sequence[Run],
    points: list[list[Point]], missing: list[tuple[str, str]], most: int | None,
) -> Chart | None:  # fmt: skip
    remarks = []
    if most is not None and any(len(line) > most for line in points):
        remarks.append(f"Each point is a mean of neighbours, {most} at most a run.")
        points = [averaged(line, most) for line in points]
    x_logarithmic = x_unit == "bytes" and wants_logarithm([line[-1][0] for line in points if line])
    y_logarithmic = y_unit != "number" and wants_logarithm([y for line in points for _, y in line])
    finite = [[y for _, y in line if math.isfinite(y)] for line in points]
    missing += [
        (run.name, "no finite value") for run, line, ys in zip(runs, points, finite, strict=True) if line and not ys
    ]
    if y_logarithmic:
        for run, ys in zip(runs, finite, strict=True):
            if ys and not any(y > 0 for y in ys):
                missing.append((run.name, "zero throughout, which a logarithmic axis does not have"))
        points = [[(x, y if y > 0 else math.nan) for x, y in line] for line in points]
    lines = tuple(
        Line(index, tuple(line)) for index, line in enumerate(points) if any(math.isfinite(y) for _, y in line)
    )
    if not lines:
        return None
    reasons = dict.fromkeys(reason for _, reason in missing)
    for reason in reasons:
        names = ", ".join(name for name, why in missing if why == reason)
        remarks.append(f"Not shown: {names} ({reason}).")
    return Chart(key, title, x_label, y_label, x_unit, y_unit, x_logarithmic, y_logarithmic, lines, tuple(remarks))


def wants_logarithm(values: Sequence[float]) -> bool:
    """Whether values lie so far apart that only a logarithmic axis shows them all. A negative value forbids one.

    Example:
        >>> wants_logarithm([1.0, 131.0]), wants_logarithm([1.0, 2.0]), wants_logarithm([-1.0, 131.0])
        (True, False, False)
    """
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    return bool(positive) and min(finite) >= 0 and max(positive) >= _LOGARITHMIC_FROM * min(positive)


def describe(chart: Chart, names: Sequence[str]) -> str:
    """A chart in words, for readers who do not see it: where each line begins and ends."""

    def words(point: Point) -> str:
        x, y = point
        at = f"step {x:,.0f}" if chart.x_unit == "steps" else text_of("bytes", x)
        return f"{text_of(chart.y_unit, y)} at {at}"

    parts = []
    for line in chart.lines:
        points = [point for point in line.points if math.isfinite(point[1])]
        last = words(points[-1])
        where = last if len(points) == 1 else f"from {words(points[0])} to {last}"
        parts.append(f"{names[line.run]}: {where}")
    return ". ".join([chart.title, *parts]) + "."
