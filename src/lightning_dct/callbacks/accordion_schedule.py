"""Sends more while gradients change much, and less while they do not: two densities, switched as training goes."""

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
    """Two densities, by critical learning regimes.

    Agarwal et al., *Adaptive Gradient Communication via Critical Learning Regime Identification*, MLSys 2021,
    algorithm 1.

    With ``D`` the sum of the synchronised gradients over an interval, the next interval is critical, and sends at the
    density ``high``, when

        | |D_previous| - |D| |  >=  threshold * |D_previous|        or the learning rate drops

    and sends at ``low`` otherwise. The first two are critical. The paper decides layer by layer; here the model is one.
    Its learning rates fall in steps. So that one that falls a little all the time does not keep every interval
    critical, a drop is one by at least the share ``threshold`` from one interval's beginning to the next.

    What is held back arrives in a later interval than it belongs to, and most of it where the density changes. Let an
    interval be many times ``1 / low`` steps long, or each switch looks like a change of the gradients.

    All ranks hold the same synchronised gradients, so all decide alike and nothing is sent for it. The sum takes as
    much memory as the gradients in fp32, and is saved with checkpoints, as are norm and density. Parameters that
    ``density_per_parameter`` names keep their densities, and warm-up falls to the density of the moment.

    Args:
        low: Density while little changes, in (0, 1].
        high: Density in critical intervals, at least ``low``.
        threshold: Relative change of the norm from which on an interval is critical, in (0, 1).
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
        # Where the present interval has begun, in steps or epochs, and the learning rates there; -1 before the first.
        self._begun = -1
        self._rates: list[float] = []
        self._previous_norm: float | None = None
        self._sum: dict[str, Tensor] = {}
        self._synchronised_before = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies whose density there is nothing to do about."""
        require_dct(trainer, self, replicas=True, gradients=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take up the density of the interval under way."""
        synchronizer_of(trainer).set_density(self.density)
        self._begun = min(self._begun, self._now(trainer))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin another interval where one is over."""
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
        """Add the synchronised gradients to those of the interval, unless a loss scaler is about to skip the step."""
        if synchronizer_of(trainer).synchronisations == self._synchronised_before:
            return
        names = parameter_names(pl_module)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            gradient = parameter.grad
            # Sparse gradients are not compressed; those of sharded tables are this rank's alone.
            if gradient is not None and not gradient.is_sparse:
                name = names[parameter]
                if name not in self._sum:
                    self._sum[name] = torch.zeros_like(gradient, dtype=torch.float32)
                self._sum[name] = self._sum[name].to(gradient.device).add_(gradient)

    def state_dict(self) -> dict[str, Any]:
        """The density, what it was decided by, and what the next decision has so far; the same on every rank."""
        return {
            "density": self.density,
            "begun": self._begun,
            "rates": self._rates,
            "previous_norm": self._previous_norm,
            "sum": {name: tensor.cpu() for name, tensor in self._sum.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the interval that was under way."""
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
