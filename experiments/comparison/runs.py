"""Finished runs: read from where they lie when they are really those that are asked for, or else done now."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.plan import PlannedRun
from comparison.progress import Progress
from comparison.sweep import Choice
from jobs import is_hydra_setting, run_alone, train_command

RESULT = "result.json"
OUTPUT = "output.txt"
_LINES_SHOWN = 20


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        seed: What seeded it.
        swept: What a sweep had added to its overrides.
        folder: Where it lies.
        result: What its ``result.json`` says.
    """

    seed: int
    swept: tuple[str, ...]
    folder: Path
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One side of a comparison, with what is known of it.

    Attributes:
        label: What it is called.
        runs: The runs that are compared, one a seed.
        trials: Runs of a sweep, those among ``runs`` too.
        choice: What a sweep has found; None without one.
    """

    label: str
    runs: tuple[Run, ...]
    trials: tuple[Run, ...] = ()
    choice: Choice | None = None


def read_result(planned: PlannedRun) -> Mapping[str, Any] | None:
    """What a run has left.

    Returns:
        What ``result.json`` says; None when there is none yet.

    Raises:
        ValueError: The file is that of a run with other overrides, or is no result at all.
    """
    file = planned.folder / RESULT
    if not file.exists():
        return None
    try:
        result: Mapping[str, Any] = json.loads(file.read_text())
        told = result["overrides"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of a run; remove it and start again") from error
    expected = [override for override in planned.overrides if not is_hydra_setting(override)]
    if told != expected:
        raise ValueError(
            f"{file} is the result of another run, with {' '.join(told)} where this one has {' '.join(expected)}; "
            "move it away, or give another --output"
        )
    return result


class Runner:
    """Gets runs one after the other and remembers what went wrong.

    Args:
        progress: Told of every run.
        collect_only: Take what is there and start nothing.

    Attributes:
        failures: What failed, in words: the first line what and where, then what it printed last.
        missing: Names of runs that ``collect_only`` did not find.
    """

    def __init__(self, progress: Progress, collect_only: bool = False) -> None:
        self._progress = progress
        self._collect_only = collect_only
        self.failures: list[str] = []
        self.missing: list[str] = []

    def get(self, planned: PlannedRun) -> Run | None:
        """Find a run done, or do it.

        Returns:
            The run; None when it has failed, or is not there and nothing shall be started.
        """
        try:
            result = read_result(planned)
            if result is not None:
                self._progress.found(planned.name)
            elif self._collect_only:
                self.missing.append(planned.name)
                self._progress.passed(planned.name)
            else:
                result = self._do(planned)
        except (ValueError, OSError) as error:
            self.failures.append(f"{planned.name}: {error}")
            self._progress.failed(self.failures[-1])
            return None
        return None if result is None else Run(planned.seed, planned.swept, planned.folder, result)

    def skip(self, reason: str, count: int) -> None:
        """Leave out runs that cannot be chosen, because what was to choose them has failed."""
        self.failures.append(reason)
        self._progress.failed(reason, count)

    def _do(self, planned: PlannedRun) -> Mapping[str, Any]:
        planned.folder.mkdir(parents=True, exist_ok=True)
        log = planned.folder / OUTPUT
        self._progress.starting(planned.name)
        started = time.monotonic()
        with log.open("w") as output:
            status = run_alone(train_command(list(planned.overrides), planned.folder), output)
        # The result is the last thing a run writes: what fails after it, on the way out, takes nothing from it.
        result = read_result(planned)
        if result is None:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])
            raise ValueError(f"has failed with exit status {status}; see {log}\n{last}")
        self._progress.finished(planned.name, time.monotonic() - started)
        return result
