"""Trains and scores the language model: next-token cross-entropy under AdamW with warm-up and cosine decay."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric

from nlp.data import IGNORED
from nlp.model import TransformerLanguageModel
from nlp.schedule import adamw_with_cosine


def mean_token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Average the cross-entropy over the tokens that count.

    Args:
        logits: float ``[batch, time, vocabulary]``.
        targets: int64 ``[batch, time]``; those equal to ``IGNORED`` do not count.

    Returns:
        The mean in nats a token (0 where none counts), and the number of tokens that count, both scalars.
    """
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    count = (targets != IGNORED).sum()
    return total / count.clamp(min=1), count


class LanguageModule(LightningModule):
    """The language model as Lightning trains it.

    Logs ``train/loss``, ``val/loss``, ``val/bits_per_byte``, ``test/loss`` and ``test/bits_per_byte`` (loss in nats a
    token). The validation figures weigh every token once, so they do not depend on the number of ranks.

    Args:
        num_layers: Number of transformer blocks.
        width: Size of the hidden state.
        num_heads: Attention heads.
        dropout: Fraction of activations dropped while training.
        tie_weights: Use the token embedding as the output matrix.
        learning_rate: AdamW's peak learning rate.
        betas: AdamW's two decay rates. 0 as the first suits compressed gradients, whose residual is a momentum
            already.
        weight_decay: AdamW's decay, on matrices only.
        warmup_steps: Optimizer steps over which the learning rate rises linearly.
        final_learning_rate_fraction: Where the cosine ends, as a fraction of the peak.
        vocabulary_size: Number of tokens; read from the data module when None.
        context_length: Tokens a sequence; read from the data module when None.
        split: ``pieces`` to cut the network into (1, or None, for no cut), and the settings of the ``SplitPoint``
            between every two.
    """

    def __init__(
        self,
        num_layers: int = 2,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = False,
        learning_rate: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        warmup_steps: int = 100,
        final_learning_rate_fraction: float = 0.1,
        vocabulary_size: int | None = None,
        context_length: int | None = None,
        split: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: nn.Module | None = None
        # Metrics rather than logged numbers: they weigh tokens, and sum over ranks by themselves.
        self.evaluation_loss = nn.ModuleDict({"val_loss": MeanMetric(), "test_loss": MeanMetric()})
        if vocabulary_size is not None and context_length is not None:
            self._build()

    def _build(self) -> None:
        sizes = self.hparams
        split = dict(sizes.split or {})
        pieces = split.pop("pieces", 1)
        self.network = TransformerLanguageModel(
            sizes.vocabulary_size,
            sizes.context_length,
            sizes.num_layers,
            sizes.width,
            sizes.num_heads,
            sizes.dropout,
            sizes.tie_weights,
            pieces,
            split,
        )

    def configure_model(self) -> None:
        """Build the network with the data's sizes, once; the sizes then travel in the checkpoint."""
        if self.network is None:
            self.hparams.vocabulary_size = self.trainer.datamodule.vocabulary_size
            self.hparams.context_length = self.trainer.datamodule.context_length
            self._build()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, time, vocabulary]`` of tokens ``[batch, time]``."""
        return self.network(tokens)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss, _ = mean_token_loss(self(batch["inputs"]), batch["targets"])
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["inputs"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> None:
        loss, count = mean_token_loss(self(batch["inputs"]), batch["targets"])
        self.evaluation_loss[f"{stage}_loss"].update(loss, weight=count)

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, stage: str) -> None:
        metric = self.evaluation_loss[f"{stage}_loss"]
        loss = metric.compute()
        metric.reset()
        # Every rank has the value of all ranks already: sync_dist averages equal numbers, and stays quiet.
        self.log(f"{stage}/loss", loss, prog_bar=True, sync_dist=True)
        bytes_per_token = self.trainer.datamodule.bytes_per_token[stage]
        self.log(f"{stage}/bits_per_byte", loss / math.log(2) / bytes_per_token, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw_with_cosine(self)
