"""Reads every run that a command line names, under distinct names; reports what it cannot read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dct.report.folders import find_runs
from lightning_dct.report.logs import read_run
from lightning_dct.report.run import Run, UnreadableRun

_SAYS_NOTHING = re.compile(r"\d+|\d{4}-\d\d-\d\d[-_T\d.:]*|version_\d+|(offline-)?run-.*|csv|wandb|lightning_logs")
"""Folder names that say when a run was made, not what it is."""

_NO_DIFFERENCE = ("logger=", "hydra.", "paths.", "callbacks.progress_bar")


@dataclass(frozen=True)
class Reading:
    """All runs in the order of the command line, and a sentence for each word or log that gave no run."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be read: whole runs, then parts of runs."""
        return (*self.unreadable, *(problem for run in self.runs for problem in run.problems))


def read_all(words: Sequence[str]) -> Reading:
    """Read all runs of words such as ``RUN_DIR`` or ``NAME=RUN_DIR``; a folder stands for all runs below it."""
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
                runs.append(read_run(files))
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
    """Split ``NAME=RUN_DIR``, where both may contain equals signs: the folder is one that exists.

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


def distinct_names(runs: Sequence[Run], folders: Sequence[Path]) -> list[str]:
    """Name runs after their folders, or, where these are dates or numbers, after what their command lines set.

    Equal names get the name of the folder above in front.
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
    """Number runs that still have the same name."""
    often = Counter(run.name for run in runs)
    so_far: Counter[str] = Counter()
    result = []
    for run in runs:
        so_far[run.name] += 1
        result.append(replace(run, name=f"{run.name} ({so_far[run.name]})") if often[run.name] > 1 else run)
    return result
