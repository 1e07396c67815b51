"""Refreshes the thresholds at a fixed interval of optimizer steps, on the same step on every rank."""

from typing import Any

import lightning.pytorch as pl

from lightning_dct.callbacks.requirements import require_dct
from lightning_dct.config import check_integer


class ThresholdRefresh(pl.Callback):
    """Refresh the thresholds periodically (Gupta et al., KDD 2021, section 3).

    Steps are counted as completed synchronisations: one for each optimizer step, whatever ``accumulate_grad_batches``
    is and however many optimizers there are. The count is saved with the checkpoint, so a resumed run refreshes on the
    same steps as an uninterrupted one.

    ``DCTStrategy`` adds this callback with its own ``refresh_every`` if the Trainer has none. A callback of the user
    takes precedence over that setting.

    Args:
        every_n_steps: Optimizer steps from one refresh to the next, at least 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        check_integer("ThresholdRefresh(every_n_steps)", every_n_steps, minimum=1)
        self.every_n_steps = every_n_steps

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies without thresholds, with a MisconfigurationException."""
        require_dct(trainer, self)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Request a refresh when one is due; the next synchronisation performs it."""
        strategy: Any = trainer.strategy
        synchronizer = strategy.synchronizer
        for module in strategy.activation_modules:
            module.advance(synchronizer.synchronisations)
        if synchronizer.steps_since_refresh >= self.every_n_steps:
            synchronizer.request_refresh()
