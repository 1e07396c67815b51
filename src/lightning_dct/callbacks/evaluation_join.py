"""Keeps ranks that have run out of evaluation batches answering those that have not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_dct.callbacks.requirements import InternalCallback
from lightning_dct.embedding.hosting import find_tables


class EvaluationJoin(InternalCallback):
    """Let ranks with unequal numbers of batches validate, test and predict with sharded embedding tables.

    After its last batch a rank answers the others until all are through. That comes before Lightning reduces what was
    logged, which wants all ranks together. A rank without any batch, on which Lightning runs no loop at all, answers
    when the stage is torn down. ``DCTStrategy`` adds this callback, before all others.
    """

    def __init__(self) -> None:
        self._is_due = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """An evaluation of its own ends in one round of answers."""
        self._is_due = stage != "fit"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation within fit does so too."""
        self._is_due = True

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Answer after the last batch."""
        self._finish_after_last_batch(trainer, pl_module)

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Answer after the last batch."""
        self._finish_after_last_batch(trainer, pl_module)

    def on_predict_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Answer after the last batch."""
        self._finish_after_last_batch(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Answer when the last batch was not known to be the last."""
        self._finish(pl_module)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Answer when the last batch was not known to be the last."""
        self._finish(pl_module)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Answer when the last batch was not known to be the last."""
        self._finish(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Answer on a rank that had no batches."""
        self._finish(pl_module)

    def _finish_after_last_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop: Any = trainer._active_loop  # of this evaluation, also within fit
        if loop.batch_progress.is_last_batch:
            self._finish(pl_module)

    def _finish(self, pl_module: pl.LightningModule) -> None:
        if not self._is_due:
            return
        self._is_due = False
        for module in find_tables(pl_module).values():
            module.finish_evaluation()  # of all the model's tables together
            return
