"""Networks cut by split points, a module around them, and what a single process makes of the same."""

import hashlib
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed.training import Noise
from lightning_dct.activations import SplitPoint


def network(pieces: int, **split: Any) -> nn.Sequential:
    """The same weights on every rank and every time: 40 in, 8 out, a split point between every two pieces."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers: list[nn.Module] = []
        for piece in range(pieces):
            layers.append(nn.Linear(40 if piece == 0 else 24, 8 if piece == pieces - 1 else 24))
            if piece < pieces - 1:
                layers += [nn.Tanh(), SplitPoint(**split)]
        return nn.Sequential(*layers)


class SplitModule(LightningModule):
    """Regression with any optimizer; logs its loss."""

    def __init__(
        self, pieces: int = 2, split: dict[str, Any] | None = None, optimizer: Any = torch.optim.SGD, **settings: Any
    ) -> None:
        super().__init__()
        self.network = network(
            pieces, **(split or {"density": 1.0, "forward_format": "fp32", "backward_format": "fp32"})
        )
        self.optimizer = optimizer
        self.settings = settings or {"lr": 0.1}

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self.network(inputs.to(self.dtype)) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val/loss", loss, sync_dist=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.settings)


def batches(count: int, stages: int, size: int = 8, stream: int = 0) -> DataLoader:
    """This pipeline's batches."""
    replica = int(os.environ["RANK"]) // stages + stream
    return DataLoader(Noise(count, 40, 8, size, replica), batch_size=None)


class Losses(Callback):
    """Records each batch's loss, and a hash of the weights that are on this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.hashes: list[str] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        digest = hashlib.sha1()
        for parameter in pl_module.parameters():
            if not parameter.is_meta:
                digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.hashes.append(digest.hexdigest())


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
