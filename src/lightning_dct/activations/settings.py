"""The settings of a split point: one frozen dataclass, checked once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_dct.config import check_choice, check_density, check_integer
from lightning_dct.warmup import WARMUP_SCHEDULES, WarmupSchedule

Scope = Literal["tensor", "group", "sample"]
SelectBy = Literal["magnitude", "magnitude_times_gradient"]
RowFormat = Literal["fp32", "bf16", "int8", "int4", "int2"]
SCOPES: tuple[str, ...] = get_args(Scope)
SELECTIONS: tuple[str, ...] = get_args(SelectBy)
ROW_FORMATS: tuple[str, ...] = get_args(RowFormat)


@dataclass(frozen=True)
class SplitSettings:
    """What of the activations is sent, its format, and when the thresholds are selected anew.

    Attributes:
        density: Share of the activations that is sent, in (0, 1]. 1.0 sends every entry and no positions.
        scope: What has a threshold of its own: the whole ``"tensor"``, each ``"group"`` of it (such as each table of
            pooled embeddings ``[batch, tables, width]``) or each ``"sample"`` (index of dimension 0). Thresholds of
            samples are not remembered: every step selects their largest entries exactly, which takes longer.
        group_dim: The dimension that is cut into groups, for ``scope="group"``. Negative numbers count from the end.
        groups: The number of groups of equal size; None makes each index a group.
        select_by: What a threshold applies to: the ``"magnitude"`` ``|h|``, or ``"magnitude_times_gradient"``, which is
            ``|h| * m`` with the running mean ``m`` of the gradients' magnitudes in the entry's column (the last
            dimension). With ``scope="group"`` each group has its own columns, and all groups share one threshold,
            because these scores are comparable. See :mod:`lightning_dct.activations.gradient_means`.
        refresh_every: Optimizer steps between two exact selections of the thresholds.
        warmup_steps: Optimizer steps over which the density falls from 1.0 to its target, in ``S = 32`` stages of
            equal length (Lin et al., *Deep Gradient Compression*, ICLR 2018, section 3.4, for gradients).
        warmup_schedule: In stage ``s`` the density is ``density ** (s / S)`` (``"exponential"``) or
            ``1 - (1 - density) * s / S`` (``"linear"``).
        exploration: Share of the entries that a training step sends in addition, chosen at random, in [0, 1): of ``n``
            entries, one from each of ``ceil(exploration * n)`` stretches of equal length. It lets gradients reach
            entries that would stay below the threshold forever. (Zheng et al., *Reducing Communication for Split
            Learning by Randomized Top-k Sparsification*, IJCAI 2023, choose them instead of some of the largest.)
        forward_format: Of the activations: ``"fp32"``, ``"bf16"``, ``"int8"``, ``"int4"`` or ``"int2"`` (one scale per
            row, the last dimension; rounded stochastically in training and to nearest in evaluation).
        backward_format: Of their gradients.
        compress_evaluation: Mask and round in evaluation too. A model trained with the mask is worse without it.
            False sends every entry as fp32 there.
        guard: Nudge each threshold in every step to keep the number of entries above it near its target.
        seed: Seeds all random choices. They depend only on it, on the step and on the data, so a resumed run and a
            recomputed forward repeat them.
    """

    density: float = 0.05
    scope: Scope = "tensor"
    group_dim: int = 1
    groups: int | None = None
    select_by: SelectBy = "magnitude"
    refresh_every: int = 1000
    warmup_steps: int = 0
    warmup_schedule: WarmupSchedule = "exponential"
    exploration: float = 0.0
    forward_format: RowFormat = "bf16"
    backward_format: RowFormat = "bf16"
    compress_evaluation: bool = True
    guard: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_choice("scope", self.scope, SCOPES)
        check_integer("group_dim", self.group_dim, minimum=-64)
        if self.groups is not None:
            check_integer("groups", self.groups, minimum=1)
            if self.scope != "group":
                raise ValueError(
                    f"`groups` applies to scope='group' only, and `scope` is {self.scope!r}. Set scope='group' or"
                    " leave `groups` out."
                )
        check_choice("select_by", self.select_by, SELECTIONS)
        check_integer("refresh_every", self.refresh_every, minimum=1)
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_choice("warmup_schedule", self.warmup_schedule, WARMUP_SCHEDULES)
        if isinstance(self.exploration, bool) or not isinstance(self.exploration, (int, float)):
            raise TypeError(f"`exploration` must be a number in [0, 1), such as 0.02; got {self.exploration!r}.")
        if not 0.0 <= self.exploration < 1.0:
            raise ValueError(
                f"`exploration` is the share of entries sent at random and must be in [0, 1), such as 0.02; got"
                f" {self.exploration!r}."
            )
        check_choice("forward_format", self.forward_format, ROW_FORMATS)
        check_choice("backward_format", self.backward_format, ROW_FORMATS)
        for setting in ("compress_evaluation", "guard"):
            if not isinstance(getattr(self, setting), bool):
                raise TypeError(f"`{setting}` must be True or False, got {getattr(self, setting)!r}.")
        check_integer("seed", self.seed, minimum=0)
