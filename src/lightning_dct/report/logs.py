"""Reads one run from a log: Lightning's ``metrics.csv``, or an offline W&B run."""

import csv
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lightning_dct.callbacks.wandb_runs import CONFIG_KEY
from lightning_dct.report.run import Run, Series

CSV_FILE = "metrics.csv"
HYDRA_CONFIG = Path(".hydra") / "config.yaml"
STEP_KEYS = ("trainer/global_step", "_step")
"""The axis of a W&B row: the optimizer step that ``WandbLogger`` adds, else W&B's own count of rows."""
COUNTERS = {"dct/seconds", *(f"dct/{part}/bytes_{kind}" for part in ("dp", "mp") for kind in ("sent", "dense"))}
"""Names of values that add up while a run trains."""
MOST_CHARACTERS = 200_000
"""The longest file of settings that is read; a page could not show more."""

_HIDDEN = ("paths.", "hydra.", "logger.", "wandb_version", "_wandb", "callbacks.progress_bar.", "run.")
"""Prefixes of settings that only name folders and loggers."""
Points = dict[str, list[tuple[int, float]]]


def read_run(home: Path, log: Path) -> Run:
    """Read a run from its log, ``metrics.csv`` or a ``.wandb`` file, and the settings in its folder.

    Raises:
        ValueError: The log holds no values.
        ModuleNotFoundError: It is a W&B log, and W&B is not installed.
    """
    run = _with_finite_counters(_read_wandb(log) if log.suffix == ".wandb" else _read_csv(log))
    if not run.series:
        raise ValueError(f"{log}: no values in it")
    problems = list(run.problems)
    found: dict[str, Any] = {}
    described = dict(run.settings)
    for file, name, read in (
        (log.with_name("hparams.yaml"), "settings", _read_settings),
        # Hydra's configuration contains the hyperparameters that a logger keeps.
        (home / HYDRA_CONFIG, "settings", _read_settings),
        (home / ".hydra" / "overrides.yaml", "overrides", _read_overrides),
    ):
        try:
            if file.exists():
                found[name] = read(file)
                described |= found[name] if name == "settings" else {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            problems.append(f"{file}: left out, {' '.join(str(error).split())}")
    strategy, ranks = (described.get(f"{CONFIG_KEY}.{name}") for name in ("strategy", "ranks"))
    return replace(run, **found, strategy=strategy, ranks=ranks, problems=tuple(problems))


def _series(points: Points) -> dict[str, Series]:
    """Sort points by step, and keep the last one of a step: a resumed run logs some steps again."""
    return {name: dict(sorted(dict(found).items())) for name, found in points.items() if found}


def _with_finite_counters(run: Run) -> Run:
    """Leave out values of counters that are not finite: no sum or difference with them is known."""
    series, problems = dict(run.series), list(run.problems)
    for name in sorted(COUNTERS & series.keys()):
        finite = {step: value for step, value in series[name].items() if math.isfinite(value)}
        if left_out := len(series[name]) - len(finite):
            problems.append(f"{run.source}: {name}: values that are not finite, left out: {left_out:,}")
            del series[name]
            series |= {name: finite} if finite else {}
    return replace(run, series=series, problems=tuple(problems))


def _read_csv(file: Path) -> Run:
    points: Points = {}
    left_out: list[str] = []
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        rows = csv.DictReader(lines)
        if "step" not in (rows.fieldnames or ()):
            raise ValueError(f"{file}: no column 'step' in its first line")
        for row in rows:
            try:
                # A line that is too long or too short has a name or a value that is None.
                if None in [*row, *row.values()]:
                    raise ValueError("another number of fields")
                step = int(float(row.pop("step")))
            except (ValueError, OverflowError) as error:
                left_out.append(f"line {rows.line_num}: {error}")
                continue
            for name, cell in row.items():
                try:
                    if cell:
                        points.setdefault(name, []).append((step, float(cell)))
                except ValueError:
                    left_out.append(f"line {rows.line_num}: {name}='{cell}' is no number")
    problems = (f"{file}: {len(left_out):,} lines or values left out, first {left_out[0]}",) if left_out else ()
    return Run(file.parent.name, file, _series(points), problems=problems)


def _read_wandb(file: Path) -> Run:
    """Read ``run-ID.wandb`` with ``wandb leet inspect``, which prints one JSON record per line."""
    if importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            f"{file}: reading it takes W&B: pip install '.[experiments]' in a clone of lightning_dct"
        )
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    run = run_of_records(done.stdout.splitlines(), file)
    messages = " ".join(done.stderr.split())
    if done.returncode or not run.series:
        raise ValueError(f"{file}: {messages or 'nothing was logged'}")
    return replace(run, problems=(*run.problems, f"{file}: {messages}")) if messages else run


def run_of_records(lines: Iterable[str], file: Path) -> Run:
    """Make a run of the records that ``wandb leet inspect --json`` prints."""
    points: Points = {}
    config: dict[str, Any] = {}
    name, seconds, malformed = "", None, 0
    for line in lines:
        try:
            record = json.loads(line)
            content = record.get(record["type"], {})
            if record["type"] == "run":
                name = content.get("display_name") or content.get("run_id", "")
                config |= content.get("config", {}).get("update", {})
            elif record["type"] == "config":
                config |= content.get("update", {})
            elif record["type"] == "history":
                row = content["item"]
                step = int(next(row[key] for key in STEP_KEYS if key in row))
                seconds = row.get("_runtime", seconds)
                for key, value in row.items():
                    if key not in STEP_KEYS and not key.startswith("_") and (number := to_number(value)) is not None:
                        points.setdefault(key, []).append((step, number))
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            malformed += 1
    problems = (f"{file}: {malformed:,} malformed records left out",) if malformed else ()
    return Run(name or file.stem, file, _series(points), flattened(config), seconds=seconds, problems=problems)


def to_number(value: Any) -> float | None:
    """A logged value as a number; None for images, tables and text.

    Example:
        >>> to_number("NaN"), to_number(3), to_number(True), to_number("abc")
        (nan, 3.0, None, None)
    """
    # W&B writes NaN and infinity as text, because JSON has no such numbers.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number or value in ("NaN", "Infinity", "-Infinity") else None


class _TextLoader(yaml.BaseLoader):
    """Reads everything as text: a file of settings must not run code."""


_TextLoader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)


def _read_yaml(file: Path) -> Any:
    with file.open(encoding="utf-8") as content:
        text = content.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it holds more than {MOST_CHARACTERS:,} characters")
    return yaml.load(text, _TextLoader)


def _read_settings(file: Path) -> dict[str, str]:
    content = _read_yaml(file) or {}
    if not isinstance(content, Mapping):
        raise ValueError("it holds no names")
    return flattened(content)


def _read_overrides(file: Path) -> tuple[str, ...]:
    content = _read_yaml(file) or []
    if not isinstance(content, list) or not all(isinstance(word, str) for word in content):
        raise ValueError("it is no list of words")
    return tuple(content)


def flattened(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Join names with dots, and drop those of folders and loggers; lists and empty groups stay one value.

    Example:
        >>> flattened({"strategy": {"density": 0.03, "guard": True}, "seed": None, "sizes": [16, 8]})
        {'strategy.density': '0.03', 'strategy.guard': 'true', 'seed': 'null', 'sizes': '[16, 8]'}
    """
    flat: dict[str, str] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{name}.")
        elif not name.startswith(_HIDDEN) and not name.endswith("._convert_"):
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[name] = text.replace('"', "")
    return flat
