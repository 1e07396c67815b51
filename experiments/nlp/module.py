"""Trains and scores the language model: next-token cross-entropy under AdamW with warm-up and cosine decay."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric

from nlp.data import IGNORED
from nlp.model import TransformerLanguageModel


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
        self.network = TransformerLanguageModel(
            sizes.vocabulary_size,
            sizes.context_length,
            sizes.num_layers,
            sizes.width,
            sizes.num_heads,
            sizes.dropout,
            sizes.tie_weights,
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

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss over the tokens that count, and their number (both scalars)."""
        logits = self(batch["inputs"])
        total = functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        count = (batch["targets"] != IGNORED).sum()
        return total / count.clamp(min=1), count

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss, _ = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["inputs"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> None:
        loss, count = self._loss(batch)
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
        """AdamW, linear warm-up, then a cosine to ``final_learning_rate_fraction`` at the run's last step.

        Raises:
            ValueError: If the run has no end, so that the cosine has no length.
        """
        settings = self.hparams
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ValueError("the cosine schedule needs an end: set trainer.max_steps or trainer.max_epochs")

        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=tuple(settings.betas))

        def factor(step: int) -> float:
            if step < settings.warmup_steps:
                return (step + 1) / settings.warmup_steps
            progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            floor = settings.final_learning_rate_fraction
            return floor + (1 - floor) * cosine

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
