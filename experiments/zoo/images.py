"""Classifies digits with a residual network (He et al., 2015) under SGD, or a vision transformer
under AdamW.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlp.model import Block
from nlp.optimizing import optimizer_with_cosine
from scored import ScoredModule
from zoo.digits import CLASSES

SCHEDULES = ("cosine", "one_cycle")
"""Names that the residual network's ``model.schedule`` takes."""


class ImageModule(ScoredModule):
    """A classifier of images, judged by its accuracy; ``network`` maps ``[batch, 1, side, side]``
    to logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def figures(self, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], int]:
        images, labels = batch
        logits = self.network(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": accuracy}, len(labels)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, added to what came in (through a convolution of size 1 where
    shapes differ).
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != channels_in:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels_in, side, side]`` to ``[batch, channels, side / stride, side /
        stride]``.
        """
        return functional.relu(self.body(images) + self.shortcut(images))


class ResidualModule(ImageModule):
    """A residual network under SGD with Nesterov's momentum and weight decay.

    Args:
        schedule: ``cosine`` from the peak to 0; ``one_cycle`` up and down once, and the momentum
            the other way.
        channels: Of each block; all but the first halve the side.
        weight_decay: On every parameter.

    Raises:
        ValueError: If the schedule is unknown.
    """

    def __init__(
        self,
        learning_rate: float,
        schedule: str = "cosine",
        channels: tuple[int, ...] = (32, 64, 128),
        weight_decay: float = 5e-4,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"model.schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}")
        first, *others = channels
        layers = [
            nn.Conv2d(1, first, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
        ]
        blocks = [ResidualBlock(first, first, stride=1)]
        for before, after in zip(channels, others, strict=False):
            blocks.append(ResidualBlock(before, after, stride=2))
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES)]
        super().__init__(nn.Sequential(*layers, *blocks, *head))
        self.save_hyperparameters()

    def configure_optimizers(self) -> dict[str, Any]:
        settings = self.hparams
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(
            self.parameters(),
            settings.learning_rate,
            momentum=0.9,
            nesterov=True,
            weight_decay=settings.weight_decay,
        )
        schedule: torch.optim.lr_scheduler.LRScheduler
        if settings.schedule == "one_cycle":
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, settings.learning_rate, total_steps=steps
            )
        else:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PatchEmbedding(nn.Module):
    """Cuts an image into patches, maps each to a vector, adds where it stands and puts a class
    token before.
    """

    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 1, side, side]`` to ``[batch, 1 + patches, width]``."""
        patches = self.project(images).flatten(2).transpose(1, 2)
        return (
            torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
            + self.positions
        )


class ClassHead(nn.Module):
    """From the class token to logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[batch, 1 + patches, width]`` to ``[batch, classes]``."""
        return self.output(self.norm(hidden[:, 0]))


class VisionTransformerModule(ImageModule):
    """A vision transformer (Dosovitskiy et al., 2020) under AdamW with warm-up and cosine.

    Args:
        patch: Pixels of a patch's edge.
    """

    def __init__(
        self,
        learning_rate: float,
        side: int = 16,
        patch: int = 4,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.05,
        warmup_steps: int = 100,
        final_learning_rate_fraction: float = 0.0,
    ) -> None:
        blocks = [Block(width, num_heads, dropout, causal=False) for _ in range(num_layers)]
        super().__init__(
            nn.Sequential(PatchEmbedding(side, patch, width), *blocks, ClassHead(width))
        )
        self.save_hyperparameters()

    def configure_optimizers(self) -> dict[str, Any]:
        return optimizer_with_cosine(self)
