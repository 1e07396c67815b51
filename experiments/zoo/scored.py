"""What all trainings of the zoo share: figures of a batch, of which the loss is trained on and all are validated."""

from __future__ import annotations

from abc import abstractmethod

from lightning.pytorch import LightningModule
from torch import Tensor

from nlp.token_module import mean_token_loss


class ScoredModule(LightningModule):
    """Trains on ``loss`` and logs every figure under ``val/``, averaged over all examples of all ranks."""

    @abstractmethod
    def figures(self, batch: object) -> tuple[dict[str, Tensor], int]:
        """Give the figures of a batch, ``loss`` among them, and the number of examples that they are means over."""

    def training_step(self, batch: object, batch_index: int) -> Tensor:
        figures, _ = self.figures(batch)
        return figures["loss"]

    def validation_step(self, batch: object, batch_index: int) -> None:
        figures, count = self.figures(batch)
        named = {f"val/{name}": figure for name, figure in figures.items()}
        self.log_dict(named, batch_size=count, on_epoch=True, sync_dist=True)


def token_figures(logits: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], int]:
    """The cross-entropy in nats a token, and the number of tokens that count.

    The last batch of an evaluation may have none on some rank: then loss and weight are 0.
    """
    loss, count = mean_token_loss(logits, targets)
    return {"loss": loss}, int(count)
