"""The common part of the models: modules that log the figures of a batch."""

from abc import abstractmethod
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor


class ScoredModule(LightningModule):
    """Trains on ``loss``, logs it as ``train/loss``, and logs all figures under ``val/`` and
    ``test/``.

    The figures of an evaluation are means over all examples of all ranks, so they do not depend on
    the number of ranks. In training each rank averages over its own examples.
    """

    @abstractmethod
    def figures(self, batch: Any) -> tuple[dict[str, Tensor], int | Tensor]:
        """Give the figures of a batch, ``loss`` among them, and the number of examples that they
        are means over.
        """

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        figures, count = self.figures(batch)
        self.log("train/loss", figures["loss"], prog_bar=True, batch_size=int(count))
        return figures["loss"]

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.score("val", batch)

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.score("test", batch)

    def score(self, stage: str, batch: Any) -> None:
        self.log_means(stage, *self.figures(batch))

    def log_means(self, stage: str, figures: dict[str, Tensor], count: int | Tensor) -> None:
        """Log figures that are means over so many examples, for the mean over all examples of all
        ranks.
        """
        named = {f"{stage}/{name}": figure for name, figure in figures.items()}
        # A float, because Lightning drops the remainder when it averages whole numbers over the
        # ranks.
        self.log_dict(named, prog_bar=True, batch_size=float(count), on_epoch=True, sync_dist=True)
