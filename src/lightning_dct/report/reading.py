"""Reads every run that a command line names, under names that tell them apart; what cannot be read is reported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dct.report.csv_log import read_csv_run
from lightning_dct.report.folders import RunFiles, find_runs
from lightning_dct.report.run import Run, UnreadableRun
from lightning_dct.report.train_log import read_result_run, with_surroundings
from lightning_dct.report.wandb_log import read_wandb_run

_SAYS_NOTHING = re.compile(r"\d+|\d{4}-\d\d-\d\d[-_T\d.:]*|version_\d+|(offline-)?run-.*|csv|wandb|lightning_logs")
"""Folder names that tell when a run was made and not what it is."""

_NO_DIFFERENCE = ("logger=", "hydra.", "paths.", "callbacks.progress_bar")


@dataclass(frozen=True)
class Reading:
    """What was read.

    Attributes:
        runs: In the order of the command line, and of the folders within each word of it.
        unreadable: A sentence for each word of the command line, or log below it, that gave no run.
    """

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that could not be read: whole runs, then parts of runs."""
        return (*self.unreadable, *(problem for run in self.runs for problem in run.problems))


def read_all(words: Sequence[str]) -> Reading:
    """Read all runs.

    Args:
        words: ``RUN_DIR`` or ``NAME=RUN_DIR``. A folder with several runs below it stands for all of them.
    """
    runs: list[Run] = []
    folders: list[Path] = []
    given: list[str] = []
    unreadable: list[str] = []
    seen: set[Path] = set()
    for word in words:
        try:
            name, path = split_name(word)
            found = find_runs(path)
        except OSError as error:
            unreadable.append(str(error))
            continue
        fresh = [files for files in found if files.log not in seen]
        seen |= {files.log for files in fresh}
        for files in fresh:
            try:
                runs.append(_read(files))
            except (UnreadableRun, OSError, ModuleNotFoundError) as error:
                unreadable.append(str(error))
                continue
            except RecursionError:
                unreadable.append(f"{files.log}: its values, or those beside it, are nested too deep")
                continue
            folders.append(files.folder)
            given.append("" if not name else name if len(found) == 1 else f"{name}/{files.folder.name}")
    names = distinct_names(runs, folders)
    runs = [replace(run, name=mine or made) for run, mine, made in zip(runs, given, names, strict=True)]
    return Reading(tuple(_numbered(runs)), tuple(unreadable))


def split_name(word: str) -> tuple[str, Path]:
    """Part ``NAME=RUN_DIR``, where both may have equals signs of their own: the folder is one that is there.

    Example:
        >>> split_name("dense=outputs/a")
        ('dense', PosixPath('outputs/a'))
    """
    if Path(word).expanduser().exists() or "=" not in word:
        return "", Path(word).expanduser()
    signs = [index for index, character in enumerate(word) if character == "="]
    at = next((sign for sign in signs if word[sign + 1 :] and _path_after(word, sign).exists()), signs[0])
    return word[:at], _path_after(word, at)


def _path_after(word: str, sign: int) -> Path:
    return Path(word[sign + 1 :]).expanduser()


def _read(files: RunFiles) -> Run:
    match files.log.suffix:
        case ".wandb":
            run = read_wandb_run(files.log)
        case ".json":
            run = read_result_run(files.log)
        case _:
            run = read_csv_run(files.log)
    return with_surroundings(run, files)


def distinct_names(runs: Sequence[Run], folders: Sequence[Path]) -> list[str]:
    """Name runs: after their folder, or, where that is only a date or a number, after what their command line sets.

    Args:
        runs: All that stand on one page.
        folders: Where each lies.

    Returns:
        As many names; those still equal have the folder above before them.
    """
    named = [not _SAYS_NOTHING.fullmatch(folder.name) for folder in folders]
    others = [run for run, has_name in zip(runs, named, strict=True) if run.overrides and not has_name]
    shared = set.intersection(*(set(run.overrides) for run in others)) if len(others) > 1 else set()
    names = []
    for run, folder, has_name in zip(runs, folders, named, strict=True):
        own = [word for word in run.overrides if word not in shared and not word.startswith(_NO_DIFFERENCE)]
        names.append(folder.name if has_name else " ".join(own) or run.name)
    often = Counter(names)
    return [
        f"{folder.parent.name}/{name}" if often[name] > 1 else name for name, folder in zip(names, folders, strict=True)
    ]


def _numbered(runs: Sequence[Run]) -> list[Run]:
    """Tell runs apart that have the same name all the same."""
    often = Counter(run.name for run in runs)
    so_far: Counter[str] = Counter()
    result = []
    for run in runs:
        so_far[run.name] += 1
        result.append(replace(run, name=f"{run.name} ({so_far[run.name]})") if often[run.name] > 1 else run)
    return result
