"""Trains and scores the language model: next-token cross-entropy under AdamW or SGD with warm-up
and cosine decay.
"""

import math
from typing import Any

from torch import Tensor, nn

from nlp.model import TransformerLanguageModel
from nlp.splits import reads_tokens
from nlp.token_module import TokenModule, token_figures


class LanguageModule(TokenModule):
    """The language model as Lightning trains it.

    Logs ``val/bits_per_byte`` and ``test/bits_per_byte`` beside the losses.
    The data module gives ``vocabulary_size`` and ``context_length`` when they are None.

    Args:
        momentum: Train with SGD and this momentum instead of AdamW; None for AdamW.
        split: ``pieces`` to cut the network into (1, or None, for no cut), and the settings of
            :func:`~nlp.splits.make_split` for the split points.
    """

    size_names = ("vocabulary_size", "context_length")

    def __init__(
        self,
        num_layers: int = 2,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = False,
        learning_rate: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        momentum: float | None = None,
        warmup_steps: int = 100,
        final_learning_rate_fraction: float = 0.1,
        vocabulary_size: int | None = None,
        context_length: int | None = None,
        split: dict[str, Any] | None = None,
        embedding_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build_when_sized()

    def make_network(self, pieces: int, split: dict[str, Any]) -> nn.Module:
        names = (
            *self.size_names,
            "num_layers",
            "width",
            "num_heads",
            "dropout",
            "tie_weights",
            "embedding_gain",
        )
        sizes = {name: self.hparams[name] for name in names}
        return TransformerLanguageModel(**sizes, pieces=pieces, split=split)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, time, vocabulary]`` of tokens ``[batch, time]``."""
        return (
            self.network(tokens, tokens=tokens)
            if reads_tokens(self.network)
            else self.network(tokens)
        )

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return token_figures(self(batch["inputs"]), batch["targets"])

    def score(self, stage: str, batch: dict[str, Tensor]) -> None:
        figures, count = self.figures(batch)
        bits = figures["loss"] / math.log(2) / self.trainer.datamodule.bytes_per_token[stage]
        self.log_means(stage, {**figures, "bits_per_byte": bits}, count)
