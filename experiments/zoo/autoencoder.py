"""An autoencoder of digits under Adam; where validation no longer gets better, ReduceLROnPlateau
lowers the rate.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scored import ScoredModule


class AutoencoderModule(ScoredModule):
    """Maps an image to a short code and back; the loss is the mean squared error of a pixel.

    Args:
        learning_rate: Of Adam, at the start.
        code: Size of the code.
        patience: Validations without progress before the rate is divided by 2.
    """

    def __init__(
        self,
        learning_rate: float,
        side: int = 16,
        width: int = 256,
        code: int = 128,
        patience: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        pixels = side * side
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, pixels),
        )

    def figures(self, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], int]:
        images, _ = batch
        again = self.decoder(self.encoder(images))
        return {"loss": functional.mse_loss(again, images.flatten(1))}, len(images)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.learning_rate)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=self.hparams.patience, threshold=0.01
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"},
        }
