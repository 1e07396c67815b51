"""A generative adversarial network (Goodfellow et al., 2014) of points in the plane: two
optimizers, taking turns.
"""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from nlp.optimizing import warmup_and_cosine
from zoo.digits import DrawnData


def draw_spirals(count: int, seed: int) -> Tensor:
    """Draw points on the arms of a spiral galaxy, most within a circle of radius 4: float32
    ``[count, 2]``.
    """
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (count,), generator=generator) * (2 * math.pi / 3)
    radius = 0.2 + 0.8 * torch.rand(count, generator=generator)
    angle = arm + 2.5 * radius
    points = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return 4 * (points + 0.03 * torch.randn(count, 2, generator=generator))


class Spirals(DrawnData):
    """Points to train on and, others, to validate on."""

    val_batch_size = 512

    def __init__(self, batch_size: int, train_points: int = 65536, val_points: int = 4096) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str | None = None) -> None:
        settings = self.hparams
        self.keep(
            settings.train_points, draw_spirals(settings.train_points + settings.val_points, seed=0)
        )


class GANModule(LightningModule):
    """A generator against a discriminator, each with an Adam of its own.

    Validation is the Parzen-window estimate of the paper: minus the mean log-density, at held-out
    points, of a Gaussian around each of many generated points. A mode that the generator has lost
    costs as much as points out of place.

    Args:
        learning_rate: Of both, at the start; a cosine takes it to 0.
        latent: Numbers that the generator makes a point of.
        penalty: Weight of the discriminator's squared gradient at real points (R1; Mescheder et
            al., 2018).
        window: Standard deviation of the Gaussians of the estimate.
        val_points: Generated for it.
    """

    def __init__(
        self,
        learning_rate: float,
        latent: int = 16,
        width: int = 128,
        penalty: float = 0.1,
        window: float = 0.2,
        val_points: int = 8192,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(part.parameters(), self.hparams.learning_rate, betas=(0.5, 0.99))
            for part in (self.generator, self.discriminator)
        ]
        # The Trainer counts the steps of both.
        batches = self.trainer.estimated_stepping_batches / len(optimizers)
        factor = warmup_and_cosine(batches, warmup_steps=0, final_fraction=0.0)
        return optimizers, [
            torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers
        ]

    def training_step(self, batch: tuple[Tensor], batch_index: int) -> None:
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_discriminator)
        real = real.requires_grad_()
        judged = self.discriminator(real)
        (slope,) = torch.autograd.grad(judged.sum(), real, create_graph=True)
        loss = (
            functional.softplus(-judged).mean()
            + functional.softplus(self.discriminator(self._generate(len(real)).detach())).mean()
            + self.hparams.penalty / 2 * slope.square().sum(dim=1).mean()
        )
        self._step(for_discriminator, loss)

        self.toggle_optimizer(for_generator)
        loss = functional.softplus(-self.discriminator(self._generate(len(real)))).mean()
        self._step(for_generator, loss)

        for schedule in self.lr_schedulers():
            schedule.step()

    def _generate(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.latent, device=self.device))

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def on_validation_epoch_start(self) -> None:
        # The same latent numbers in every validation.
        noise = torch.Generator().manual_seed(0)
        latent = torch.randn(self.hparams.val_points, self.hparams.latent, generator=noise)
        self.generated = self.generator(latent.to(self.device))

    def validation_step(self, batch: tuple[Tensor], batch_index: int) -> None:
        (real,) = batch
        variance = self.hparams.window**2
        exponents = -torch.cdist(real, self.generated).square() / (2 * variance)
        density = exponents.logsumexp(dim=1) - math.log(
            len(self.generated) * 2 * math.pi * variance
        )
        self.log("val/loss", -density.mean(), batch_size=len(real), on_epoch=True, sync_dist=True)
