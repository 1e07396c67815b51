"""Switches between two densities: the high one while gradients change much, the low one while they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.callbacks.requirements import require_dct, synchronizer_of
from lightning_dct.config import check_density, check_integer
from lightning_dct.synchronizing import parameter_names


class AccordionSchedule(pl.Callback):
    """Choose between two densities by critical learning regimes.

    Agarwal et al., *Adaptive Gradient Communication via Critical Learning Regime Identification*, MLSys 2021,
    algorithm 1.

    ``D`` is the sum of the synchronised gradients over an interval. The next interval is critical, and sends at the
    density ``high``, when

        | |D_previous| - |D| |  >=  threshold * |D_previous|        or the learning rate drops

    and sends at ``low`` otherwise. The first two are critical. The paper decides for each layer, this callback for
    the whole model. The paper's learning rates fall in steps. A rate that falls a little all the time must not keep
    every interval critical, so a drop is one by at least the share ``threshold`` between the beginnings of two
    intervals.

    A residual arrives in a later interval than it belongs to, mostly where the density changes. An interval should be
    many times ``1 / low`` steps long, or each switch looks like a change of the gradients.

    All ranks have the same synchronised gradients, so they decide alike without communication. The sum takes as much
    memory as the gradients in fp32. Checkpoints contain the sum, its norm and the density. Parameters in
    ``density_per_parameter`` keep their densities, and warm-up falls to the current density.

    Args:
        low: Density while little changes, in (0, 1].
        high: Density in critical intervals, at least ``low``.
        threshold: Smallest relative change of the norm that makes an interval critical, in (0, 1).
        every_n_steps: Optimizer steps in an interval; None for an epoch.
    """

    def __init__(self, low: float, high: float, threshold: float = 0.5, every_n_steps: int | None = None) -> None:
        check_density("AccordionSchedule(low)", low)
        check_density("AccordionSchedule(high)", high)
        if low > high:
            raise ValueError(f"`AccordionSchedule` has low={low}, high={high}. `low` must not be above `high`.")
        if not 0.0 < threshold < 1.0:
            raise ValueError(f"`AccordionSchedule(threshold)` must be in (0, 1), such as 0.5; got {threshold!r}.")
        if every_n_steps is not None:
            check_integer("AccordionSchedule(every_n_steps)", every_n_steps, minimum=1)
        self.low, self.high, self.threshold, self.every_n_steps = low, high, threshold, every_n_steps
        self.density = high
        # The beginning of this interval, in steps or epochs (-1 before the first), and the learning rates there.
        self._begun = -1
        self._rates: list[float] = []
        self._previous_norm: float | None = None
        self._sum: dict[str, Tensor] = {}
        self._synchronised_before = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies without gradients of the whole model."""
        require_dct(trainer, self, replicas=True, gradients=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the density of the current interval."""
        synchronizer_of(trainer).set_density(self.density)
        self._begun = min(self._begun, self._now(trainer))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the next interval when one is over."""
        synchronizer = synchronizer_of(trainer)
        self._synchronised_before = synchronizer.synchronisations
        now = self._now(trainer)
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if self._begun >= 0:
            if now - self._begun < (self.every_n_steps or 1):
                return
            self._decide(rates)
            synchronizer.set_density(self.density)
        self._begun, self._rates = now, rates

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the synchronised gradients to the interval's sum, unless a loss scaler skips the step."""
        if synchronizer_of(trainer).synchronisations == self._synchronised_before:
            return
        names = parameter_names(pl_module)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            gradient = parameter.grad
            # Sparse gradients are not compressed, and those of sharded tables differ between ranks.
            if gradient is not None and not gradient.is_sparse:
                name = names[parameter]
                if name not in self._sum:
                    self._sum[name] = torch.zeros_like(gradient, dtype=torch.float32)
                self._sum[name] = self._sum[name].to(gradient.device).add_(gradient)

    def state_dict(self) -> dict[str, Any]:
        """The density, and what this and the next decision are based on; the same on every rank."""
        return {
            "density": self.density,
            "begun": self._begun,
            "rates": self._rates,
            "previous_norm": self._previous_norm,
            "sum": {name: tensor.cpu() for name, tensor in self._sum.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the interval."""
        self.density = state_dict["density"]
        self._begun, self._rates = state_dict["begun"], list(state_dict["rates"])
        self._previous_norm, self._sum = state_dict["previous_norm"], dict(state_dict["sum"])

    def _decide(self, rates: Sequence[float]) -> None:
        squares = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in self._sum.values()]
        norm = math.sqrt(sum(squares))
        dropped = any(
            now <= (1.0 - self.threshold) * before for now, before in zip(rates, self._rates, strict=False) if before
        )
        settled = (
            self._previous_norm is not None
            and abs(self._previous_norm - norm) < self.threshold * self._previous_norm
            and not dropped
        )
        self.density = self.low if settled else self.high
        self._previous_norm, self._sum = norm, {}

    def _now(self, trainer: pl.Trainer) -> int:
        return trainer.current_epoch if self.every_n_steps is None else synchronizer_of(trainer).synchronisations
