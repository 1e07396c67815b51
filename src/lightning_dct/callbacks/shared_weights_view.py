"""Shows the shared weights to callbacks and evaluations, where each rank trains weights of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_dct.callbacks.requirements import AVERAGING, InternalCallback


class SharedWeightsView(InternalCallback):
    """Let validation, weight averaging, callbacks of the user and what follows fit see the weights all ranks share.

    ``DCTStrategy`` adds two of them: one before all other callbacks, which opens the view, and one behind them, which
    closes it. What a callback writes into the shared weights is what every rank trains on from. A rank's own weights
    stand in the model while ``training_step``, backward and the optimizer run, and for hooks of the LightningModule.

    Args:
        opens: Whether this is the one in front.
    """

    def __init__(self, opens: bool) -> None:
        self.opens = opens
        self._is_wanted = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out whether anybody looks at weights when a batch ends: opening the view takes time in every step."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._is_wanted = any(_looks_at_weights(callback) for callback in callbacks)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open or close the view."""
        self._turn(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open or close the view."""
        self._turn(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Open or close the view."""
        if self._is_wanted:
            self._turn(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the view. The strategy closes it when all hooks of the validation are through."""
        if self.opens:
            self._show(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the view for good."""
        if self.opens:
            self._show(trainer)

    def _turn(self, trainer: pl.Trainer) -> None:
        updates: Any = getattr(trainer.strategy, "updates", None)
        if updates is not None:
            if self.opens:
                updates.weights.show()
            else:
                updates.weights.hide()

    def _show(self, trainer: pl.Trainer) -> None:
        strategy: Any = trainer.strategy
        if getattr(strategy, "updates", None) is not None and strategy.is_fitting:
            strategy.updates.average_buffers()
            strategy.updates.weights.show()


def _looks_at_weights(callback: Callback) -> bool:
    if isinstance(callback, AVERAGING):
        return True
    known = type(callback).__module__.startswith(("lightning.pytorch.", "lightning_dct."))
    return not known and type(callback).on_train_batch_end is not Callback.on_train_batch_end
