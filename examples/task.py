"""What the examples train: a perceptron that learns on which side of a plane a point lies."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Points(L.LightningDataModule):
    """Points in 32 dimensions, made up and the same on every rank.

    Args:
        batch_size: Points a rank takes for a step.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        points = torch.randn(5120, 32, generator=torch.Generator().manual_seed(0))
        labels = (points.sum(dim=1) > 0).long()
        self.train = TensorDataset(points[:4096], labels[:4096])
        self.held_out = TensorDataset(points[4096:], labels[4096:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)


class Classifier(L.LightningModule):
    """The perceptron. Nothing in it knows of ``lightning_dct``.

    Args:
        width: Hidden units.
        learning_rate: Adam's.
    """

    def __init__(self, width: int = 512, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self(points), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, labels = batch
        self.log(
            "val_loss",
            nn.functional.cross_entropy(self(points), labels),
            sync_dist=True,
            prog_bar=True,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
