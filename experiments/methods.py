"""Published methods that act on the exchange of gradients, as callbacks to compare with.

Both need ``DCTStrategy(compress="gradients")``. They build on its synchronizer: its density, and its residuals.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.callbacks.requirements import require_dct
from lightning_dct.compress.bucket_plan import real_dtype, real_numel
from lightning_dct.config import check_density, check_integer
from lightning_dct.exchange.collectives import all_reduce_mean
from lightning_dct.sync.setup import parameter_names


class AccordionSchedule(Callback):
    """Choose between two densities by critical learning regimes.

    Agarwal et al., *Adaptive Gradient Communication via Critical Learning Regime Identification*, MLSys 2021,
    algorithm 1. ``D`` is the sum of the synchronised gradients over an interval. The next interval is critical, and
    sends at the density ``high``, when

        | |D_previous| - |D| |  >=  threshold * |D_previous|        or the learning rate drops

    and sends at ``low`` otherwise. The first two are critical. The paper decides for each layer, this callback for
    the whole model. A drop of the learning rate is at least the share ``threshold`` between the beginnings of two
    intervals, so that a slowly falling rate does not keep every interval critical.

    All ranks have the same synchronised gradients, so they decide alike without communication. An interval should be
    many times ``1 / low`` steps long, because a residual arrives in a later interval.

    Args:
        low: Density outside critical intervals, in (0, 1].
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

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Refuse strategies without gradients of the whole model."""
        _require_gradients(trainer, self)
        if getattr(trainer.strategy, "stages", 1) > 1:
            raise MisconfigurationException(
                "`AccordionSchedule` needs the gradients of the whole model, and each rank of a pipeline has a part of"
                " them. Use a `DCTStrategy`, or remove the callback."
            )

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        _set_density(trainer, self.density)
        self._begun = min(self._begun, self._now(trainer))

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int) -> None:
        """Begin the next interval when one is over."""
        self._synchronised_before = trainer.strategy.synchronizer.synchronisations
        now = self._now(trainer)
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if self._begun >= 0:
            if now - self._begun < (self.every_n_steps or 1):
                return
            self._decide(rates)
            _set_density(trainer, self.density)
        self._begun, self._rates = now, rates

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Add the synchronised gradients to the interval's sum, unless a loss scaler skips the step."""
        if trainer.strategy.synchronizer.synchronisations == self._synchronised_before:
            return
        names = parameter_names(module)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            # Sparse gradients are not compressed, and those of sharded tables differ between ranks.
            if (gradient := parameter.grad) is not None and not gradient.is_sparse:
                name = names[parameter]
                before = self._sum.get(name, torch.zeros_like(gradient, dtype=torch.float32))
                self._sum[name] = before.to(gradient.device).add_(gradient)

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
        self.density = state_dict["density"]
        self._begun, self._rates = state_dict["begun"], list(state_dict["rates"])
        self._previous_norm, self._sum = state_dict["previous_norm"], dict(state_dict["sum"])

    def _decide(self, rates: list[float]) -> None:
        norm = math.hypot(*(float(tensor.norm(dtype=torch.float64)) for tensor in self._sum.values()))
        before = self._previous_norm
        settled = before is not None and abs(before - norm) < self.threshold * before
        dropped = any(
            now <= (1.0 - self.threshold) * then for now, then in zip(rates, self._rates, strict=False) if then
        )
        self.density = self.low if settled and not dropped else self.high
        self._previous_norm, self._sum = norm, {}

    def _now(self, trainer: Trainer) -> int:
        return trainer.current_epoch if self.every_n_steps is None else trainer.strategy.synchronizer.synchronisations


class ErrorAveraging(Callback):
    """Average residuals over the ranks (Xu and Huang, *Step-Ahead Error Feedback*, AAAI 2021, section 4).

        e_r  =  (1/W) * sum over ranks of e        every ``every_n_steps`` optimizer steps

    Ranks whose residuals have grown apart send different entries, and an entry that one rank alone sends moves the
    weights by only ``1 / W`` of its value. The model receives the same in the end, because residuals enter it as their
    mean. With ``exchange="sharded"`` the residuals of owned sums stay as they are, because each has one holder.

    The average is a dense all-reduce of the compressed tensors, counted as traffic: at 1% density, bf16 and two ranks,
    one in 1000 steps adds an eighth to the bytes.

    Args:
        every_n_steps: Optimizer steps from one average to the next, at least 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        check_integer("ErrorAveraging(every_n_steps)", every_n_steps, minimum=1)
        self.every_n_steps = every_n_steps
        self._synchronised_before = 0

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Refuse strategies that exchange no gradients, and nodes that send as one."""
        _require_gradients(trainer, self)
        if trainer.strategy.config.exchange == "by_node":
            raise MisconfigurationException("`ErrorAveraging` needs residuals of ranks: use `exchange='all_gather'`.")

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int) -> None:
        self._synchronised_before = trainer.strategy.synchronizer.synchronisations

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Average when it is due; a collective call."""
        synchronizer, every = trainer.strategy.synchronizer, self.every_n_steps
        if synchronizer.synchronisations // every == self._synchronised_before // every:
            return
        everyone = synchronizer.exchange.everyone
        for parameter, name in synchronizer.parameter_names.items():
            plan = synchronizer.plans.of((name,), (real_numel(parameter),), real_dtype(parameter))
            if parameter.requires_grad and not plan.is_dense:
                residual = synchronizer.residuals.view(name)
                if residual is None:
                    residual = synchronizer.residuals.flat((name,), plan.sizes, plan.residual_dtype, parameter.device)
                all_reduce_mean(residual, everyone).wait()


def _require_gradients(trainer: Trainer, callback: Callback) -> None:
    require_dct(trainer, callback)
    if trainer.strategy.config.compress != "gradients":
        raise MisconfigurationException(
            f"`{type(callback).__name__}` acts on the residuals of gradients, and this strategy exchanges updates. Use"
            " `DCTStrategy(compress='gradients')`, or remove the callback."
        )


def _set_density(trainer: Trainer, density: float) -> None:
    """Change the density from the next exchange on, on all ranks between the same two exchanges."""
    synchronizer = trainer.strategy.synchronizer
    synchronizer.plans.change(replace(synchronizer.config, density=density))
