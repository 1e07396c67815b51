"""Warm-up: a density that falls from 1.0 to its target in stages.

It falls in stages because each new density needs its thresholds selected anew.
"""

from __future__ import annotations

from typing import Literal, get_args

WarmupSchedule = Literal["exponential", "linear"]

WARMUP_SCHEDULES: tuple[str, ...] = get_args(WarmupSchedule)
WARMUP_STAGES = 32


def warmup_stage(step: int, warmup_steps: int) -> int:
    """The stage an optimizer step belongs to, from 0 to ``WARMUP_STAGES`` (warm-up is over).

    Args:
        step: Completed optimizer steps, from 0.
        warmup_steps: How many of them warm-up lasts; 0 for none.
    """
    return WARMUP_STAGES if step >= warmup_steps else WARMUP_STAGES * step // warmup_steps


def warmup_density(target: float, stage: int, schedule: str) -> float:
    """The density in a stage of warm-up.

    Args:
        target: The density once warm-up is over, in (0, 1].
        stage: From 0 (everything is sent) to ``WARMUP_STAGES``.
        schedule: ``"exponential"`` (by a constant factor a stage; Lin et al., *Deep Gradient Compression*, ICLR
            2018, section 3.4) or ``"linear"``.
    """
    progress = stage / WARMUP_STAGES
    if schedule == "linear":
        return (1.0 - progress) + target * progress
    return float(target**progress)
