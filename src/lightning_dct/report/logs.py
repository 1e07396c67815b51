"""Reads one run from a log: Lightning's ``metrics.csv``, an offline W&B run, or ``result.json`` of the experiments."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dct.report.folders import RunFiles
from lightning_dct.report.run import Run, Series, UnreadableRun
from lightning_dct.report.settings import flattened, load_yaml, read_settings, shown

Points = dict[str, list[tuple[int, float]]]

STEP_COLUMN = "step"
STEP_KEYS = ("trainer/global_step", "_step")
"""The axis of a W&B row: the optimizer step that ``WandbLogger`` adds, else W&B's own count of rows."""

_NO_METRICS = {*STEP_KEYS, "_runtime", "_timestamp"}
_BYTES = {
    "dct/dp/bytes_sent": "bytes_sent_per_step",
    "dct/dp/bytes_dense": "bytes_dense_per_step",
    "dct/mp/bytes_sent": "split_bytes_per_step",
    "dct/mp/bytes_dense": "split_bytes_dense_per_step",
}
"""Each byte counter that ``CompressionMonitor`` logs, and its figure in ``result.json``."""

_FIGURES = (*_BYTES.values(), "split_ratio", "milliseconds_per_step")


def read_run(files: RunFiles) -> Run:
    """Read a run, and what lies beside its log: settings, the command line, the time of a step.

    Raises:
        UnreadableRun: The log holds no values.
        ModuleNotFoundError: It is a W&B log, and W&B is not installed.
    """
    readers = {".wandb": read_wandb_run, ".json": read_result_run}
    run = readers.get(files.log.suffix, read_csv_run)(files.log)
    notes, problems = list(run.notes), list(run.problems)
    changes: dict[str, Any] = {}
    if files.config is not None:
        settings, problem = read_settings(files.config)
        problems += problem
        # Hydra's configuration contains the hyperparameters that a logger keeps.
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
            # A log ends with the last step that is a multiple of the logging interval; result.json knows the end.
            changes["series"] = {**run.series, **_later(run.series, _bytes_at_the_end(result))}
    notes += [f"{unused} lies beside this log and was not read: taken for the same run" for unused in files.unused]
    return replace(run, **changes, notes=tuple(notes), problems=tuple(problems))


def _series(points: Points) -> dict[str, Series]:
    return {name: Series.of(found) for name, found in points.items() if found}


def read_csv_run(file: Path) -> Run:
    """Read ``metrics.csv`` of Lightning's ``CSVLogger``, and ``hparams.yaml`` beside it."""
    series, problems = read_metrics(file)
    settings: dict[str, str] = {}
    if (hparams := file.with_name("hparams.yaml")).exists():
        settings, problem = read_settings(hparams)
        problems += problem
    return Run(file.parent.name, file, "CSV log", series, settings, problems=tuple(problems))


def read_metrics(file: Path) -> tuple[dict[str, Series], list[str]]:
    """Read all columns of ``metrics.csv``; what cannot be read is left out and counted.

    Returns:
        The series by name, and a sentence for each kind of thing that was left out.

    Raises:
        UnreadableRun: There is no column of steps, or nothing in the others.
    """
    points: Points = {}
    malformed: list[str] = []
    no_numbers: list[str] = []
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        if STEP_COLUMN not in header:
            raise UnreadableRun(f"{file}: no column '{STEP_COLUMN}' in its first line")
        at = header.index(STEP_COLUMN)
        while True:
            try:
                row = next(reader)
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"{len(row)} fields instead of {len(header)}")
                step = int(float(row[at]))
            except StopIteration:
                break
            except (csv.Error, ValueError, OverflowError) as error:
                malformed.append(f"line {reader.line_num}: {error}")
                continue
            for name, cell in zip(header, row, strict=True):
                if not cell or name == STEP_COLUMN:
                    continue
                try:
                    points.setdefault(name, []).append((step, float(cell)))
                except ValueError:
                    no_numbers.append(f"line {reader.line_num}: {name}='{cell}'")
    series = _series(points)
    if not series:
        raise UnreadableRun(f"{file}: no values in it ({len(malformed)} malformed lines)")
    return series, [
        *_left_out(file, malformed, "malformed line", "malformed lines"),
        *_left_out(file, no_numbers, "value that is no number", "values that are no numbers"),
    ]


def _left_out(file: Path, reasons: list[str], one: str, several: str) -> list[str]:
    if len(reasons) == 1:
        return [f"{file}: 1 {one} left out, {reasons[0]}"]
    return [f"{file}: {len(reasons):,} {several} left out, the first in {reasons[0]}"] if reasons else []


def read_wandb_run(file: Path) -> Run:
    """Read ``run-ID.wandb`` with ``wandb leet inspect``, which prints one JSON record per line."""
    if importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            f"{file}: reading it takes W&B: pip install '.[experiments]' in a clone of lightning_dct"
        )
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
        assert process.stdout is not None
        with process.stdout as lines:
            run = run_of_records(lines, file)
        status = process.wait()
        errors.seek(0)
        messages = [line.partition("wandb leet inspect: ")[2] or line.strip() for line in errors if line.strip()]
    if status or not run.series:
        raise UnreadableRun(f"{file}: {'; '.join([*messages, *run.problems]) or 'nothing was logged'}")
    return replace(run, problems=(*run.problems, *(f"{file}: {message}" for message in messages)))


def run_of_records(lines: Iterable[str], file: Path) -> Run:
    """Make a run of the records that ``wandb leet inspect --json`` prints."""
    points: Points = {}
    config: dict[str, Any] = {}
    name, identity, seconds, malformed = "", "", None, 0
    for line in lines:
        try:
            record = json.loads(line)
            kind = record["type"]
            content = record.get(kind, {})
        except (ValueError, KeyError, TypeError, AttributeError):
            malformed += 1
            continue
        if kind == "run":
            name, identity = content.get("display_name", ""), content.get("run_id", "")
            config |= content.get("config", {}).get("update", {})
        elif kind == "config":
            config |= content.get("update", {})
        elif kind == "history":
            row = content.get("item", {})
            step = next((number for key in STEP_KEYS if (number := to_number(row.get(key))) is not None), None)
            if step is None:
                malformed += 1
                continue
            seconds = to_number(row.get("_runtime")) or seconds
            for key, value in row.items():
                if key not in _NO_METRICS and (number := to_number(value)) is not None:
                    points.setdefault(key, []).append((int(step), number))
    problems = (f"{file}: {malformed:,} malformed records left out",) if malformed else ()
    settings = shown(flattened(config))
    title = name or identity or file.stem
    return Run(title, file, "W&B log", _series(points), settings, seconds=seconds, problems=problems)


def to_number(value: Any) -> float | None:
    """A logged value as a number; None for images, tables and text.

    Example:
        >>> to_number("NaN"), to_number(3), to_number(True), to_number("abc")
        (nan, 3.0, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    # JSON has no word for these; W&B writes them as text.
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None


def read_result_run(file: Path) -> Run:
    """Read ``result.json`` alone, as ``experiments/train.py`` leaves it with ``logger=none``."""
    result, problems = _read_result(file)
    if problems:
        raise UnreadableRun(problems[0])
    last = result["steps"] - 1
    points: Points = {}
    for validation in result.get("validations", []):
        for name, value in validation.items():
            if name != "step" and value is not None:
                points.setdefault(name, []).append((int(validation["step"]) - 1, float(value)))
    for name, value in result["metrics"].items():
        if value is not None:
            points.setdefault(name, []).append((last, float(value)))
    series = _series(points) | _bytes_at_the_end(result)
    if not series:
        raise UnreadableRun(f"{file}: no figures in it")
    note = "no log, only result.json: bytes are known at the end, and drawn as even before"
    if not _holds_all_bytes(result):
        note = "no log, only result.json, which does not hold all bytes of a split model: none are shown"
    return Run(file.parent.name, file, "result.json", series, notes=(note,))


def _bytes_at_the_end(result: dict[str, Any]) -> dict[str, Series]:
    """The byte counters after the last step, by their logged names."""
    if not _holds_all_bytes(result) or not result["steps"]:
        return {}
    # A figure per step times the steps is an integer, except for the rounding of a quotient.
    return {
        name: Series((result["steps"] - 1,), (float(round(per_step * result["steps"])),))
        for name, key in _BYTES.items()
        if (per_step := result.get(key)) is not None
    }


def _holds_all_bytes(result: dict[str, Any]) -> bool:
    """Older files do not hold the dense bytes inside a split model."""
    return result.get("split_ratio") is None or result.get("split_bytes_dense_per_step") is not None


def _later(logged: Mapping[str, Series], at_the_end: Mapping[str, Series]) -> dict[str, Series]:
    """Counters with their value after the last step, where a log has ended before."""
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
    """Whether the content of a file has the names and kinds of values that are read here."""
    if not isinstance(content, dict) or type(content.get("steps")) is not int or content["steps"] < 0:
        return False
    validations = content.get("validations", [])
    groups = [content.get("metrics"), *(validations if isinstance(validations, list) else [validations])]
    if not all(isinstance(group, dict) for group in groups):
        return False
    if any(type(validation.get("step")) is not int for validation in groups[1:]):
        return False
    figures = [*(value for group in groups for value in group.values()), *map(content.get, _FIGURES)]
    return all(value is None or to_number(value) is not None for value in figures)
