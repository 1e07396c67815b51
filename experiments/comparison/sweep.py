"""Tries values of one or several settings for every strategy alike, and takes the best by
validation.

Each combination of values is run with the first seed only. The validation after the last step
decides, never the test part. A best value at the edge of the sweep may not be the best one, so a
note names it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from comparison.table import higher_is_better, main_metric


@dataclass(frozen=True)
class Axis:
    """A setting, an override for each value, and the values as numbers; None if they are not all
    numbers.
    """

    setting: str
    overrides: tuple[str, ...]
    values: tuple[float, ...] | None

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Read an override with several values, as for ``--multirun``; a ValueError if it is no
        such override.

        Example:
            >>> Axis.parse("model.betas=[0.9,0.999],[0.0,0.999]").overrides
            ('model.betas=[0.9,0.999]', 'model.betas=[0.0,0.999]')
        """
        try:
            override = OverridesParser.create().parse_override(text)
            if not override.is_discrete_sweep():
                raise ValueError(
                    f"--sweep {text}: give several values, as in model.learning_rate=0.003,0.01"
                )
            written = list(dict.fromkeys(override.sweep_string_iterator()))
        except HydraException as error:
            raise ValueError(f"--sweep {text}: {error}") from error
        overrides = tuple(f"{override.get_key_element()}={value}" for value in written)
        try:
            return cls(override.key_or_group, overrides, tuple(float(value) for value in written))
        except ValueError:
            return cls(override.key_or_group, overrides, None)


def combinations(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Every combination of values; without an axis a single empty one."""
    return list(itertools.product(*(axis.overrides for axis in axes)))


def choose(
    axes: Sequence[Axis], trials: Mapping[tuple[str, ...], Mapping[str, Any] | None], seed: int
) -> tuple[tuple[str, ...], dict[str, str], str]:
    """Take the best combination of values.

    Args:
        axes: The settings that were swept.
        trials: For each combination the content of ``result.json``; None for a run that failed or
            is missing.
        seed: That of all these runs.

    Returns:
        The best overrides; the best values by setting, marked if they are at an edge; and the
        reason in words.

    Raises:
        ValueError: No run has a validation figure.
    """
    results = {swept: result for swept, result in trials.items() if result is not None}
    if not results:
        raise ValueError(
            "no value of the sweep has a result to go by, so the other seeds are left out"
        )
    metric = main_metric(name for result in results.values() for name in result["metrics"])
    found: dict[tuple[str, ...], float] = {
        swept: quality
        for swept, result in results.items()
        if (quality := result["metrics"].get(f"val/{metric}")) is not None
    }
    if not found:
        raise ValueError(
            f"no value of the sweep has a finite val/{metric}, so the other seeds are left out"
        )
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
        if (
            value is not None
            and len(axis.values) > 1
            and value in (min(axis.values), max(axis.values))
        ):
            values[axis.setting] += " (edge)"
            beyond = "below" if value == min(axis.values) else "above"
            note += (
                f"; the best lies at the edge of the sweep, for {axis.setting} {beyond} {value:g}"
                " was not tried"
            )
    return best, values, note
