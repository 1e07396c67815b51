"""Reads what ``experiments/train.py`` leaves beside a log: ``result.json``, Hydra's configuration and overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dct.report.folders import RunFiles
from lightning_dct.report.run import Run, Series, UnreadableRun
from lightning_dct.report.settings import load_yaml, read_settings
from lightning_dct.report.wandb_log import to_number

_BYTES = {
    "dct/dp/bytes_sent": "bytes_sent_per_step",
    "dct/dp/bytes_dense": "bytes_dense_per_step",
    "dct/mp/bytes_sent": "split_bytes_per_step",
    "dct/mp/bytes_dense": "split_bytes_dense_per_step",
}
"""The figure of ``result.json`` behind each byte counter, by the name under which ``CompressionMonitor`` logs that."""

_FIGURES = (*_BYTES.values(), "split_ratio", "milliseconds_per_step")


def read_result_run(file: Path) -> Run:
    """Make a run of ``result.json`` alone, as left with ``logger=none``.

    Args:
        file: ``result.json``.

    Raises:
        UnreadableRun: It is no such file, or holds no figures.
    """
    result, problems = _read_result(file)
    if problems:
        raise UnreadableRun(problems[0])
    series = result_series(result)
    if not series:
        raise UnreadableRun(f"{file}: no figures in it")
    notes = ["no log, only result.json: bytes are known at the end, and drawn as even before"]
    if not _holds_all_bytes(result):
        notes = ["no log, only result.json, which does not hold all bytes of a split model: none are shown"]
    return Run(file.parent.name, file, "result.json", series, notes=tuple(notes))


def result_series(result: dict[str, Any]) -> dict[str, Series]:
    """The figures of ``result.json`` as series.

    Args:
        result: Its content.
    """
    last = result["steps"] - 1
    points: dict[str, list[tuple[int, float]]] = {}
    for validation in result.get("validations", []):
        for name, value in validation.items():
            if name != "step" and value is not None:
                points.setdefault(name, []).append((int(validation["step"]) - 1, float(value)))
    for name, value in result["metrics"].items():
        if value is not None:
            points.setdefault(name, []).append((last, float(value)))
    return {name: Series.of(found) for name, found in points.items()} | _bytes_at_the_end(result)


def _bytes_at_the_end(result: dict[str, Any]) -> dict[str, Series]:
    """The byte counters after the last step, by the name they are logged under."""
    if not _holds_all_bytes(result) or not result["steps"]:
        return {}
    # Per-step figures times steps are whole numbers again, but for the rounding of a quotient.
    return {
        name: Series((result["steps"] - 1,), (float(round(per_step * result["steps"])),))
        for name, key in _BYTES.items()
        if (per_step := result.get(key)) is not None
    }


def _holds_all_bytes(result: dict[str, Any]) -> bool:
    """Whether it is known how much would have crossed inside a split model; older files do not say."""
    return result.get("split_ratio") is None or result.get("split_bytes_dense_per_step") is not None


def with_surroundings(run: Run, files: RunFiles) -> Run:
    """Add what lies beside a log: settings, the command line, the time of a step.

    Args:
        run: As its log tells.
        files: Where the rest lies.
    """
    notes, problems = list(run.notes), list(run.problems)
    changes: dict[str, Any] = {}
    if files.config is not None:
        settings, problem = read_settings(files.config)
        problems += problem
        # The model's hyperparameters, which a logger keeps, are part of what Hydra composed.
        changes["settings"] = settings or run.settings
        overrides = files.config.with_name("overrides.yaml")
        if overrides.exists():
            words, problem = load_yaml(overrides)
            problems += problem
            changes["overrides"] = tuple(str(word) for word in words) if isinstance(words, list) else ()
    if files.result is not None:
        result, problem = _read_result(files.result)
        problems += problem
        changes["milliseconds_per_step"] = result.get("milliseconds_per_step")
        if not problem:
            changes["steps"] = result["steps"]
            # A log ends with the last step that is a multiple of the logging interval: result.json knows the end.
            changes["series"] = {**run.series, **_later(run.series, _bytes_at_the_end(result))}
    for unused in files.unused:
        notes.append(f"{unused} lies beside this log and was not read: taken for the same run")
    return replace(run, **changes, notes=tuple(notes), problems=tuple(problems))


def _later(logged: Mapping[str, Series], at_the_end: Mapping[str, Series]) -> dict[str, Series]:
    """Counters with what they stood at after the last step, where a log has ended before."""
    return {
        name: Series(logged[name].steps + end.steps, logged[name].values + end.values) if name in logged else end
        for name, end in at_the_end.items()
        if name not in logged or logged[name].steps[-1] < end.steps[0]
    }


def _read_result(file: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{file}: left out, {error}"]
    if not _is_result(result):
        return {}, [f"{file}: left out, no result of experiments/train.py"]
    return result, []


def _is_result(content: Any) -> bool:
    """Whether a file's content has the names and kinds of values that are read here."""
    if not isinstance(content, dict) or type(content.get("steps")) is not int or content["steps"] < 0:
        return False
    groups = [content.get("metrics"), *_listed(content.get("validations", []))]
    if not all(isinstance(group, dict) for group in groups):
        return False
    if any(type(validation.get("step")) is not int for validation in groups[1:]):
        return False
    figures = [*(value for group in groups for value in group.values()), *map(content.get, _FIGURES)]
    return all(value is None or to_number(value) is not None for value in figures)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
