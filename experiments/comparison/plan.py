"""What shall be run: strategies with their settings, and for each run its overrides and a folder of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A label ends in a colon and a blank, and what comes after it starts with the name of a file.
_LABELLED = re.compile(r"(?P<label>.+?):\s+(?P<settings>\w+(\s.*)?)", re.DOTALL)
_READABLE_LENGTH = 100


@dataclass(frozen=True)
class Strategy:
    """One side of a comparison.

    Attributes:
        label: What tables and pictures call it.
        overrides: What it adds to the overrides of all runs, its file of ``conf/strategy`` first.
    """

    label: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read what the command line says of a strategy.

        Args:
            text: A file of ``conf/strategy`` and overrides that go with it, separated by blanks; before them, if one
                is wanted, a label and a colon.

        Example:
            >>> Strategy.parse("DCT, 1%: dct strategy.density=0.01")
            Strategy(label='DCT, 1%', overrides=('strategy=dct', 'strategy.density=0.01'))
            >>> Strategy.parse("dct strategy.density=0.01").label
            'dct density=0.01'
        """
        labelled = _LABELLED.fullmatch(text.strip())
        words = (labelled["settings"] if labelled else text).split()
        if not words or "=" in words[0]:
            raise ValueError(f'--strategy "{text}" must name a file of conf/strategy first, as in "dct seed=1"')
        overrides = (f"strategy={words[0]}", *words[1:])
        return cls(labelled["label"].strip() if labelled else describe(overrides), overrides)


@dataclass(frozen=True)
class PlannedRun:
    """A run to do, or to find done already.

    Attributes:
        strategy: The side of the comparison it belongs to.
        swept: Overrides that a sweep adds; empty without one.
        seed: Seeds model and data.
        overrides: All of them, in the order in which Hydra gets them.
        folder: Where it leaves everything it writes.
    """

    strategy: Strategy
    swept: tuple[str, ...]
    seed: int
    overrides: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return ", ".join([self.strategy.label, *(describe([value]) for value in self.swept), f"seed {self.seed}"])


def plan_run(common: Sequence[str], strategy: Strategy, swept: Sequence[str], seed: int, output: Path) -> PlannedRun:
    """Say what one run is.

    Args:
        common: Overrides of all runs.
        strategy: The side of the comparison.
        swept: Overrides that a sweep adds.
        seed: Seeds model and data.
        output: The folder of the comparison.
    """
    own = [*strategy.overrides, *swept, f"seed={seed}"]
    overrides = (*common, *own)
    return PlannedRun(strategy, tuple(swept), seed, overrides, output / folder_name(own, overrides))


def folder_name(shown: Sequence[str], told_apart_by: Sequence[str]) -> str:
    """A folder's name that people can read and that no two different runs share.

    Args:
        shown: Overrides that the name shall tell.
        told_apart_by: Overrides of which a difference makes another name: a digest of them is the name's end.
    """
    # No equals sign, which Hydra's command line gives a meaning.
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", describe(shown)).strip("-")[:_READABLE_LENGTH]
    digest = hashlib.sha256(json.dumps(list(told_apart_by)).encode()).hexdigest()[:8]
    return f"{readable}-{digest}"


def describe(overrides: Sequence[str]) -> str:
    """Write overrides as short as a reader can do with.

    Example:
        >>> describe(["strategy=dct", "strategy.density=0.01", "model.learning_rate=0.003"])
        'dct density=0.01 model.learning_rate=0.003'
    """
    return " ".join(re.sub(r"^(strategy=|[+~]*strategy\.)", "", word) for word in overrides)


def require_distinct(strategies: Sequence[Strategy], common: Sequence[str], swept: Sequence[str]) -> None:
    """Refuse what could not be told apart in a table, or would be set twice.

    Args:
        strategies: The sides of the comparison.
        common: Overrides of all runs.
        swept: Names of the settings that a sweep varies.

    Raises:
        ValueError: Two strategies are the same or have the same label, or a setting is given in two places.
    """
    for place, strategy in enumerate(strategies):
        for other in strategies[:place]:
            if strategy.label == other.label or strategy.overrides == other.overrides:
                raise ValueError(f'two strategies are or are called "{strategy.label}": give each a label of its own')
    for word in [*common, *(word for strategy in strategies for word in strategy.overrides)]:
        name = setting_name(word)
        if name in swept:
            raise ValueError(f"{word}: --sweep varies {name} already, so it cannot be set as well")
    for strategy in strategies:
        for word in strategy.overrides:
            if setting_name(word) == "seed":
                raise ValueError(f"{word}: all strategies are run with the same seeds; use --seeds")


def setting_name(override: str) -> str:
    """The setting that an override is about.

    Example:
        >>> setting_name("+model.learning_rate=0.1")
        'model.learning_rate'
    """
    return override.partition("=")[0].lstrip("+~")
