"""A recurrent language model: LSTM layers under plain SGD with clipping, as Zaremba et al. trained
theirs (2014).
"""

from typing import Any

import torch
from torch import Tensor, nn

from nlp.optimizing import warmup_and_cosine
from nlp.token_module import token_figures
from scored import ScoredModule


class LSTMModule(ScoredModule):
    """Predicts the next token; the Trainer clips its gradients, without which plain SGD would not
    get far.

    A cosine takes the learning rate down to a tenth.
    """

    def __init__(
        self,
        learning_rate: float,
        vocabulary_size: int = 256,
        width: int = 128,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.recurrent = nn.LSTM(width, width, num_layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary_size)

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        hidden, _ = self.recurrent(self.embedding(batch["inputs"]))
        return token_figures(self.output(hidden), batch["targets"])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.learning_rate)
        factor = warmup_and_cosine(
            self.trainer.estimated_stepping_batches, warmup_steps=0, final_fraction=0.1
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
