"""Text as token windows: random crops to train on, every window once to validate on.

The text is cut into three contiguous blocks (90% training, 5% validation, 5% test), so that the
parts share no text. A tokenizer learns from the training block only.
"""

import hashlib
import importlib.util
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info

from counter_random import hash_counters
from nlp.token_rows import IGNORED, TokenRows
from streams import Batch, Rows, check_at_least

SOURCES_BYTES = 10_000_000
"""So much of SymPy's sources is read: more than a run of some thousand steps sees twice."""


def documentation() -> bytes:
    """The English documentation that CPython ships in ``pydoc_data.topics``, about 465 KB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@cache
def sources() -> bytes:
    """The first 10 MB of the Python sources of SymPy, which torch needs, without its tests and
    benchmarks.

    Files come in the order of the SHA-256 of their path, so that the held-out end is of the same
    kind as the rest.
    """
    spec = importlib.util.find_spec("sympy")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    names = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
    names = [name for name in names if not {"tests", "benchmarks"} & set(name.split("/"))]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    text = b"\n".join((root / name).read_bytes() for name in names)[:SOURCES_BYTES]
    digest = hashlib.sha256(text).hexdigest()
    rank_zero_info(
        f"Text: sources of SymPy {version('sympy')}, {len(text):,} bytes, SHA-256 {digest}"
    )
    return text


CORPORA = {"sources": sources, "documentation": documentation}


def check_text(path: str | Path | None) -> None:
    """See that there is a text to read, without reading it; a FileNotFoundError or, of an empty
    file, a ValueError.
    """
    if path is None:
        return
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"data.path={path}: there is no such file (looked for {path.resolve()}); "
            "give a text file, or leave data.path=null for the text of data.corpus"
        )
    if not path.stat().st_size:
        raise ValueError(f"data.path={path}: the file is empty; give a file with text in it")


def split_text(text: bytes, held_out_fraction: float) -> dict[str, bytes]:
    """Cut text into contiguous blocks, validation and test at the end, between characters of
    UTF-8.
    """

    def character_start(position: int) -> int:
        # Bytes 10xxxxxx continue a character.
        while position < len(text) and text[position] & 0b1100_0000 == 0b1000_0000:
            position += 1
        return position

    first = character_start(int(len(text) * (1 - 2 * held_out_fraction)))
    second = character_start(int(len(text) * (1 - held_out_fraction)))
    return {"train": text[:first], "val": text[first:second], "test": text[second:]}


class TextData(TokenRows):
    """Windows of a text for a language model.

    A batch is ``{"inputs": int64 [rows, context_length], "targets": int64 [rows,
    context_length]}``, targets one token ahead. Training window ``i`` is a pure function of
    ``(seed, i)``, and a global batch holds the same windows whatever the number of ranks (see
    ``streams``).

    Args:
        path: A text file in UTF-8; None for a text that is installed.
        corpus: Which one: ``sources``, 10 MB of SymPy, or ``documentation``, 465 KB that come with
            Python.
        tokenizer: ``byte`` or ``bpe``.
        vocabulary_size: Tokens that BPE may learn; bytes need no setting.
        context_length: Tokens a window.
        batch_size: Training windows a rank.
        eval_batch_size: Validation windows a rank.
        held_out_fraction: Part of the text for validation, and again for test.
        seed: Chooses the training windows.
        cache_dir: Where trained tokenizers are kept, by the hash of their training text.

    Raises:
        ValueError: A setting is out of range, the file is empty, or (in ``setup``) a part is too
            short for a window.
        FileNotFoundError: ``path`` is missing.
    """

    def __init__(
        self,
        path: str | None = None,
        corpus: str = "documentation",
        tokenizer: str = "byte",
        vocabulary_size: int = 1024,
        context_length: int = 128,
        batch_size: int = 8,
        eval_batch_size: int = 32,
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
        check_at_least(1, context_length=context_length)
        if corpus not in CORPORA:
            raise ValueError(f"data.corpus={corpus!r}: choose one of {', '.join(CORPORA)}")
        # Check before other processes are started, which would wait for this one.
        check_text(path)
        self.path = path
        self.corpus = corpus
        self.context_length = context_length
        self.tokens: dict[str, npt.NDArray[np.int64]] = {}
        self.bytes_per_token: dict[str, float] = {}

    def read(self) -> bytes:
        return CORPORA[self.corpus]() if self.path is None else Path(self.path).read_bytes()

    def training_text(self) -> bytes:
        return self._parts()["train"]

    def num_rows(self, stage: str) -> int:
        """Windows of a part, side by side: each predicts ``context_length`` tokens, the very first
        is no target.
        """
        return -(-(len(self.tokens[stage]) - 1) // self.context_length)

    def setup(self, stage: str | None = None) -> None:
        if self.tokens:
            return
        parts = self._parts()
        self.tokenizer = self.load_tokenizer(parts["train"])
        invalid = 0
        for name, part in parts.items():
            tokens, invalid_here = self.tokenizer.encode(part)
            invalid += invalid_here
            if len(tokens) <= self.context_length:
                raise ValueError(
                    f"data.path={self.path}: the text is too short, its {name} part has"
                    f" {len(tokens)} tokens and one window takes {self.context_length + 1}; give a"
                    " longer text or lower data.context_length"
                )
            self.tokens[name] = tokens
            self.bytes_per_token[name] = len(part) / len(tokens)
        if invalid:
            warnings.warn(
                f"data.path={self.path}: {invalid} bytes are not UTF-8 and became replacement"
                " characters; data.tokenizer=byte reads any bytes",
                stacklevel=2,
            )

    def training_rows(self, rows: Rows) -> Batch:
        tokens = self.tokens["train"]
        starts = hash_counters(self.seed, rows) % np.uint64(len(tokens) - self.context_length)
        window = tokens[starts.astype(np.int64)[:, None] + np.arange(self.context_length + 1)]
        return {
            "inputs": torch.from_numpy(window[:, :-1]),
            "targets": torch.from_numpy(window[:, 1:]),
        }

    def evaluation_rows(self, stage: str, rows: Rows) -> Batch:
        """Cut the ``rows``-th windows, side by side, of a part; the last is filled up with ignored
        targets.
        """
        tokens = self.tokens[stage]
        positions = rows[:, None] * self.context_length + np.arange(self.context_length + 1)
        window = tokens[np.minimum(positions, len(tokens) - 1)]
        targets = np.where(positions[:, 1:] < len(tokens), window[:, 1:], IGNORED)
        return {
            "inputs": torch.from_numpy(window[:, :-1].copy()),
            "targets": torch.from_numpy(targets),
        }

    def _parts(self) -> dict[str, bytes]:
        return split_text(self.read(), self.held_out_fraction)
