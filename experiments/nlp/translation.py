"""Trains and scores the translation model: cross-entropy of the next target token, and chrF of what
it translates.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.text import CHRFScore

from nlp.splits import reads_tokens
from nlp.token_module import TokenModule, token_figures
from nlp.translation_data import BOS, EOS
from nlp.translation_model import EncoderDecoder, check_pieces, translate_greedily
from streams import rank_and_world_size, rank_rows


class TranslationModule(TokenModule):
    """The translation model as Lightning trains it.

    The losses of :class:`~nlp.token_module.TokenModule` are those of target tokens. The test also
    translates some sentences greedily and logs ``test/chrf``, chrF from 0 to 1 (character n-grams
    up to 6, Popovic 2015), beside ``test/copied_chrf``, the score of the untranslated source:
    messages share names and placeholders with their translation, so the floor is not 0. The data
    module gives the sizes that are None.

    Args:
        translate_examples: Test sentences to translate, over all ranks; 0 for none.
        split: ``pieces`` to cut the network into (1, or None, for no cut; 2 for a cut between
            encoder and decoder), and the settings of :func:`~nlp.splits.make_split` for the split
            point.
    """

    size_names = ("vocabulary_size", "source_length", "target_length")

    def __init__(
        self,
        num_layers: int = 2,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = True,
        learning_rate: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        warmup_steps: int = 100,
        final_learning_rate_fraction: float = 0.1,
        translate_examples: int = 200,
        vocabulary_size: int | None = None,
        source_length: int | None = None,
        target_length: int | None = None,
        split: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if translate_examples < 0:
            raise ValueError(f"model.translate_examples={translate_examples}: must be at least 0")
        # The network checks this too, but only after the other processes have started.
        if width % num_heads:
            raise ValueError(f"model.num_heads={num_heads} must divide model.width={width}")
        check_pieces((split or {}).get("pieces", 1))
        self.save_hyperparameters()
        self.chrf = nn.ModuleDict(
            {"chrf": CHRFScore(n_word_order=0), "copied_chrf": CHRFScore(n_word_order=0)}
        )
        self.build_when_sized()

    def make_network(self, pieces: int, split: dict[str, Any]) -> nn.Module:
        names = (*self.size_names, "num_layers", "width", "num_heads", "dropout", "tie_weights")
        return EncoderDecoder(
            **{name: self.hparams[name] for name in names}, pieces=pieces, split=split
        )

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        known = {"tokens": source} if reads_tokens(self.network) else {}
        return self.network(source, source=source, target_in=target_in, **known)

    def translate(self, source: Tensor) -> Tensor:
        """Translate sources ``[batch, source time]`` greedily into tokens ``[batch,
        target_length]``.
        """
        return translate_greedily(self.network, source, BOS, EOS, self.hparams.target_length)

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return token_figures(self(batch["source"], batch["target_in"]), batch["targets"])

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        super().test_step(batch, batch_index)
        if self.hparams.translate_examples:
            self._score_translations(batch, batch_index)
            self.log_dict({f"test/{name}": metric for name, metric in self.chrf.items()})

    def _score_translations(self, batch: dict[str, Tensor], batch_index: int) -> None:
        """Translate those rows of the batch that are among the first ``translate_examples`` of the
        test part.
        """
        rank, world_size = rank_and_world_size(self.trainer)
        size = len(batch["source"])
        total = self.trainer.datamodule.num_rows("test")
        rows = rank_rows(
            batch_index, batch_size=size, rank=rank, world_size=world_size, total=total
        )
        # Rows that only fill the batch come last.
        wanted = torch.zeros(size, dtype=torch.bool, device=self.device)
        wanted[: np.count_nonzero(rows < self.hparams.translate_examples)] = True
        if not wanted.any():
            for metric in self.chrf.values():
                # Without an update, a rank that never has a row warns.
                metric.update([], [])
            return
        source = batch["source"][wanted]
        decode = self.trainer.datamodule.decode
        sources = decode(source)
        references = decode(batch["targets"][wanted])
        translations = decode(self.translate(source))
        self.chrf["chrf"].update(translations, [[reference] for reference in references])
        self.chrf["copied_chrf"].update(sources, [[reference] for reference in references])
