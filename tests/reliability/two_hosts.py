"""Trainings on two hosts, as users write them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dct  # noqa: F401
from lightning_dct.failures import meeting, waiting


class Model(pl.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


def batches(rank: int) -> Any:
    """16 batches, others on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(TensorDataset(torch.randn(256, 64, generator=generator)), batch_size=16)


def train(folder: Path, version: str = "", **settings: Any) -> None:
    """A few steps on two hosts, which soon say for whom they wait."""
    waiting.FIRST_S = 2.0
    if version:
        meeting.__version__ = version
    trainer = pl.Trainer(
        strategy="dct",
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_steps=4,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(Model(), batches(0))
    print("trained", flush=True)
