"""Shows the shared weights to callbacks and evaluations, while each rank trains weights of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_dct.callbacks.requirements import AVERAGING, InternalCallback


class SharedWeightsView(InternalCallback):
    """Show the shared weights to validation, weight averaging, the user's callbacks and everything after fit.

    ``DCTStrategy`` adds two of them: one before all other callbacks opens the view, and one after them closes it. Every
    rank continues from what a callback writes into the shared weights. The model holds the rank's own weights during
    ``training_step``, backward, the optimizer step and the hooks of the LightningModule.

    Args:
        opens: Whether this is the one before all others.
    """

    def __init__(self, opens: bool) -> None:
        self.opens = opens
        # Set only if a callback reads weights then, because opening the view takes time in every step.
        self.on_train_batch_end: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out whether a callback reads weights when a batch ends."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self.on_train_batch_end = self._change if any(_reads_weights(callback) for callback in callbacks) else None

    def _change(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Open or close the view."""
        updates: Any = getattr(trainer.strategy, "updates", None)
        if updates is not None:
            (updates.weights.show if self.opens else updates.weights.hide)()

    on_train_epoch_start = on_train_epoch_end = _change

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the view. The strategy closes it after the validation; after training it stays open."""
        strategy: Any = trainer.strategy
        if self.opens and getattr(strategy, "updates", None) is not None and strategy.is_fitting:
            strategy.updates.begin_evaluation()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply updates in flight, so that the final weights have them, and open the view."""
        strategy: Any = trainer.strategy
        if self.opens and getattr(strategy, "updates", None) is not None and strategy.is_fitting:
            strategy.updates.apply_all()
        self.on_validation_start(trainer, pl_module)


def _reads_weights(callback: Callback) -> bool:
    if isinstance(callback, AVERAGING):
        return True
    known = type(callback).__module__.startswith(("lightning.pytorch.", "lightning_dct."))
    return not known and type(callback).on_train_batch_end is not Callback.on_train_batch_end
