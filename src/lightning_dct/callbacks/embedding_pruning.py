"""Shortens the rows of embedding tables in training, where the tables have not learnt to use them."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dct.activations.module import modules_of
from lightning_dct.callbacks.requirements import require_dct
from lightning_dct.config import check_density, check_integer
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.kept_pieces import INDEX_BYTES_A_ROW, PIECES
from lightning_dct.embedding.pruning import prune
from lightning_dct.embedding.sharded import ShardedEmbeddingBags


class EmbeddingPruning(pl.Callback):
    """Prune the rows of all :class:`~lightning_dct.ShardedEmbeddingBags` once, in the middle of training.

    Each rank keeps those quarters of its rows that matter most. The score of a quarter is how often its row was
    requested, times the squared distance from its initial value (after Luo et al., arXiv 2401.04408). All others go
    back to their initial values, which take no memory, and are not trained any more. The optimizer's state shrinks with
    the rows: ``weight`` then has the shape ``[kept quarters, embedding_dim / 4]``, and ``RowWiseAdagrad`` has one
    number for each. Until then each row takes four more bytes, for the count of its requests.

    Tables in which most rows are rare can lose most of their bytes. Compare your model's metric with and without:
    docs/recommender.md has figures.

    Args:
        keep: Share of the rows' bytes that each rank keeps, in (0, 1], with 1.5 bytes a row to find what is kept.
        at_step: The optimizer step after which rows are pruned: best about half of the run.

    Raises:
        MisconfigurationException: There is nothing to prune, rows cannot be cut into quarters, or the step has passed.
    """

    def __init__(self, keep: float = 0.35, at_step: int = 1000) -> None:
        check_density(
            "EmbeddingPruning(keep)", keep, "the share of the rows' bytes that is kept", "To keep all that has changed"
        )
        check_integer("EmbeddingPruning(at_step)", at_step, minimum=1)
        self.keep, self.at_step = keep, at_step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies without sharded tables."""
        require_dct(trainer, self)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to count requests, unless a checkpoint has brought counts or pruned rows."""
        tables = _tables_of(pl_module)
        if not tables:
            raise MisconfigurationException(
                "`EmbeddingPruning` needs `ShardedEmbeddingBags` in the model, and there are none. Growing tables are"
                " not pruned: set their `max_rows` instead."
            )
        for name, module in tables.items():
            if module.embedding_dim % PIECES:
                raise MisconfigurationException(
                    f"`EmbeddingPruning` cuts rows into {PIECES} pieces, and {name!r} has rows of"
                    f" {module.embedding_dim} entries: choose an `embedding_dim` that {PIECES} divides."
                )
            row_bytes = module.embedding_dim * module.weight.element_size()
            if self.keep * row_bytes <= INDEX_BYTES_A_ROW:
                raise MisconfigurationException(
                    f"`EmbeddingPruning(keep={self.keep})` leaves {self.keep * row_bytes:.1f} bytes for each row of"
                    f" {name!r}, and the index of what is kept takes {INDEX_BYTES_A_ROW} of them: raise `keep`."
                )
            if module.kept is not None or module.row_requests is not None:
                continue
            if _completed_steps(trainer) >= self.at_step:
                raise MisconfigurationException(
                    f"`EmbeddingPruning(at_step={self.at_step})` cannot choose what to keep, because this run is at"
                    f" step {_completed_steps(trainer)} already and has counted no requests. Raise `at_step`."
                )
            module.row_requests = torch.zeros(module.capacity(), dtype=torch.int32)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Prune if it is time."""
        if _completed_steps(trainer) < self.at_step:
            return
        for name, module in _tables_of(pl_module).items():
            if module.kept is None:
                left = prune(module, self.keep, trainer.optimizers)
                rank_zero_info(f"Step {_completed_steps(trainer)}: rank 0 keeps {left:.1%} of the bytes of {name!r}.")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if it was not time in the whole run."""
        if _completed_steps(trainer) < self.at_step and _tables_of(pl_module):
            rank_zero_warn(
                f"`EmbeddingPruning(at_step={self.at_step})` has pruned nothing: the run has ended at step"
                f" {_completed_steps(trainer)}. Lower `at_step`."
            )


def _tables_of(model: pl.LightningModule) -> dict[str, ShardedEmbeddingBags]:
    found = modules_of(model, ShardedEmbeddingBags)
    return {name: module for name, module in found.items() if not isinstance(module, GrowingEmbeddingBags)}


def _completed_steps(trainer: pl.Trainer) -> int:
    return int(trainer.strategy.synchronizer.synchronisations)  # type: ignore[attr-defined]
