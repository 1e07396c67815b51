"""Trainings whose ranks do not do the same: ordinary mistakes, each on one rank only."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dct import DCTStrategy
from lightning_dct.callbacks import failures
from lightning_dct.failures import lifeline

WAYS = (
    "fewer batches",
    "fewer batches, then a checkpoint",
    "fewer batches, and a log",
    "fewer batches, and no buffers",
    "fewer batches, only one",
    "stop",
    "stop, with updates in flight",
    "gathering",
    "gathering, with updates in flight",
    "more parameters",
    "unfreeze",
)


class Model(pl.LightningModule):
    """Two linear layers around a BatchNorm, whose running statistics are averaged at the end; one layer is frozen."""

    def __init__(self, way: str) -> None:
        super().__init__()
        norm = [] if any(words in way for words in ("checkpoint", "no buffers", "only one")) else [nn.BatchNorm1d(8)]
        self.model = nn.Sequential(nn.Linear(8, 8), *norm, nn.Linear(8, 8))
        self.extra = nn.Linear(8, 8)
        self.way = way
        if way == "unfreeze":
            self.extra.requires_grad_(False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0 and batch_idx == 4:
            if self.way.startswith("stop"):
                self.trainer.should_stop = True
            if self.way == "more parameters":
                self.optimizers().add_param_group({"params": list(self.extra.parameters())})
            if self.way.startswith("gathering"):
                self.all_gather(batch[0])
        loss = (self.model(batch[0]) + self.extra(batch[0])).square().mean()
        if "log" in self.way:
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == 4 and self.way == "unfreeze":
            self.extra.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters() if self.way == "unfreeze" else self.model.parameters(), 0.1)


def train(way: str, folder: str) -> None:
    """Train on every rank; rank 0 makes the mistake."""
    lifeline.GRACE_S = 1.5
    failures.PATIENCE_S = 200.0  # the others may be slow on a busy machine
    fewer = way.startswith("fewer") and os.environ["RANK"] == "0"
    batches = 12 if not fewer else 1 if "only one" in way else 9
    data = TensorDataset(torch.randn(4 * batches, 8))
    settings = {"compress": "gradients"} if way == "unfreeze" or "only one" in way else {}
    if "in flight" in way:
        settings = {"exchange": "sharded", "local_steps": 4, "delay": 2, "warmup_steps": 0}
    trainer = pl.Trainer(
        strategy=DCTStrategy(**settings),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing="checkpoint" in way,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(way), DataLoader(data, 4))
