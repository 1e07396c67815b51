"""A perceptron that tells drawn digits apart under any optimizer of torch: to compare optimizers in
a minute.

``experiment=perceptron model.optimizer=Muon``; :mod:`replicas` trains it, too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scored import ScoredModule
from streams import Batch, Rows, ShuffledRows
from zoo.digits import CLASSES, draw_digits


class DigitRows(ShuffledRows):
    """Drawn digits, the same in every run: a batch has ``images`` ``[rows, 1, side, side]`` and
    ``labels`` ``[rows]``.

    Args:
        noise: Standard deviation of the noise on every pixel; ink is 1.
    """

    def __init__(
        self,
        batch_size: int,
        seed: int,
        train_images: int,
        val_images: int,
        side: int = 16,
        noise: float = 0.25,
    ) -> None:
        super().__init__(batch_size, 256, seed)
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str | None = None) -> None:
        settings = self.hparams
        total = settings.train_images + settings.val_images
        self.parts = {
            "train": range(settings.train_images),
            "val": range(settings.train_images, total),
        }
        self.images, self.labels = draw_digits(total, settings.side, settings.noise, seed=0)

    def rows(self, numbers: Rows) -> Batch:
        return {"images": self.images[numbers], "labels": self.labels[numbers]}


class Perceptron(ScoredModule):
    """Three matrices, because Muon takes nothing else, under an optimizer and a cosine.

    Args:
        optimizer: A name in ``torch.optim``.
        momentum: Of SGD, which alone gets it.
    """

    def __init__(
        self,
        learning_rate: float,
        optimizer: str = "SGD",
        momentum: float = 0.9,
        side: int = 16,
        width: int = 256,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        shapes = (side * side, width), (width, width), (width, CLASSES)
        first, second, last = (nn.Linear(*shape, bias=False) for shape in shapes)
        self.network = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        labels = batch["labels"]
        return {"loss": functional.cross_entropy(self.network(batch["images"]), labels)}, len(
            labels
        )

    def configure_optimizers(self) -> dict[str, Any]:
        settings = self.hparams
        kind = getattr(torch.optim, self.hparams.optimizer)
        own = {"momentum": settings.momentum} if kind is torch.optim.SGD else {}
        optimizer = kind(self.parameters(), lr=settings.learning_rate, **own)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
