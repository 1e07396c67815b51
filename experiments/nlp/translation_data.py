"""Parallel text as batches of one fixed shape: source tokens, target tokens to read and target
tokens to predict.

A hash of the source sentence decides its part, so that one source with several translations is in
one part only. Both languages share one tokenizer, which learns from the training part.
"""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from counter_random import hash_counters
from nlp.parallel_text import (
    Pair,
    find_catalogs,
    package_catalogs,
    read_aligned,
    read_catalogs,
    tidy,
)
from nlp.token_rows import IGNORED, STAGES, TokenRows
from streams import Batch, Rows, check_at_least

PAD, BOS, EOS = range(3)
"""Fills up a row; begins a translation; ends a source and a translation."""

FIRST_TOKEN = 3
"""The first number of the tokenizer's own tokens."""


def clean_pairs(pairs: list[Pair]) -> tuple[list[Pair], dict[str, int]]:
    """Make one line of every text, and drop pairs with an empty side and repeated pairs.

    Returns:
        The remaining pairs, in order, and how many were dropped, by reason.
    """
    tidied = [Pair(tidy(source), tidy(target)) for source, target in pairs]
    filled = [pair for pair in tidied if pair.source and pair.target]
    kept = list(dict.fromkeys(filled))
    return kept, {"empty": len(tidied) - len(filled), "repeated": len(filled) - len(kept)}


def split_pairs(pairs: list[Pair], held_out_fraction: float) -> dict[str, list[Pair]]:
    """Assign pairs to parts by a hash of the source, blind to case and punctuation.

    The hash orders the pairs of a part, too: the first hundred are a fair sample, whatever the
    order of the files.
    """
    parts: dict[str, list[tuple[int, Pair]]] = {stage: [] for stage in STAGES}
    for pair in pairs:
        letters = "".join(filter(str.isalnum, pair.source.casefold())) or pair.source
        place = int.from_bytes(hashlib.blake2b(letters.encode(), digest_size=8).digest(), "big")
        fraction = place / 2**64
        stage = (
            "test"
            if fraction < held_out_fraction
            else "val"
            if fraction < 2 * held_out_fraction
            else "train"
        )
        parts[stage].append((place, pair))
    return {stage: [pair for _, pair in sorted(part)] for stage, part in parts.items()}


class ParallelText(TokenRows):
    """Sentences and their translations, for an encoder-decoder.

    A batch is ``{"source": int64 [rows, source_length], "target_in": int64 [rows, target_length],
    "targets": int64 [rows, target_length]}``: the source ends with ``EOS``, ``target_in`` begins
    with ``BOS`` and ``targets`` is one token ahead and ends with ``EOS``. The rest of a row is
    ``PAD``, in ``targets`` ``IGNORED``. Every batch has the same shape; where rows run out at the
    end of an evaluation, rows follow in which every target is ignored. Training row ``i`` is a pure
    function of ``(seed, i)``, drawn with replacement, and a global batch holds the same rows
    whatever the number of ranks (see ``streams``).

    The text is the first of these that is given: two aligned files, gettext catalogs, the catalogs
    of an installed package. See ``parallel_text`` for how they are read.

    Args:
        source: A file in UTF-8, one sentence a line.
        target: Its translation, line by line.
        catalogs: A gettext catalog (.mo) or a folder with some.
        package: An installed Python package that brings its own catalogs.
        language: Language of the catalogs to use, as their folder is named; None takes all of a
            folder.
        vocabulary_size: Tokens that BPE may learn, three special ones not counted; bytes need no
            setting.
        source_length: Tokens a source may have, its end included; longer pairs are left out and
            counted.
        target_length: The same for targets.
        held_out_fraction: Part of the sources for validation, and again for test.

    The other arguments are those of :class:`~nlp.data.TextData`.

    Raises:
        ValueError: A setting is out of range, a file cannot be read, files are not aligned, or a
            part has no pair.
        FileNotFoundError: Files or the package are missing.
    """

    special_tokens = FIRST_TOKEN

    def __init__(
        self,
        source: str | None = None,
        target: str | None = None,
        catalogs: str | None = None,
        package: str = "gramps",
        language: str | None = "de",
        tokenizer: str = "bpe",
        vocabulary_size: int = 2048,
        source_length: int = 32,
        target_length: int = 32,
        batch_size: int = 16,
        eval_batch_size: int = 64,
        held_out_fraction: float = 0.05,
        seed: int = 0,
        cache_dir: str = "outputs/cache",
    ) -> None:
        super().__init__(
            tokenizer,
            vocabulary_size,
            batch_size,
            eval_batch_size,
            held_out_fraction,
            seed,
            cache_dir,
        )
        check_at_least(2, source_length=source_length, target_length=target_length)
        self.source_length = source_length
        self.target_length = target_length
        self.parts: dict[str, Batch] = {}
        # Read before other processes are started, which would wait for a failing one.
        pairs = self._read(source, target, catalogs, package, language)
        kept, self.left_out = clean_pairs(pairs)
        self.num_read = len(pairs)
        self.texts = split_pairs(kept, held_out_fraction)
        self._check_parts(
            {stage: len(part) for stage, part in self.texts.items()}, "give more text"
        )

    @staticmethod
    def _read(
        source: str | None,
        target: str | None,
        catalogs: str | None,
        package: str,
        language: str | None,
    ) -> list[Pair]:
        if (source is None) != (target is None):
            raise ValueError(
                f"data.source={source} data.target={target}: give both files or neither"
            )
        if source is not None and catalogs is not None:
            raise ValueError(
                f"data.source={source} data.catalogs={catalogs}: give files or catalogs, not both"
            )
        if source is not None:
            return read_aligned(Path(source), Path(target))
        if catalogs is not None:
            return read_catalogs(find_catalogs(Path(catalogs), language))
        return read_catalogs(package_catalogs(package, language))

    def _check_parts(self, sizes: dict[str, int], remedy: str) -> None:
        empty = [stage for stage in STAGES if not sizes[stage]]
        if empty:
            raise ValueError(
                f"of {self.num_read} pairs read none is left for {' and '.join(empty)} "
                f"(data.held_out_fraction={self.held_out_fraction}); {remedy}"
            )

    def training_text(self) -> bytes:
        return "\n".join(text for pair in self.texts["train"] for text in pair).encode()

    def num_rows(self, stage: str) -> int:
        """Pairs of a part that are not too long."""
        return len(self.parts[stage]["source"])

    def setup(self, stage: str | None = None) -> None:
        if self.parts:
            return
        self.tokenizer = self.load_tokenizer(self.training_text())
        parts = {name: self._encode(texts) for name, texts in self.texts.items()}
        sizes = {name: len(part["source"]) for name, part in parts.items()}
        lengths = (
            f"data.source_length={self.source_length}, data.target_length={self.target_length}"
        )
        self.left_out["too long"] = sum(map(len, self.texts.values())) - sum(sizes.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        rank_zero_info(
            f"Parallel text: kept {sum(sizes.values())} of {self.num_read} pairs (left out:"
            f" {reasons} for {lengths} tokens); {sizes['train']} to train, {sizes['val']} to"
            f" validate, {sizes['test']} to test"
        )
        self._check_parts(sizes, f"pairs with more tokens than {lengths} are left out: raise them")
        self.parts = parts

    def _encode(self, pairs: list[Pair]) -> Batch:
        """Turn pairs into rows, leaving out those that are too long; int32, as a large corpus stays
        in memory.
        """
        tokens = [
            [self.tokenizer.encode(text.encode())[0] + FIRST_TOKEN for text in pair]
            for pair in pairs
        ]
        fitting = [
            (source, target)
            for source, target in tokens
            if len(source) < self.source_length and len(target) < self.target_length
        ]
        rows = self._blank(len(fitting), np.int32)
        for row, (source, target) in enumerate(fitting):
            rows["source"][row, : len(source)] = source
            rows["source"][row, len(source)] = EOS
            rows["target_in"][row, 1 : len(target) + 1] = target
            rows["targets"][row, : len(target)] = target
            rows["targets"][row, len(target)] = EOS
        return rows

    def _blank(self, count: int, dtype: npt.DTypeLike) -> Batch:
        """Rows of padding. Their source has one token, because attention over no token is NaN."""
        source = np.full((count, self.source_length), PAD, dtype)
        target_in = np.full((count, self.target_length), PAD, dtype)
        source[:, 0] = EOS
        target_in[:, 0] = BOS
        return {
            "source": source,
            "target_in": target_in,
            "targets": np.full_like(target_in, IGNORED),
        }

    def training_rows(self, rows: Rows) -> Batch:
        """Give the training rows with these global numbers."""
        part = self.parts["train"]
        drawn = (hash_counters(self.seed, rows) % np.uint64(len(part["source"]))).astype(np.int64)
        return {
            name: torch.from_numpy(values[drawn].astype(np.int64)) for name, values in part.items()
        }

    def evaluation_rows(self, stage: str, rows: Rows) -> Batch:
        """Give these rows of a part, filled up to ``eval_batch_size``."""
        blank = self._blank(self.eval_batch_size - len(rows), np.int64)
        part = self.parts[stage]
        return {
            name: torch.from_numpy(np.concatenate([part[name][rows], blank[name]])) for name in part
        }

    def decode(self, tokens: Tensor) -> list[str]:
        """Give the texts of rows of tokens (int64 ``[rows, time]``), each up to its ``EOS``."""
        texts = []
        for row in tokens.cpu().numpy():
            ends = np.flatnonzero(row == EOS)
            text = row[: ends[0]] if len(ends) else row
            texts.append(self.tokenizer.decode(text[text >= FIRST_TOKEN] - FIRST_TOKEN))
        return texts
