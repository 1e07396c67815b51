"""The common part of the language and the translation module: sizes, loss, scores, optimizer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric

from nlp.optimizing import optimizer_with_cosine
from nlp.token_rows import IGNORED


def mean_token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy in nats over the tokens that count (0 without any), and their number, both scalars.

    Logits are ``[batch, time, vocabulary]``. Targets ``[batch, time]`` equal to ``IGNORED`` do not count.
    """
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    count = (targets != IGNORED).sum()
    return total / count.clamp(min=1), count


class TokenModule(LightningModule):
    """A network that predicts tokens.

    Logs ``train/loss``, ``val/loss`` and ``test/loss`` in nats a token. The validation figures weigh every token once,
    so they do not depend on the number of ranks; in training each rank averages over its own tokens.

    Subclasses save their hyperparameters (those that ``optimizer_with_cosine`` names, the sizes, and ``split``:
    ``pieces`` and the settings of a ``SplitPoint``) and then call :meth:`build_when_sized`.
    """

    size_names: tuple[str, ...]
    """Hyperparameters that are read from the data module when they are None."""

    def __init__(self) -> None:
        super().__init__()
        self.network: nn.Module | None = None
        # Metrics rather than logged numbers: they weigh tokens, and sum over ranks by themselves.
        self.evaluation_loss = nn.ModuleDict({"val_loss": MeanMetric(), "test_loss": MeanMetric()})

    @abstractmethod
    def make_network(self, pieces: int, split: dict[str, Any]) -> nn.Module:
        """Make the network, all sizes known, in so many pieces with split points of these settings between them."""

    @abstractmethod
    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and the number of tokens that count."""

    def build_when_sized(self) -> None:
        """Build the network if no size is missing."""
        if all(self.hparams[name] is not None for name in self.size_names):
            split = dict(self.hparams.split or {})
            pieces = split.pop("pieces", 1)
            self.network = self.make_network(pieces, split)

    def configure_model(self) -> None:
        """Build the network with the data's sizes, once; the sizes then travel in the checkpoint."""
        if self.network is None:
            for name in self.size_names:
                self.hparams[name] = getattr(self.trainer.datamodule, name)
            self.build_when_sized()

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss, _ = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["targets"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._score("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._score("test", batch)

    def on_validation_epoch_end(self) -> None:
        self.report("val")

    def on_test_epoch_end(self) -> None:
        self.report("test")

    def report(self, stage: str) -> Tensor:
        """Log the loss of a whole evaluation, and return it."""
        metric = self.evaluation_loss[f"{stage}_loss"]
        loss = metric.compute()
        metric.reset()
        # Every rank has the value of all ranks already: sync_dist averages equal numbers, and stays quiet.
        self.log(f"{stage}/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        return optimizer_with_cosine(self)

    def _score(self, stage: str, batch: dict[str, Tensor]) -> None:
        loss, count = self.loss(batch)
        self.evaluation_loss[f"{stage}_loss"].update(loss, weight=count)
