"""Finds the runs that lie in a folder, however deep, by the names of files; reads none of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

CSV_FILE = "metrics.csv"
RESULT_FILE = "result.json"
HYDRA_CONFIG = Path(".hydra") / "config.yaml"

_LEVELS_ABOVE_A_LOG = 3
"""``RUN/csv/metrics.csv`` lies one below its run, ``RUN/wandb/offline-run-x/run-x.wandb`` two."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run.

    Attributes:
        folder: The folder that names the run.
        log: ``metrics.csv``, ``run-ID.wandb`` or, if nothing was logged, ``result.json``.
        result: ``result.json`` of ``experiments/train.py``.
        config: Hydra's configuration.
        unused: Further logs of the same run.
    """

    folder: Path
    log: Path
    result: Path | None = None
    config: Path | None = None
    unused: tuple[Path, ...] = ()


def find_runs(path: Path) -> list[RunFiles]:
    """Find all runs in a folder and below, or the run of a log file, in the order of their folders' names.

    Links are followed at ``path`` (``wandb/latest-run``), and not below.

    Raises:
        FileNotFoundError: There is no such file or folder, or no run in it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder")
    start = path.resolve()
    logs, results = ([start], []) if start.is_file() else _search(start)
    by_home: dict[Path, list[Path]] = {}
    runs = []
    for log in logs:
        if (home := _home_of(log)) is None:
            runs.append(RunFiles(log.parent, log))
        else:
            by_home.setdefault(home, []).append(log)
    for home, found in by_home.items():
        runs += _runs_of(home, found)
    runs += [_described(result.parent, result) for result in results if result.parent not in by_home]
    if not runs:
        raise FileNotFoundError(
            f"{path}: no run in it or below: neither {CSV_FILE} (CSVLogger), nor *.wandb (offline W&B), nor"
            f" {RESULT_FILE} beside .hydra/ (experiments/train.py)"
        )
    return sorted(runs, key=lambda run: (_natural(run.folder), _natural(run.log)))


def _search(start: Path) -> tuple[list[Path], list[Path]]:
    logs, results = [], []
    for folder, subfolders, files in os.walk(start):
        subfolders.sort()
        here = Path(folder)
        logs += [here / name for name in sorted(files) if name == CSV_FILE or name.endswith(".wandb")]
        if RESULT_FILE in files and (here / HYDRA_CONFIG).exists():
            results.append(here / RESULT_FILE)
    return logs, results


def _home_of(log: Path) -> Path | None:
    """The folder of ``experiments/train.py`` that contains a log; None if another program has logged."""
    above = [*log.parents][:_LEVELS_ABOVE_A_LOG]
    return next((folder for folder in above if (folder / HYDRA_CONFIG).exists()), None)


def _runs_of(home: Path, logs: list[Path]) -> list[RunFiles]:
    """One run if one process has logged. Several W&B logs are several processes, as after a resume."""
    of_csv = [log for log in logs if log.suffix == ".csv"]
    others = [log for log in logs if log.suffix != ".csv"]
    if of_csv:
        return [_described(home, of_csv[0], (*of_csv[1:], *others))]
    return [_described(home, log) for log in others]


def _described(home: Path, log: Path, unused: tuple[Path, ...] = ()) -> RunFiles:
    config, result = home / HYDRA_CONFIG, home / RESULT_FILE
    return RunFiles(home, log, result if result.exists() else None, config if config.exists() else None, unused)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sorts version_10 after version_9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", str(path)) if part]
