"""The model of the benchmark: a perceptron that reads eight bytes of a text and guesses the next
two.
"""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from nlp.data import TextData
from nlp.token_rows import IGNORED

BYTES_READ = 8
BYTES_GUESSED = 2
BYTE_VALUES = 256
INPUTS = BYTES_READ * BYTE_VALUES
OUTPUTS = BYTES_GUESSED * BYTE_VALUES
VALIDATION_BATCH = 256
LEARNING_RATE = 1.0


class NextBytes(LightningModule):
    """Three dense layers over one-hot bytes; with a width of 2048 they have 9.4 million parameters.

    The gradients of dense layers are the largest there are for the time it takes to compute them,
    so nothing is harder on a network.
    """

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, OUTPUTS),
        )
        self.score = MeanMetric()

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross entropy of each guess, in nats: fp32, two a row, fewer at the end of the text."""
        one_hot = (
            nn.functional.one_hot(batch["inputs"][:, :BYTES_READ], BYTE_VALUES)
            .flatten(1)
            .to(torch.float32)
        )
        guesses = self.layers(one_hot).view(-1, BYTE_VALUES)
        targets = batch["targets"][:, -BYTES_GUESSED:].flatten()
        known = targets != IGNORED
        return nn.functional.cross_entropy(guesses[known], targets[known], reduction="none")

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        return self.losses(batch).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.score.update(self.losses(batch))
        self.log("loss", self.score)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent: the cheapest step, the same for all, without state."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def next_bytes_data(batch_size: int) -> TextData:
    """Windows of the documentation that comes with Python: nine bytes, and the same nine a byte
    further on.
    """
    # Eight bytes to read and the first to guess are the inputs' nine; the last two targets are the
    # guesses.
    return TextData(
        context_length=BYTES_READ + BYTES_GUESSED - 1,
        batch_size=batch_size,
        eval_batch_size=VALIDATION_BATCH,
    )
