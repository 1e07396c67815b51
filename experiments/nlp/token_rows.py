"""What data modules of tokens share: settings, one tokenizer learnt from the training part, and rows by rank."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule

from nlp.tokenizer import TOKENIZERS, BytePairTokenizer, ByteTokenizer
from streams import Batch, EvaluationRange, TrainingStream, batches_to_cover, rank_and_world_size, rank_rows

IGNORED = -100
"""Target of positions that fill up a row and do not count."""

STAGES = ("train", "val", "test")


def check_at_least(least: int, **settings: int) -> None:
    """Refuse settings below ``least``.

    Raises:
        ValueError: Naming the first of them.
    """
    for name, value in settings.items():
        if value < least:
            raise ValueError(f"data.{name}={value}: must be at least {least}")


class TokenRows(LightningDataModule):
    """Rows of tokens to train on, drawn at random, and to score, each once.

    Subclasses say what a row is. A training row is a pure function of the seed and its number, and a global batch holds
    the same rows whatever the number of ranks (see ``streams``).

    Args:
        tokenizer: ``byte`` or ``bpe``.
        vocabulary_size: Tokens that BPE may learn; bytes need no setting.
        batch_size: Training rows a rank.
        eval_batch_size: Validation rows a rank.
        held_out_fraction: Part of the text for validation, and again for test.
        seed: Chooses the training rows.
        cache_dir: Where trained tokenizers are kept, by the hash of what they were trained on.

    Raises:
        ValueError: If a setting is out of range.
    """

    special_tokens = 0
    """Tokens that come before the tokenizer's own."""

    def __init__(
        self,
        tokenizer: str,
        vocabulary_size: int,
        batch_size: int,
        eval_batch_size: int,
        held_out_fraction: float,
        seed: int,
        cache_dir: str,
    ) -> None:
        super().__init__()
        if tokenizer not in TOKENIZERS:
            raise ValueError(f"data.tokenizer={tokenizer!r}: choose one of {', '.join(TOKENIZERS)}")
        if not 0 < held_out_fraction < 0.5:
            raise ValueError(f"data.held_out_fraction={held_out_fraction}: must lie between 0 and 0.5")
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        self.tokenizer_name = tokenizer
        self.requested_vocabulary_size = vocabulary_size
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.held_out_fraction = held_out_fraction
        self.seed = seed
        self.cache_dir = Path(cache_dir)
        self.tokenizer: ByteTokenizer | BytePairTokenizer | None = None

    @abstractmethod
    def training_text(self) -> bytes:
        """The text that the tokenizer learns from."""

    @abstractmethod
    def num_rows(self, stage: str) -> int:
        """Rows of a part; known after ``setup``."""

    @abstractmethod
    def training_rows(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Give the training rows with these global numbers."""

    @abstractmethod
    def evaluation_rows(self, stage: str, rows: npt.NDArray[np.int64]) -> Batch:
        """Give these rows of a part."""

    @property
    def vocabulary_size(self) -> int:
        """Number of distinct tokens, the special ones included; known after ``setup``."""
        return self.known_tokenizer().vocabulary_size + self.special_tokens

    def known_tokenizer(self) -> ByteTokenizer | BytePairTokenizer:
        """The tokenizer that ``setup`` has made."""
        if self.tokenizer is None:
            raise RuntimeError(f"the tokenizer is known after {type(self).__name__}.setup()")
        return self.tokenizer

    def load_tokenizer(self, training_text: bytes) -> ByteTokenizer | BytePairTokenizer:
        """Make the tokenizer, learnt from a text where it learns at all."""
        if self.tokenizer_name == "byte":
            return ByteTokenizer()
        return BytePairTokenizer.train_or_load(training_text, self.requested_vocabulary_size, self.cache_dir)

    def prepare_data(self) -> None:
        """Train the tokenizer: one process a node does, the others wait."""
        self.load_tokenizer(self.training_text())

    def train_dataloader(self) -> TrainingStream:
        rank, world_size = rank_and_world_size(self.trainer)

        def make_batch(batch: int) -> Batch:
            return self.training_rows(rank_rows(batch, batch_size=self.batch_size, rank=rank, world_size=world_size))

        # Rows are random, so an epoch is but a measure: as many rows as the training part has.
        return TrainingStream(make_batch, max(1, self.num_rows("train") // (self.batch_size * world_size)))

    def val_dataloader(self) -> EvaluationRange:
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationRange:
        return self._evaluation("test")

    def _evaluation(self, stage: str) -> EvaluationRange:
        rank, world_size = rank_and_world_size(self.trainer)
        total = self.num_rows(stage)
        split: dict[str, Any] = {"batch_size": self.eval_batch_size, "world_size": world_size}

        def make_batch(batch: int) -> Batch:
            return self.evaluation_rows(stage, rank_rows(batch, rank=rank, total=total, **split))

        return EvaluationRange(make_batch, batches_to_cover(total, **split))
