"""The runs of a comparison: their overrides and folders, and how those that are missing are
done.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs import is_hydra_setting, run_alone, train_command

RESULT = "result.json"
OUTPUT = "output.txt"
_LINES_SHOWN = 20
# A label ends in a colon and a blank; then comes the name of a file.
_LABELLED = re.compile(r"(?P<label>.+?):\s+(?P<settings>\w+(\s.*)?)", re.DOTALL)
_READABLE_LENGTH = 100


@dataclass(frozen=True)
class Strategy:
    """One side of a comparison: its label, and what it adds to the overrides of all runs,
    ``strategy=...`` first.
    """

    label: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read a file of ``conf/strategy`` and overrides, separated by blanks, with a label and a
        colon in front.

        Example:
            >>> Strategy.parse("DCT, 1%: dct strategy.density=0.01")
            Strategy(label='DCT, 1%', overrides=('strategy=dct', 'strategy.density=0.01'))
            >>> Strategy.parse("dct strategy.density=0.01").label
            'dct density=0.01'
        """
        labelled = _LABELLED.fullmatch(text.strip())
        words = (labelled["settings"] if labelled else text).split()
        if not words or "=" in words[0]:
            raise ValueError(
                f'--strategy "{text}" must name a file of conf/strategy first, as in "dct'
                ' strategy.density=0.01"'
            )
        overrides = (f"strategy={words[0]}", *words[1:])
        return cls(labelled["label"].strip() if labelled else describe(overrides), overrides)


@dataclass(frozen=True)
class Run:
    """One run, with the content of its ``result.json`` once it is done.

    ``swept`` are the overrides that a sweep adds, ``overrides`` all of them, in the order in which
    Hydra gets them. ``hosts`` are the options of ``train_on_hosts.py``, for a run on hosts of its
    own.
    """

    seed: int
    swept: tuple[str, ...]
    folder: Path
    result: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    overrides: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One side of a comparison.

    Attributes:
        label: Its name in tables.
        runs: The runs that are compared, one a seed.
        trials: Runs of a sweep, those among ``runs`` too.
        chosen: The values that a sweep has chosen, by setting.
        note: The reason for these values.
    """

    label: str
    runs: tuple[Run, ...]
    trials: tuple[Run, ...] = ()
    chosen: Mapping[str, str] | None = None
    note: str = ""


def plan_run(
    common: Sequence[str],
    strategy: Strategy,
    swept: Sequence[str],
    seed: int,
    output: Path,
    hosts: tuple[str, ...] = (),
) -> Run:
    """Describe one run: the overrides of all runs, then those of the strategy and of a sweep, then
    the seed.
    """
    own = [*strategy.overrides, *swept, f"seed={seed}"]
    overrides = (*common, *own)
    name = ", ".join([strategy.label, *(describe([value]) for value in swept), f"seed {seed}"])
    folder = output / folder_name(own, [*overrides, *hosts])
    return Run(seed, tuple(swept), folder, {}, name, overrides, hosts)


def folder_name(shown: Sequence[str], all_overrides: Sequence[str]) -> str:
    """A readable name of a folder, which ends in a digest, so that no two different runs share
    it.
    """
    # Without equals signs, which belong to Hydra's grammar.
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", describe(shown)).strip("-")[:_READABLE_LENGTH]
    return f"{readable}-{hashlib.sha256(json.dumps(list(all_overrides)).encode()).hexdigest()[:8]}"


def describe(overrides: Sequence[str]) -> str:
    """Overrides in short for a reader.

    Example:
        >>> describe(["strategy=dct", "strategy.density=0.01", "model.learning_rate=0.003"])
        'dct density=0.01 model.learning_rate=0.003'
    """
    return " ".join(re.sub(r"^(strategy=|[+~]*strategy\.)", "", word) for word in overrides)


def setting_name(override: str) -> str:
    """The setting of an override.

    Example:
        >>> setting_name("+model.learning_rate=0.1")
        'model.learning_rate'
    """
    return override.partition("=")[0].lstrip("+~")


def require_once(option: str, given: Sequence[Any]) -> None:
    """Refuse an option's values of which one comes twice (ValueError): a table would count its runs
    twice.
    """
    if len(set(given)) < len(given):
        raise ValueError(f"--{option} {' '.join(map(str, given))}: one comes twice")


def require_distinct(
    strategies: Sequence[Strategy], common: Sequence[str], varied: Mapping[str, str]
) -> None:
    """Refuse what a table could not tell apart, or what would be set twice.

    ``varied`` are the settings that an option of the command line varies, with the name of that
    option.

    Raises:
        ValueError: Two strategies are the same or have the same label, or a setting is given in two
            places.
    """
    varied = {"strategy": "--strategy", **varied}
    for distinct in (
        {strategy.label for strategy in strategies},
        {strategy.overrides for strategy in strategies},
    ):
        if len(distinct) < len(strategies):
            raise ValueError(
                "two strategies are or are called the same: give each a label of its own"
            )
    for word in [*common, *(word for strategy in strategies for word in strategy.overrides[1:])]:
        if (name := setting_name(word)) in varied:
            raise ValueError(f"{word}: {varied[name]} sets {name} already; use that")


def read_result(planned: Run) -> Mapping[str, Any] | None:
    """The content of a run's ``result.json``; None before it exists, a ValueError if it is another
    run's.
    """
    file = planned.folder / RESULT
    if not file.exists():
        return None
    try:
        result: Mapping[str, Any] = json.loads(file.read_text())
        found = result["overrides"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of a run; remove it and start again") from error
    expected = [override for override in planned.overrides if not is_hydra_setting(override)]
    if planned.hosts:
        # `train_on_hosts.py` adds its own.
        found = [override for override in found if override in expected]
    if found != expected:
        raise ValueError(
            f"{file} is the result of another run, with {' '.join(found)} where this one has"
            f" {' '.join(expected)}; move it away, or give another --output"
        )
    return result


class Runner:
    """Gets runs one after the other, and prints the progress; with ``collect_only`` it starts none.

    ``ranks`` is as for :func:`~jobs.train_command`.
    """

    def __init__(self, collect_only: bool = False, ranks: int = 0) -> None:
        self._collect_only = collect_only
        self._ranks = ranks
        # What failed or is missing, a line each.
        self.problems: list[str] = []

    def get(self, planned: Run) -> Run | None:
        """Find a run done, or do it; None when it has failed, or is missing with
        ``collect_only``.
        """
        try:
            result = read_result(planned)
            if result is None and self._collect_only:
                raise ValueError("missing")
            result = result or self._do(planned)
        except (ValueError, OSError) as error:
            # The table gets the first line; the others are the last output of the run.
            self.problems.append(f"{planned.name}: {str(error).partition(chr(10))[0]}")
            print(f"failed   {planned.name}: {error}", flush=True)
            return None
        return replace(planned, result=result)

    def _do(self, planned: Run) -> Mapping[str, Any]:
        planned.folder.mkdir(parents=True, exist_ok=True)
        log = planned.folder / OUTPUT
        # All processes of a run have this file open, so they hold the lock even if the comparison
        # is killed.
        with log.open("a") as output:
            try:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"waiting  {planned.name}: processes that write to {log} train it", flush=True
                )
                fcntl.flock(output, fcntl.LOCK_EX)
                if (result := read_result(planned)) is not None:
                    return result
            except OSError:
                pass  # some file systems have no locks
            output.truncate(0)
            print(f"running  {planned.name}", flush=True)
            started = time.monotonic()
            command = train_command(
                list(planned.overrides), planned.folder, planned.hosts, self._ranks
            )
            status = run_alone(command, output)
        # The result is the last thing a run writes, so a failure after it changes nothing.
        result = read_result(planned)
        if result is None:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])
            raise ValueError(f"has failed with exit status {status}; see {log}\n{last}")
        print(f"done     {planned.name}, in {time.monotonic() - started:.0f} s", flush=True)
        return result


def collect(folders: Sequence[Path]) -> tuple[list[Entry], list[str], list[str]]:
    """Find runs that were started elsewhere, as by ``train.py --multirun``.

    Returns:
        A side for each set of overrides that differ in more than the seed, in the order of the
        jobs; the overrides that all runs share; and the runs that have left no result.

    Raises:
        ValueError: There is no run, or two runs of the same overrides and seed.
    """
    started = {
        file.parents[1] for folder in folders for file in folder.rglob(".hydra/overrides.yaml")
    }
    files = [file for folder in folders for file in folder.rglob(RESULT)]
    if not files:
        raise ValueError(f"no {RESULT} below {', '.join(map(str, folders))}")
    groups: dict[tuple[str, ...], list[Run]] = {}
    # Sort job 10 after job 9.
    for file in sorted(
        files, key=lambda file: [part.zfill(9) for part in re.split(r"(\d+)", str(file))]
    ):
        result = json.loads(file.read_text())
        settings = tuple(
            override for override in result["overrides"] if setting_name(override) != "seed"
        )
        runs = groups.setdefault(settings, [])
        if any(run.seed == result["seed"] for run in runs):
            raise ValueError(
                f"{file.parent} and another are the same run: {' '.join(result['overrides'])}"
            )
        runs.append(Run(result["seed"], (), file.parent, result))
    common = [
        setting for setting in next(iter(groups)) if all(setting in settings for settings in groups)
    ]
    entries = []
    for settings, runs in groups.items():
        strategy = f"strategy={runs[0].result['choices']['strategy']}"
        own = [
            setting
            for setting in settings
            if setting not in common and setting_name(setting) != "strategy"
        ]
        entries.append(Entry(describe([strategy, *own]), tuple(runs)))
    problems = [
        f"{folder} has left no {RESULT}"
        for folder in sorted(started - {file.parent for file in files})
    ]
    return entries, common, problems
