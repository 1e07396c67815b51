"""One setting, or several, tried with the same care for every strategy: the best by validation is taken.

Each combination of values is run with the first seed only. What chooses is the validation after the last step; the
test part has no say. A best value at the edge of what was tried is no best value yet, and that is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from comparison.figures import main_metric
from lightning_dct.report.quality import higher_is_better


@dataclass(frozen=True)
class Axis:
    """A setting and the values to try.

    Attributes:
        setting: Its name, as ``model.learning_rate``.
        overrides: One for each value, in the order in which they were given.
        values: The values as numbers; None where they are not all numbers, and so have no order.
    """

    setting: str
    overrides: tuple[str, ...]
    values: tuple[float, ...] | None

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Read an override with several values, as Hydra's ``--multirun`` takes them.

        Example:
            >>> Axis.parse("model.betas=[0.9,0.999],[0.0,0.999]").overrides
            ('model.betas=[0.9,0.999]', 'model.betas=[0.0,0.999]')

        Raises:
            ValueError: It is no such override.
        """
        try:
            override = OverridesParser.create().parse_override(text)
            if not override.is_discrete_sweep():
                raise ValueError(f"--sweep {text}: give several values, as in model.learning_rate=0.003,0.01")
            written = list(dict.fromkeys(override.sweep_string_iterator()))
        except HydraException as error:
            raise ValueError(f"--sweep {text}: {error}") from error
        overrides = tuple(f"{override.get_key_element()}={value}" for value in written)
        try:
            return cls(override.key_or_group, overrides, tuple(float(value) for value in written))
        except ValueError:
            return cls(override.key_or_group, overrides, None)


def combinations(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Every combination of values; without any axis the one that sets nothing."""
    return list(itertools.product(*(axis.overrides for axis in axes)))


def choose(
    axes: Sequence[Axis], trials: Mapping[tuple[str, ...], Mapping[str, Any] | None], seed: int
) -> tuple[tuple[str, ...], dict[str, str], str]:
    """Take the best combination of values.

    Args:
        axes: The settings that were swept.
        trials: For each combination the content of ``result.json``; None for a run that failed or is missing.
        seed: That of all these runs.

    Returns:
        The overrides that won; the values that won, by setting, with a word at those that lie at an edge; and how they
        won, in words.

    Raises:
        ValueError: No run has a validation figure.
    """
    results = {swept: result for swept, result in trials.items() if result is not None}
    if not results:
        raise ValueError("no value of the sweep has a result to go by, so the other seeds are left out")
    metric = main_metric(name for result in results.values() for name in result["metrics"])
    found: dict[tuple[str, ...], float] = {
        swept: quality
        for swept, result in results.items()
        if (quality := result["metrics"].get(f"val/{metric}")) is not None
    }
    if not found:
        raise ValueError(f"no value of the sweep has a finite val/{metric}, so the other seeds are left out")
    best = (max if higher_is_better(metric) else min)(found, key=lambda swept: found[swept])
    figures = ", ".join(f"{quality:.4f} at {' '.join(swept)}" for swept, quality in found.items())
    note = f"val/{metric} of seed {seed} is {figures}"
    if len(found) < len(trials):
        note += f"; {len(trials) - len(found)} of {len(trials)} values have none"
    values = {}
    for axis, override in zip(axes, best, strict=True):
        values[axis.setting] = override.partition("=")[2]
        # Settings that are not numbers have no order, and so no edge.
        value = None if axis.values is None else axis.values[axis.overrides.index(override)]
        if value is not None and len(axis.values) > 1 and value in (min(axis.values), max(axis.values)):
            values[axis.setting] += " (edge)"
            beyond = "below" if value == min(axis.values) else "above"
            note += f"; the best lies at the edge of the sweep, for {axis.setting} {beyond} {value:g} was not tried"
    return best, values, note
