"""The common part of the zoo: modules that log figures of a batch, and data that is drawn."""

from __future__ import annotations

from abc import abstractmethod

from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

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


class DrawnData(LightningDataModule):
    """Examples that ``setup`` draws, the same in every run; the run's seed decides their order only."""

    val_batch_size = 256

    def keep(self, train: int, *tensors: Tensor) -> None:
        """Train on the first examples, and validate on the others."""
        self.train = TensorDataset(*(tensor[:train] for tensor in tensors))
        self.val = TensorDataset(*(tensor[train:] for tensor in tensors))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.val_batch_size)
