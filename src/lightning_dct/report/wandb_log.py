"""Reads what an offline W&B run leaves: a ``.wandb`` file, which W&B itself turns into JSON, a record a line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_dct.report.run import Run, Series, UnreadableRun
from lightning_dct.report.settings import flattened, shown

STEP_KEYS = ("trainer/global_step", "_step")
"""What a row is drawn against: the optimizer step that ``WandbLogger`` adds, else W&B's own count of rows."""

_NO_METRICS = {*STEP_KEYS, "_runtime", "_timestamp"}


def read_wandb_run(file: Path) -> Run:
    """Read a run with ``wandb leet inspect``.

    Args:
        file: ``run-ID.wandb``.

    Raises:
        UnreadableRun: It is no such file, or nothing was logged.
        ModuleNotFoundError: W&B is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            f"{file}: reading it takes W&B: pip install '.[experiments]' in a clone of lightning_dct"
        )
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, errors="replace")
        assert process.stdout is not None
        with process.stdout as lines:
            run = run_of_records(lines, file)
        status = process.wait()
        complaints.seek(0)
        said = [line.partition("wandb leet inspect: ")[2] or line.strip() for line in complaints if line.strip()]
    if status or not run.series:
        raise UnreadableRun(f"{file}: {'; '.join([*said, *run.problems]) or 'nothing was logged'}")
    problems = (*run.problems, *(f"{file}: {text}" for text in said))
    return Run(run.name, file, run.kind, run.series, run.settings, seconds=run.seconds, problems=problems)


def run_of_records(lines: Iterable[str], file: Path) -> Run:
    """Make a run of records.

    Args:
        lines: As ``wandb leet inspect --json`` prints them.
        file: What they were read from.
    """
    points: dict[str, list[tuple[int, float]]] = {}
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
    series = {key: Series.of(found) for key, found in points.items()}
    settings = shown(flattened(config))
    return Run(name or identity or file.stem, file, "W&B log", series, settings, seconds=seconds, problems=problems)


def to_number(value: Any) -> float | None:
    """A logged value as a number; None for pictures, tables and text.

    Example:
        >>> to_number("NaN"), to_number(3), to_number(True), to_number("abc")
        (nan, 3.0, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    # JSON has no word for these: W&B writes them as text.
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
