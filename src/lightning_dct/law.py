"""Predicts how much loss a run of updates gives up, and chooses the settings with the fewest bytes
within a bound.

    loss in %  =  0.035 k (m / d) g / (S / 1000)  +  max(0.65 (W - 1)^0.65 ((H - 1) / (S / 1000))^0.8,  0.2 log2 H)
                  and at least 0.25 log2(min(W, 4))

``W`` ranks exchange every ``H`` local steps at density ``d``, and make ``S`` optimizer steps; ``m =
min(W - 1, 3)``, and ``g = max(1, min(W, 8) / 4)^2 max(1, W / 8)^0.45``. The first term is for
entries that wait to be sent: ``k`` is 1 if the mean is made as long as the steps, else 2. The
second one is for steps that ranks take apart, which no length makes good. The least is what runs of
10,000 steps and more lost at any density. This is a fit to small language models under AdamW, and
no more: ``docs/evidence/quality.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch

from lightning_dct.compress.bucket_plan import plan_bucket
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.factory import NodeLayout, choose, costs_of

CANDIDATES = (*((1, density) for density in (0.3, 0.2, 0.1, 0.05, 0.03, 0.015)), (2, 0.3), (4, 0.1))
"""Local steps and densities that a run chooses from."""
# What the length of a run chooses, if it is left out.
BY_LENGTH = frozenset({"local_steps", "density"})
BOUND = 1.0  # the loss that a run may give up, in percent
SAFETY_FACTOR = 2.0  # safety factor: a run may lose this many times the loss that the law predicts
ENTRIES = 1 << 20  # of the tensor whose bytes rank the settings
LONGEST = 10**12  # steps of a run that allows everything
# a run of unknown length is assumed to make so many steps, or twice as many as it has made
SHORTEST = 1000
COUNTED = "with manual optimization DCT counts each optimizer's steps"
FEWEST_COUNTED = 8  # steps of an optimizer after which its total can be extrapolated
# in runs of so many steps the mean is plain after this share of them
LONG = 5000
LAST_PART = 0.9
OFF = 0.25  # relative error of the expected number of steps above which settings are chosen again


def expected_loss(config: DCTConfig, ranks: int, steps: float) -> float:
    """Expected excess of the loss over that of plain DDP, in percent, with updates."""
    growth = max(1.0, min(ranks, 8) / 4) ** 2 * max(1.0, ranks / 8) ** 0.45
    waiting = 35 * min(ranks - 1, 3) * growth / config.density / steps
    apart = 0.65 * (ranks - 1) ** 0.65 * (1000 * (config.local_steps - 1) / steps) ** 0.8
    loss = (1 if has_measured_gain(config) else 2) * waiting + max(
        apart, 0.2 * math.log2(config.local_steps)
    )
    return max(loss, 0.25 * math.log2(min(ranks, 4)))


def has_measured_gain(config: DCTConfig) -> bool:
    """Whether means had a gain that was measured, in the runs of the fit: dense and hierarchical
    ones had none.
    """
    return (
        config.exchanges_every_step and config.density < 1.0 and config.exchange != "hierarchical"
    )


def steps_needed(config: DCTConfig, ranks: int) -> float:
    """Optimizer steps that a run needs to stay within the bound, with the safety factor; infinite
    if no length does.
    """
    if SAFETY_FACTOR * expected_loss(config, ranks, math.inf) > BOUND:
        return math.inf
    return bisect_left(
        range(LONGEST),
        -BOUND,
        lo=1,
        key=lambda steps: -SAFETY_FACTOR * expected_loss(config, ranks, steps),
    )


@dataclass(frozen=True)
class UserSettings:
    """The settings that a user has given, with default values of the others; a run's length chooses
    those left out.
    """

    config: DCTConfig
    left_out: frozenset[str] = frozenset()

    @staticmethod
    def of(settings: Mapping[str, Any]) -> UserSettings:
        """The settings of keyword arguments; None stands for a setting that was left out."""
        config = DCTConfig(**settings)
        if config.compress == "gradients":
            return UserSettings(config)
        return UserSettings(
            config, frozenset(name for name in BY_LENGTH if settings.get(name) is None)
        )

    def candidates(self, ranks: int) -> list[DCTConfig]:
        """The settings to choose from, from the most bytes to the fewest; each loses more than the
        one before.
        """

        def cost(one: DCTConfig) -> tuple[float, float]:
            return steps_needed(one, ranks), expected_loss(one, ranks, SHORTEST)

        config = self.config
        found = list[DCTConfig]()
        chosen = list[DCTConfig]()
        for local_steps, density in CANDIDATES:
            # An exchange has to arrive before the next one begins.
            steps = (
                max(local_steps, config.overlap_steps)
                if "local_steps" in self.left_out
                else config.local_steps
            )
            density = density if "density" in self.left_out else config.density
            found.append(replace(config, local_steps=steps, density=density))
        for one in sorted(found, key=lambda one: bytes_sent(one, ranks)):
            if not chosen or cost(one) < cost(chosen[-1]):
                chosen.append(one)
        return chosen[::-1]

    def for_run(self, ranks: int, steps: float) -> DCTConfig:
        """The settings for a run: those with the fewest bytes within the bound, or else those that
        lose least.
        """
        if ranks == 1 or not self.left_out:
            return self.config
        chosen = self.candidates(ranks)
        return next(
            (one for one in reversed(chosen) if steps_needed(one, ranks) <= steps), chosen[0]
        )


class RunLength(NamedTuple):
    """How long a run is; infinite where nothing bounds it."""

    steps: float  # the most that each optimizer makes
    unknown: str = ""  # why there may be fewer; empty if the bound is exact
    batches: float = 0.0  # of the whole run; 0 if steps need no counting


class RunSettings:
    """The settings of a run as it goes on: they fit its length, or send ever fewer bytes if the
    length is not known.

    Each optimizer of ``ranks`` that exchange makes at most ``steps`` steps, fewer for a reason
    ``unknown``.
    """

    def __init__(
        self, user_settings: UserSettings, ranks: int, steps: float, unknown: str = ""
    ) -> None:
        self.user_settings = user_settings
        self.ranks = ranks
        self.steps = steps
        self.unknown = unknown
        self._for_run = cache(partial(user_settings.for_run, ranks))
        # With an overlap, the tensors that take turns depend on the settings that a run begins
        # with.
        self.may_change = user_settings.config.overlap_steps == 0 and bool(user_settings.left_out)

    @property
    def grows(self) -> bool:
        """Whether the settings change with the steps that have been made."""
        return self.may_change and self._is_unknown

    @property
    def _is_unknown(self) -> bool:
        return math.isinf(self.steps) or bool(self.unknown)

    def is_ending(self, steps: int) -> bool:
        """Whether this is the last part of the most steps of a long run, which gains by a plain
        mean of updates.
        """
        return self.unknown != COUNTED and self.steps >= LONG and steps > LAST_PART * self.steps

    def expect(self, steps: int) -> None:
        """Set the expected steps of each optimizer, extrapolated from those made so far."""
        self.steps = steps
        self.unknown = "" if self.unknown == COUNTED else self.unknown

    def is_off(self, counted: int) -> bool:
        """Whether this number of expected steps is far enough from the old one to choose settings
        again.
        """
        is_new = self.unknown == COUNTED or math.isinf(self.steps)
        return self.may_change and (is_new or abs(counted - self.steps) > OFF * self.steps)

    def config_after(self, steps: int) -> DCTConfig:
        """The settings after so many steps; if they grow, others after every ``SHORTEST`` steps."""
        reached = steps // SHORTEST * SHORTEST if self.may_change else 0
        return self._for_run(
            min(self.steps, max(SHORTEST, 2 * reached)) if self._is_unknown else self.steps
        )


def bytes_sent(config: DCTConfig, ranks: int) -> float:
    """The bytes that a rank sends in a step for a tensor of ``ENTRIES``, if every rank is on a node
    of its own.
    """
    return (
        _bytes_of_exchange(config.exchange, config.density, config.value_format, ranks)
        / config.local_steps
    )


@lru_cache(maxsize=1024)
def _bytes_of_exchange(exchange: str, density: float, value_format: str, ranks: int) -> float:
    plan_for = partial(
        plan_bucket, ("tensor",), (ENTRIES,), (density,), torch.float32, value_format, 0
    )
    layout = NodeLayout(tuple((rank, 0) for rank in range(ranks)))
    name = choose(plan_for, layout).name if exchange == "auto" else exchange
    costs = costs_of(plan_for, layout)
    # By node, with several ranks on each: between nodes.
    return costs.get(name, costs["all_gather"])
