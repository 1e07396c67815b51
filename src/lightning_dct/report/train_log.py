"""Reads what ``experiments/train.py`` leaves beside a log: ``result.json``, Hydra's configuration and overrides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dct.report.folders import RunFiles
from lightning_dct.report.run import Run, Series, UnreadableRun
from lightning_dct.report.settings import load_yaml, read_settings


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
    if result.get("split_ratio") is not None:
        notes = ["no log, only result.json, which does not hold all bytes of a split model: none are shown"]
    return Run(file.parent.name, file, "result.json", series, notes=tuple(notes))


def result_series(result: dict[str, Any]) -> dict[str, Series]:
    """The figures of ``result.json`` as series.

    Args:
        result: Its content.
    """
    last = int(result["steps"]) - 1
    points: dict[str, list[tuple[int, float]]] = {}
    for validation in result.get("validations", []):
        for name, value in validation.items():
            if name != "step" and value is not None:
                points.setdefault(name, []).append((int(validation["step"]) - 1, float(value)))
    for name, value in result["metrics"].items():
        if value is not None:
            points.setdefault(name, []).append((last, float(value)))
    if result.get("split_ratio") is None:
        # Per-step figures times steps are whole numbers again, but for the rounding of a quotient.
        for key in ("bytes_sent", "bytes_dense"):
            if (per_step := result.get(f"{key}_per_step")) is not None:
                points[f"dct/dp/{key}"] = [(last, float(round(per_step * result["steps"])))]
    return {name: Series.of(found) for name, found in points.items()}


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
            changes["overrides"] = tuple(str(word) for word in words or [])
    if files.result is not None:
        result, problem = _read_result(files.result)
        problems += problem
        changes["milliseconds_per_step"] = result.get("milliseconds_per_step")
    for unused in files.unused:
        notes.append(f"{unused} lies beside this log and was not read: taken for the same run")
    return replace(run, **changes, notes=tuple(notes), problems=tuple(problems))


def _read_result(file: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{file}: left out, {error}"]
    if not isinstance(result, dict) or not {"steps", "metrics"} <= result.keys():
        return {}, [f"{file}: left out, no result of experiments/train.py"]
    return result, []
