"""Trains DLRM on clicks: binary cross-entropy, and the area under the ROC curve as the figure of
merit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from dlrm.model import DLRM, FIXED_TABLES
from lightning_dct import DCTStrategy
from scored import ScoredModule

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""Names that ``model.optimizer`` takes."""
TABLES = ("auto", "replicated", "growing", *FIXED_TABLES)
"""Names that ``model.tables`` takes."""


class ClickModule(ScoredModule):
    """DLRM as Lightning trains it.

    Logs ``train/loss``, and for validation and test ``loss`` (nats), ``auc``, ``accuracy`` under
    ``val/`` and ``test/``. If the data has the true click probability, ``test/best_auc`` is the
    score of that probability on the same rows: the best that a model can reach.

    Args:
        embedding_dim: As ``bottom_sizes`` and ``top_sizes`` those of :class:`dlrm.model.DLRM`.
        optimizer: ``sgd``, ``adagrad`` or ``adam``.
        tables: ``replicated`` (whole tables on every rank, their gradients synchronised),
            ``sharded`` (hybrid parallel: every row on one rank, exchanged as ``exchange`` says),
            ``growing`` (sharded, a row is made when its id comes), ``thresholded`` (sharded and
            masked, as in the paper), ``quantised`` (sharded and rounded, as by TorchRec) or
            ``auto``: sharded under ``DCTStrategy``.
        exchange: Settings of ``lightning_dct.ShardedEmbeddingBags``, of
            ``lightning_dct.GrowingEmbeddingBags``, or of a class of :mod:`dlrm.other_tables`.
        num_dense: As ``table_rows`` read from the data module when None.
    """

    def __init__(
        self,
        embedding_dim: int = 16,
        bottom_sizes: Sequence[int] = (64, 32),
        top_sizes: Sequence[int] = (64, 32),
        optimizer: str = "adagrad",
        learning_rate: float = 0.03,
        tables: str = "auto",
        exchange: Mapping[str, Any] | None = None,
        num_dense: int | None = None,
        table_rows: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if optimizer not in OPTIMIZERS:
            raise ValueError(
                f"model.optimizer={optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
            )
        if tables not in TABLES:
            raise ValueError(f"model.tables={tables!r}: choose one of {', '.join(TABLES)}")
        self.save_hyperparameters()
        self.network: nn.Module | None = None
        scores = MetricCollection({"auc": BinaryAUROC(), "accuracy": BinaryAccuracy()})
        self.metrics = nn.ModuleDict(
            {f"{stage}_metrics": scores.clone(prefix=f"{stage}/") for stage in ("val", "test")}
        )
        self.best_auc = BinaryAUROC()
        if num_dense is not None and table_rows is not None:
            self._build()

    def _build(self) -> None:
        sizes = self.hparams
        self.network = DLRM(
            sizes.num_dense,
            sizes.table_rows,
            sizes.embedding_dim,
            sizes.bottom_sizes,
            sizes.top_sizes,
            None if sizes.tables in ("auto", "replicated") else dict(sizes.exchange or {}),
            sizes.tables,
        )

    def configure_model(self) -> None:
        """Build the network with the data's sizes, once; the sizes then travel in the
        checkpoint.
        """
        if self.network is None:
            if self.hparams.tables == "auto":
                self.hparams.tables = (
                    "sharded" if isinstance(self.trainer.strategy, DCTStrategy) else "replicated"
                )
            self.hparams.num_dense = self.trainer.datamodule.num_dense
            self.hparams.table_rows = list(self.trainer.datamodule.table_rows)
            self._build()

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        return self.network(dense, categorical)

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        logits = self(batch["dense"], batch["categorical"])
        return {"loss": functional.binary_cross_entropy_with_logits(logits, batch["label"])}, len(
            logits
        )

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.score("test", batch)
        if "probability" in batch and len(batch["label"]):
            self.best_auc.update(batch["probability"], batch["label"].int())
            self.log("test/best_auc", self.best_auc)

    def score(self, stage: str, batch: dict[str, Tensor]) -> None:
        labels = batch["label"]
        # A rank may have an empty batch at the end of the data.
        if not len(labels):
            return
        logits = self(batch["dense"], batch["categorical"])
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        self.log_means(stage, {"loss": loss}, len(labels))
        metrics = self.metrics[f"{stage}_metrics"]
        metrics.update(logits.sigmoid(), labels.int())
        self.log_dict(metrics, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.hparams.optimizer](self.parameters(), lr=self.hparams.learning_rate)
