"""Turns bytes into tokens: each byte as it is, or merged pairs of bytes learnt from the training
text.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

TOKENIZERS = ("byte", "bpe")
"""Names that ``data.tokenizer`` takes."""

_BYTE_VALUES = 256


class ByteTokenizer:
    """Every byte is a token; any file can be read."""

    vocabulary_size = _BYTE_VALUES

    def encode(self, text: bytes) -> tuple[npt.NDArray[np.int64], int]:
        """Give the tokens of ``text`` (int64 ``[bytes]``) and the number of bytes that could not be
        read (0).
        """
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64), 0

    def decode(self, tokens: npt.NDArray[np.int64]) -> str:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")


class BytePairTokenizer:
    """Byte-level byte-pair encoding, trained by the ``tokenizers`` library and read from a file."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    @property
    def vocabulary_size(self) -> int:
        """Tokens really learnt: a short text has fewer than were asked for."""
        return self._tokenizer.get_vocab_size()

    @classmethod
    def train_or_load(
        cls, training_text: bytes, vocabulary_size: int, cache_dir: Path
    ) -> BytePairTokenizer:
        """Load the tokenizer of this very text and size from the cache, or train it and write it
        there.

        Raises:
            ValueError: ``vocabulary_size`` has no room for the single bytes.
        """
        if vocabulary_size < _BYTE_VALUES:
            raise ValueError(
                f"data.vocabulary_size={vocabulary_size}: bpe needs at least {_BYTE_VALUES}, one a"
                " byte"
            )
        content = hashlib.sha256(training_text).hexdigest()[:24]
        file = cache_dir / f"bpe-{vocabulary_size}-{content}.json"
        if not file.exists():
            cls._train(training_text, vocabulary_size, file)
        return cls(file)

    @staticmethod
    def _train(training_text: bytes, vocabulary_size: int, file: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        lines = training_text.decode(errors="replace").splitlines(keepends=True)
        tokenizer.train_from_iterator(lines, trainer)
        file.parent.mkdir(parents=True, exist_ok=True)
        # If another process writes too, the last one replaces a whole file by an equal one.
        unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
        tokenizer.save(str(unfinished))
        unfinished.replace(file)

    def encode(self, text: bytes) -> tuple[npt.NDArray[np.int64], int]:
        """Give the tokens of ``text`` (int64) and the number of bytes that are not UTF-8.

        Those bytes are read as U+FFFD, as a decoder with ``errors="replace"`` does.
        """
        valid_bytes = len(text.decode(errors="ignore").encode())
        lines = text.decode(errors="replace").splitlines(keepends=True)
        encoded = self._tokenizer.encode_batch(lines)
        return (
            np.concatenate([np.asarray(line.ids, dtype=np.int64) for line in encoded]),
            len(text) - valid_bytes,
        )

    def decode(self, tokens: npt.NDArray[np.int64]) -> str:
        return self._tokenizer.decode(tokens.tolist())
