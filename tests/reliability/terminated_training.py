"""A training on two processes of Lightning's own launcher that goes on until somebody ends it.

    python tests/reliability/terminated_training.py FOLDER

FOLDER/training exists as soon as it trains.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dct import DCTStrategy


class Model(pl.LightningModule):
    """A linear layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 40)
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            (self.folder / "training").touch()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    """Train for ever."""
    folder = Path(sys.argv[1])
    trainer = pl.Trainer(
        strategy=DCTStrategy(density=0.1),
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(folder), DataLoader(TensorDataset(torch.randn(200, 32)), 4))


if __name__ == "__main__":
    main()
