"""What a Trainer has that callbacks and strategies need: a strategy of ours, settings, and the length of its run."""

import math
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks

from lightning_dct.law import COUNTED, RunLength

LIGHTNINGS_EPOCHS = 1000  # `max_epochs` of a Trainer that was given no limit
FIRST_COUNTED = 16  # batches after which a run's steps are counted first
AVERAGING = (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging)
LIMITS = (
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "accumulate_grad_batches", "gradient_clip_val"),
    *("gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "precision"),
)


def trainer_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """Settings that must not differ between ranks, by the name that a user gives them."""
    found = {f"Trainer({name})": getattr(trainer, name) for name in LIMITS}
    return {**found, "automatic_optimization": trainer.lightning_module.automatic_optimization}


def run_length(trainer: pl.Trainer) -> RunLength:
    """How long a fit is. For steps that are not known Lightning says -1 (data without a length)."""
    steps, epochs, most = float(trainer.estimated_stepping_batches), trainer.max_epochs or -1, trainer.max_steps
    steps = math.inf if steps < 0 else steps
    batches = float(trainer.num_training_batches) * (math.inf if epochs < 0 else epochs)
    unknown = "" if trainer.lightning_module.automatic_optimization else COUNTED
    if unknown and most > 0:  # of all optimizers together
        steps = min(steps, most / max(1, len(trainer.optimizers)))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.GradientAccumulationScheduler) and math.isfinite(batches):
            each = map(callback.get_accumulate_grad_batches, range(epochs))
            steps = sum(math.ceil(trainer.num_training_batches / accumulated) for accumulated in each)
            steps, batches = min(steps, most if most > 0 else math.inf), 0.0
        if isinstance(callback, callbacks.EarlyStopping | callbacks.Timer):
            unknown = f"`{type(callback).__name__}` may end it"
    if epochs == LIGHTNINGS_EPOCHS and most < 0 and unknown in ("", COUNTED):
        unknown = f"max_epochs={epochs} is what Lightning takes for a run without any limit"
    return RunLength(steps, unknown, batches)


def share_done(trainer: pl.Trainer, batches: float) -> float:
    """The share of a fit that is done, after 16, 32, 64 ... batches, where steps are counted.

    Elsewhere, and if nothing bounds the fit, it is 0.
    """
    done = trainer.fit_loop.epoch_loop.total_batch_idx
    if not batches or done < FIRST_COUNTED or done & (done - 1):
        return 0.0
    limits = ((trainer.global_step, trainer.max_steps), (trainer.current_epoch, trainer.max_epochs or 0))
    return max(done / batches, *(reached / most for reached, most in limits if most > 0))


def require_dct(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Refuse strategies of other packages."""
    strategy = trainer.strategy
    if not hasattr(strategy, "synchronizer"):
        raise MisconfigurationException(
            f"`{type(callback).__name__}` needs `Trainer(strategy='dct')` or a `DCTStrategy`; this Trainer's"
            f" strategy is {type(strategy).__name__}. Change the strategy or remove the callback."
        )
