"""Lets ranks without further evaluation batches answer the look-ups of the others."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_dct.activations.module import modules_of
from lightning_dct.callbacks.requirements import InternalCallback
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.lightning_private import is_last_of_evaluation


class EvaluationJoin(InternalCallback):
    """Let ranks with unequal numbers of batches validate, test and predict with sharded embedding tables.

    After its last batch a rank answers the others until all are done. This comes before Lightning reduces logged
    values, which takes all ranks. A rank without any batch, on which Lightning runs no loop, answers when the stage is
    torn down. ``DCTStrategy`` adds this callback, before all others.
    """

    def __init__(self) -> None:
        self._is_due = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """An evaluation outside fit ends in one round of answers."""
        self._is_due = stage != "fit"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """So does a validation within fit."""
        self._is_due = True

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        """Answer after the last batch."""
        if is_last_of_evaluation(trainer):
            self._finish(trainer, pl_module)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str = "") -> None:
        if self._is_due:
            self._is_due = False
            for module in modules_of(pl_module, ShardedEmbeddingBags).values():
                module.finish_evaluation()  # of all the model's tables together
                return

    # Lightning may not know which batch is the last, and a rank may have no batch at all.
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = teardown = _finish
