"""A comparison out of runs that were started elsewhere, as by ``train.py --multirun``: grouped by all but the seed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from comparison.plan import describe, setting_name
from comparison.runs import RESULT, Entry, Run


def collect(folders: Sequence[Path]) -> tuple[list[Entry], list[str], list[str]]:
    """Find all runs below some folders.

    Args:
        folders: Of sweeps, or of single runs.

    Returns:
        A side for each set of overrides that differ in more than the seed, in the order of the jobs (so that the first
        job's is the baseline); the overrides that all runs share; and what was started there and has left no result.

    Raises:
        ValueError: There is no run, or two runs of the same overrides and seed.
    """
    files = [file for folder in folders for file in sorted(folder.rglob(RESULT), key=_numbers_as_such)]
    if not files:
        raise ValueError(f"no {RESULT} below {', '.join(map(str, folders))}")
    groups: dict[tuple[str, ...], list[Run]] = {}
    for file in files:
        result = json.loads(file.read_text())
        settings = tuple(override for override in result["overrides"] if setting_name(override) != "seed")
        run = Run(result["seed"], (), file.parent, result)
        for other in groups.setdefault(settings, []):
            if other.seed == run.seed:
                raise ValueError(f"{other.folder} and {run.folder} are the same run: {' '.join(result['overrides'])}")
        groups[settings].append(run)
    common = [setting for setting in next(iter(groups)) if all(setting in settings for settings in groups)]
    entries = [
        Entry(_label([setting for setting in settings if setting not in common], runs), tuple(runs))
        for settings, runs in groups.items()
    ]
    return entries, common, _unfinished(folders)


def _label(own: Sequence[str], runs: Sequence[Run]) -> str:
    """What tells a group from the others, headed by its strategy."""
    strategy = runs[0].result["choices"]["strategy"]
    return describe([f"strategy={strategy}", *(setting for setting in own if setting_name(setting) != "strategy")])


def _unfinished(folders: Sequence[Path]) -> list[str]:
    started = [file for folder in folders for file in sorted(folder.rglob(".hydra/overrides.yaml"))]
    return [
        f"{file.parent.parent} has left no {RESULT}: {' '.join(map(str, OmegaConf.load(file)))}"
        for file in started
        if not (file.parent.parent / RESULT).exists()
    ]


def _numbers_as_such(file: Path) -> list[tuple[bool, int, str]]:
    """A key that sorts job 10 behind job 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", str(file))]
