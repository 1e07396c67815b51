"""Text as token windows: random crops to train on, every window once to validate on.

The text is cut into three contiguous blocks (90% training, 5% validation, 5% test), so nothing that is scored was
read in training. A tokenizer learns from the training block only.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule

from counter_random import hash_counters
from nlp.tokenizer import TOKENIZERS, BytePairTokenizer, ByteTokenizer
from streams import (
    Batch,
    EvaluationRange,
    TrainingStream,
    batches_to_cover,
    rank_and_world_size,
    rank_rows,
)

IGNORED = -100
"""Target of positions that fill up the last window and do not count."""

STAGES = ("train", "val", "test")


def builtin_text() -> bytes:
    """The English documentation that CPython ships in ``pydoc_data.topics``, about 465 KB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def check_text(path: str | Path | None) -> None:
    """See that there is a text to read, without reading it.

    Raises:
        FileNotFoundError: If there is no file at ``path``.
        ValueError: If the file is empty.
    """
    if path is None:
        return
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"data.path={path}: there is no such file (looked for {path.resolve()}); "
            "give a text file, or leave data.path=null for the text that comes with Python"
        )
    if not path.stat().st_size:
        raise ValueError(f"data.path={path}: the file is empty; give a file with text in it")


def read_text(path: str | Path | None) -> bytes:
    """Read the text to model: a file's, or with None what CPython ships."""
    return builtin_text() if path is None else Path(path).read_bytes()


def split_text(text: bytes, held_out_fraction: float) -> dict[str, bytes]:
    """Cut text into contiguous blocks, validation and test at the end, between characters of UTF-8."""

    def character_start(position: int) -> int:
        # Bytes 10xxxxxx continue a character.
        while position < len(text) and text[position] & 0b1100_0000 == 0b1000_0000:
            position += 1
        return position

    first = character_start(int(len(text) * (1 - 2 * held_out_fraction)))
    second = character_start(int(len(text) * (1 - held_out_fraction)))
    return {"train": text[:first], "val": text[first:second], "test": text[second:]}


class TextData(LightningDataModule):
    """Windows of a text for a language model.

    A batch is ``{"inputs": int64 [rows, context_length], "targets": int64 [rows, context_length]}``, targets one
    token ahead. Training window ``i`` is a pure function of ``(seed, i)``, and a global batch holds the same windows
    whatever the number of ranks (see ``streams``).

    Args:
        path: A text file in UTF-8; None means the text that comes with Python.
        tokenizer: ``byte`` or ``bpe``.
        vocabulary_size: Tokens that BPE may learn; bytes need no setting.
        context_length: Tokens a window.
        batch_size: Training windows a rank.
        eval_batch_size: Validation windows a rank.
        held_out_fraction: Part of the text for validation, and again for test.
        seed: Chooses the training windows.
        cache_dir: Where trained tokenizers are kept, by the hash of what they were trained on.

    Raises:
        ValueError: If a setting is out of range, the file empty, or (in ``setup``) a part too short for one window.
        FileNotFoundError: If ``path`` is missing.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str = "byte",
        vocabulary_size: int = 1024,
        context_length: int = 128,
        batch_size: int = 8,
        eval_batch_size: int = 32,
        held_out_fraction: float = 0.05,
        seed: int = 0,
        cache_dir: str = "outputs/cache",
    ) -> None:
        super().__init__()
        if tokenizer not in TOKENIZERS:
            raise ValueError(f"data.tokenizer={tokenizer!r}: choose one of {', '.join(TOKENIZERS)}")
        if not 0 < held_out_fraction < 0.5:
            raise ValueError(f"data.held_out_fraction={held_out_fraction}: must lie between 0 and 0.5")
        for name, value in (
            ("batch_size", batch_size),
            ("eval_batch_size", eval_batch_size),
            ("context_length", context_length),
        ):
            if value < 1:
                raise ValueError(f"data.{name}={value}: must be at least 1")
        # Here rather than in setup: before other processes are started, which would wait for this one.
        check_text(path)
        self.path = path
        self.tokenizer_name = tokenizer
        self.requested_vocabulary_size = vocabulary_size
        self.context_length = context_length
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.held_out_fraction = held_out_fraction
        self.seed = seed
        self.cache_dir = Path(cache_dir)
        self.tokenizer: ByteTokenizer | BytePairTokenizer | None = None
        self.tokens: dict[str, npt.NDArray[np.int64]] = {}
        self.bytes_per_token: dict[str, float] = {}

    @property
    def vocabulary_size(self) -> int:
        """Number of distinct tokens; known after ``setup``."""
        return self._get_tokenizer().vocabulary_size

    def _get_tokenizer(self) -> ByteTokenizer | BytePairTokenizer:
        if self.tokenizer is None:
            raise RuntimeError("the tokenizer is known after TextData.setup()")
        return self.tokenizer

    def _parts(self) -> dict[str, bytes]:
        return split_text(read_text(self.path), self.held_out_fraction)

    def _load_tokenizer(self, training_text: bytes) -> ByteTokenizer | BytePairTokenizer:
        if self.tokenizer_name == "byte":
            return ByteTokenizer()
        return BytePairTokenizer.train_or_load(training_text, self.requested_vocabulary_size, self.cache_dir)

    def prepare_data(self) -> None:
        """Check the text and train the tokenizer: one process a node does, the others wait."""
        self._load_tokenizer(self._parts()["train"])

    def setup(self, stage: str | None = None) -> None:
        """Tokenize the three parts."""
        if self.tokens:
            return
        parts = self._parts()
        self.tokenizer = self._load_tokenizer(parts["train"])
        invalid = 0
        for name, part in parts.items():
            tokens, invalid_here = self.tokenizer.encode(part)
            invalid += invalid_here
            if len(tokens) <= self.context_length:
                raise ValueError(
                    f"data.path={self.path}: the text is too short, its {name} part has {len(tokens)} tokens and one "
                    f"window takes {self.context_length + 1}; give a longer text or lower data.context_length"
                )
            self.tokens[name] = tokens
            self.bytes_per_token[name] = len(part) / len(tokens)
        if invalid:
            warnings.warn(
                f"data.path={self.path}: {invalid} bytes are not UTF-8 and became replacement characters; "
                "data.tokenizer=byte reads any bytes",
                stacklevel=2,
            )

    def training_windows(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Cut the training windows with these global numbers."""
        tokens = self.tokens["train"]
        starts = hash_counters(self.seed, rows) % np.uint64(len(tokens) - self.context_length)
        window = tokens[starts.astype(np.int64)[:, None] + np.arange(self.context_length + 1)]
        return {"inputs": torch.from_numpy(window[:, :-1]), "targets": torch.from_numpy(window[:, 1:])}

    def evaluation_windows(self, part: str, rows: npt.NDArray[np.int64]) -> Batch:
        """Cut the ``rows``-th windows, side by side, of a part; the last is filled up with ignored targets."""
        tokens = self.tokens[part]
        positions = rows[:, None] * self.context_length + np.arange(self.context_length + 1)
        window = tokens[np.minimum(positions, len(tokens) - 1)]
        targets = np.where(positions[:, 1:] < len(tokens), window[:, 1:], IGNORED)
        return {"inputs": torch.from_numpy(window[:, :-1].copy()), "targets": torch.from_numpy(targets)}

    def train_dataloader(self) -> TrainingStream:
        rank, world_size = rank_and_world_size(self.trainer)

        def make_batch(batch: int) -> Batch:
            return self.training_windows(rank_rows(batch, batch_size=self.batch_size, rank=rank, world_size=world_size))

        # Crops are random, so an epoch is but a measure: as many tokens as the training part has.
        tokens_per_batch = self.context_length * self.batch_size * world_size
        return TrainingStream(make_batch, max(1, len(self.tokens["train"]) // tokens_per_batch))

    def _evaluation(self, part: str) -> EvaluationRange:
        rank, world_size = rank_and_world_size(self.trainer)
        # Each window predicts context_length tokens; the very first token of the part is never a target.
        total = -(-(len(self.tokens[part]) - 1) // self.context_length)
        split: dict[str, Any] = {"batch_size": self.eval_batch_size, "world_size": world_size}

        def make_batch(batch: int) -> Batch:
            return self.evaluation_windows(part, rank_rows(batch, rank=rank, total=total, **split))

        return EvaluationRange(make_batch, batches_to_cover(total, **split))

    def val_dataloader(self) -> EvaluationRange:
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationRange:
        return self._evaluation("test")
