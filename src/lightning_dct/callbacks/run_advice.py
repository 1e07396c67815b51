"""Advice for a run: what does not fit before it begins, and at the end what its steps took and could take."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dct.callbacks.advice import closing_line, notes_at_start
from lightning_dct.callbacks.requirements import InternalCallback, require_dct
from lightning_dct.callbacks.step_clock import StepClock
from lightning_dct.forecast.link import MeasuredLink, measure_link
from lightning_dct.gradients.plan import real_numel
from lightning_dct.traffic import FP32_BYTES, TrafficTotals


class RunAdvice(InternalCallback):
    """Sentences at the beginning of fit and at its end; ``DCTStrategy`` adds this callback.

    Before the first step all ranks time all-reduces of up to 1 MiB for a moment, so that the end can say how long the
    dense all-reduce would have taken on the same link. It says nothing about runs of a few steps.
    """

    def __init__(self) -> None:
        self._clock = StepClock()
        self._link: MeasuredLink | None = None
        self._before = TrafficTotals()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that are not this package's."""
        require_dct(trainer, self)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what does not fit, and time the link."""
        strategy: Any = trainer.strategy  # Any: one of this package's, which `setup` has seen to
        device = strategy.root_device
        steps = float(trainer.estimated_stepping_batches)
        for note in notes_at_start(strategy.config, trainer.world_size, steps, device.type):
            rank_zero_info(note)
        self._clock, self._before = StepClock(), strategy.traffic.totals
        everyone = strategy.synchronizer.exchange.everyone
        self._link = measure_link(everyone.group, device) if everyone.size > 1 else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the time."""
        strategy: Any = trainer.strategy
        self._clock.after_step(strategy.traffic.totals)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation between two steps is part of neither."""
        self._clock.pause()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Nor is a checkpoint."""
        self._clock.pause()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the closing line, where enough was measured."""
        strategy: Any = trainer.strategy
        costs = self._clock.costs
        if not trainer.is_global_zero or self._link is None or costs is None:
            return
        names = strategy.synchronizer.parameter_names
        dense_bytes = FP32_BYTES * sum(real_numel(p) for p in names if p.requires_grad)
        device = strategy.root_device.type
        print(closing_line(strategy.config, costs, self._link, dense_bytes, device, strategy.dense_rival), flush=True)
