"""What this package's callbacks have in common: the strategies they work with, and how little they cost."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks

from lightning_dct.gradients import GradientSynchronizer, Synchronizer

# What averages weights. Lightning before 2.6 has the first of them only.
AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)

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
    """A callback that a strategy adds by itself. It takes no time for the hooks it does not define.

    Lightning enters a profiler for each hook of each callback, empty ones included: a tenth of a small model's step.
    It skips hooks that are not callable.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in _STEP_HOOKS:
            if getattr(cls, hook) is getattr(pl.Callback, hook):
                setattr(cls, hook, None)


def require_dct(trainer: pl.Trainer, callback: pl.Callback, replicas: bool = False, gradients: bool = False) -> None:
    """Refuse strategies that a callback does not work with.

    Args:
        trainer: Whose strategy it is.
        callback: The callback.
        replicas: Whether it needs every rank to have the whole model, which stages and shards have not.
        gradients: Whether it needs gradients to be what is exchanged.

    Raises:
        MisconfigurationException: The Trainer's strategy is not one of this package's, spreads the model over
            ranks, or exchanges something else.
    """
    name, strategy = type(callback).__name__, trainer.strategy
    if not hasattr(strategy, "synchronizer"):
        raise MisconfigurationException(
            f"`{name}` needs `Trainer(strategy='dct')` or a `DCTStrategy`; this Trainer's strategy is"
            f" {type(strategy).__name__}. Change the strategy or remove the callback."
        )
    if gradients and strategy.config.compress != "gradients":  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"`{name}` acts on gradients that are held back, and this strategy exchanges what weights have moved. Use"
            " `DCTStrategy(compress='gradients')`, or remove the callback."
        )
    if replicas and getattr(strategy, "stages", 1) > 1:
        raise MisconfigurationException(
            f"`{name}` decides by the gradients of the whole model, of which the ranks of a `{type(strategy).__name__}`"
            " have a part each. Use a `DCTStrategy`, or remove the callback."
        )


def synchronizer_of(trainer: pl.Trainer) -> Synchronizer:
    """What synchronises the ranks of a Trainer that trains with one of this package's strategies."""
    synchronizer: Synchronizer = trainer.strategy.synchronizer  # type: ignore[attr-defined]
    return synchronizer


def gradient_synchronizer_of(trainer: pl.Trainer) -> GradientSynchronizer:
    """The same, where gradients are what is exchanged."""
    synchronizer = synchronizer_of(trainer)
    assert isinstance(synchronizer, GradientSynchronizer)
    return synchronizer
