"""The common part of this package's callbacks: strategies they accept, the run's length, hooks that take no time."""

import math
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

AVERAGING = (StochasticWeightAveraging, WeightAveraging)

# Hooks that Lightning calls in every training step.
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class InternalCallback(pl.Callback):
    """A callback that a strategy adds. Hooks that it does not define take no time.

    Lightning enters a profiler for every hook of every callback, also an empty one, which takes a tenth of a small
    model's step. It skips hooks that are not callable.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in _STEP_HOOKS:
            if getattr(cls, hook) is getattr(pl.Callback, hook):
                setattr(cls, hook, None)


LIMITS = (
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "accumulate_grad_batches", "gradient_clip_val"),
    *("gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "precision"),
)
"""Settings of a Trainer by which ranks would do unequal things."""


def trainer_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """Those settings, by the name that a user gives them."""
    found = {f"Trainer({name})": getattr(trainer, name) for name in LIMITS}
    return {**found, "automatic_optimization": trainer.lightning_module.automatic_optimization}


def expected_steps(trainer: pl.Trainer) -> float:
    """Optimizer steps of a fit; infinite if it is not known, for which Lightning says -1 (data without a length)."""
    steps = float(trainer.estimated_stepping_batches)
    return math.inf if steps < 0 else steps


def require_dct(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Refuse strategies of other packages."""
    strategy = trainer.strategy
    if not hasattr(strategy, "synchronizer"):
        raise MisconfigurationException(
            f"`{type(callback).__name__}` needs `Trainer(strategy='dct')` or a `DCTStrategy`; this Trainer's"
            f" strategy is {type(strategy).__name__}. Change the strategy or remove the callback."
        )
