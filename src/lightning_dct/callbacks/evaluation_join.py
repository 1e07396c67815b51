"""Keeps ranks that have run out of evaluation batches answering those that have not."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_dct.embedding import ShardedEmbeddingBags


class EvaluationJoin(pl.Callback):
    """Let ranks with unequal numbers of batches validate, test and predict with sharded embedding tables.

    ``DCTStrategy`` adds it, before all other callbacks.
    """

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on answering until all ranks are through."""
        _finish(pl_module)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on answering until all ranks are through."""
        _finish(pl_module)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on answering until all ranks are through."""
        _finish(pl_module)


def _finish(pl_module: pl.LightningModule) -> None:
    for module in pl_module.modules():
        if isinstance(module, ShardedEmbeddingBags):
            module.finish_evaluation()
