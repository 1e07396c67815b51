"""Finds and reads every run of a command line, gives them distinct names, and lists what it cannot read."""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dct.report.logs import CSV_FILE, HYDRA_CONFIG, read_run
from lightning_dct.report.run import Run

_MEANINGLESS = re.compile(r"\d+|\d{4}-\d\d-\d\d[-_T\d.:]*|version_\d+|(offline-)?run-.*|csv|wandb|lightning_logs")
"""Folder names without a meaning, such as dates and versions."""
_NO_DIFFERENCE = ("logger=", "hydra.", "paths.", "callbacks.progress_bar")


@dataclass(frozen=True)
class Reading:
    """All runs in the order of the command line, and a message for each word or log without a run."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages on runs that could not be read, then on parts of runs."""
        return (*self.unreadable, *(problem for run in self.runs for problem in run.problems))


def read_all(words: Sequence[str]) -> Reading:
    """Read all runs in folders and below, given as ``RUN_DIR`` or ``NAME=RUN_DIR``."""
    runs: list[tuple[str, Path, Run]] = []
    unreadable: list[str] = []
    seen: set[Path] = set()
    for word in words:
        try:
            name, path = split_name(word)
            found = find_runs(path)
        except OSError as error:
            unreadable.append(str(error))
            continue
        for home, log in found:
            try:
                if log not in seen:
                    given = f"{name}/{home.name}" if name and len(found) > 1 else name
                    runs.append((given, home, read_run(home, log)))
            except (ValueError, OSError, ModuleNotFoundError, RecursionError, csv.Error) as error:
                unreadable.append(str(error))
        seen |= {log for _, log in found}
    return Reading(tuple(_named(runs)), tuple(unreadable))


def find_runs(path: Path) -> list[tuple[Path, Path]]:
    """Find all runs in a folder and below, or the run of a log file.

    Links are followed at ``path`` (``wandb/latest-run``), and not below.

    Returns:
        The folder and the log of each run, in the order of the folders' names.

    Raises:
        FileNotFoundError: There is no such file or folder, or no run in it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder")
    start = path.resolve()
    logs = [start] if start.is_file() else [*start.rglob(CSV_FILE), *start.rglob("*.wandb")]
    with_csv = {_home_of(log) for log in logs if log.name == CSV_FILE}
    # If two loggers have logged one run, read the CSV.
    runs = [(_home_of(log), log) for log in logs if log.name == CSV_FILE or _home_of(log) not in with_csv]
    if not runs:
        raise FileNotFoundError(
            f"{path}: no run in it or below: neither {CSV_FILE} (CSVLogger) nor *.wandb (offline W&B)"
        )
    # version_10 comes after version_9.
    return sorted(runs, key=lambda run: [p.zfill(20) if p.isdecimal() else p for p in re.split(r"(\d+)", str(run[1]))])


def _home_of(log: Path) -> Path:
    """The folder of Hydra's job that contains a log; the log's own if there is no such job."""
    return next((folder for folder in [*log.parents][:3] if (folder / HYDRA_CONFIG).exists()), log.parent)


def split_name(word: str) -> tuple[str, Path]:
    """Split ``NAME=RUN_DIR``, where both may contain equals signs: the folder is one that exists.

    Example:
        >>> split_name("dense=/")
        ('dense', PosixPath('/'))
    """
    if Path(word).exists():
        return "", Path(word)
    signs = (index for index, character in enumerate(word) if character == "=")
    return next(
        ((word[:sign], Path(word[sign + 1 :])) for sign in signs if Path(word[sign + 1 :]).exists()), ("", Path(word))
    )


def _named(runs: Sequence[tuple[str, Path, Run]]) -> list[Run]:
    """Name runs as given, else after their folders, or, if these are dates or numbers, after their own overrides.

    Equal names get the parent folder as a prefix; names that are still equal get numbers.
    """
    unnamed = [run for _, home, run in runs if run.overrides and _MEANINGLESS.fullmatch(home.name)]
    shared = set.intersection(*(set(run.overrides) for run in unnamed)) if len(unnamed) > 1 else set()
    names = []
    for _, home, run in runs:
        own = " ".join(word for word in run.overrides if word not in shared and not word.startswith(_NO_DIFFERENCE))
        names.append((own or run.name) if _MEANINGLESS.fullmatch(home.name) else home.name)
    often = Counter(names)
    names = [
        given or (f"{home.parent.name}/{name}" if often[name] > 1 else name)
        for name, (given, home, _) in zip(names, runs, strict=True)
    ]
    often, so_far, result = Counter(names), Counter[str](), []
    for name, (_, _, run) in zip(names, runs, strict=True):
        so_far[name] += 1
        result.append(replace(run, name=f"{name} ({so_far[name]})" if often[name] > 1 else name))
    return result
