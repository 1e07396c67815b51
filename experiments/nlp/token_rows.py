"""The common part of data modules of tokens: settings, and one tokenizer learnt from the training
part.
"""

from abc import abstractmethod
from pathlib import Path

from nlp.tokenizer import TOKENIZERS, BytePairTokenizer, ByteTokenizer
from streams import RowData

IGNORED = -100
"""Target of positions that fill up a row and do not count."""

STAGES = ("train", "val", "test")


class TokenRows(RowData):
    """Rows of tokens to train on, drawn at random, and to score, each once.

    Subclasses define a row.

    A training row is a pure function of the seed and its number, and a global batch holds the same
    rows whatever the number of ranks (see ``streams``). The arguments are those of
    :class:`~nlp.data.TextData`.
    """

    tokenizer: ByteTokenizer | BytePairTokenizer
    """Known after ``setup``."""
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
        super().__init__(batch_size, eval_batch_size)
        if tokenizer not in TOKENIZERS:
            raise ValueError(f"data.tokenizer={tokenizer!r}: choose one of {', '.join(TOKENIZERS)}")
        if not 0 < held_out_fraction < 0.5:
            raise ValueError(
                f"data.held_out_fraction={held_out_fraction}: must lie between 0 and 0.5"
            )
        self.tokenizer_name = tokenizer
        self.requested_vocabulary_size = vocabulary_size
        self.held_out_fraction = held_out_fraction
        self.seed = seed
        self.cache_dir = Path(cache_dir)

    @abstractmethod
    def training_text(self) -> bytes:
        """The text that the tokenizer learns from."""

    @property
    def vocabulary_size(self) -> int:
        """Number of distinct tokens, the special ones included; known after ``setup``."""
        return self.tokenizer.vocabulary_size + self.special_tokens

    def load_tokenizer(self, training_text: bytes) -> ByteTokenizer | BytePairTokenizer:
        """Make the tokenizer, learnt from a text where it learns at all."""
        if self.tokenizer_name == "byte":
            return ByteTokenizer()
        return BytePairTokenizer.train_or_load(
            training_text, self.requested_vocabulary_size, self.cache_dir
        )

    def prepare_data(self) -> None:
        """Train the tokenizer: one process a node does, the others wait."""
        self.load_tokenizer(self.training_text())

    def epoch_batches(self, world_size: int) -> int:
        """As many rows as the training part has: training rows are random, so an epoch is only a
        measure.
        """
        return max(1, self.num_rows("train") // (self.batch_size * world_size))
