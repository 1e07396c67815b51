"""A decoder-only transformer language model, small enough to read from top to bottom."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dct import SplitSequential
from nlp.splits import make_split


class Block(nn.Module):
    """Attention, then a two-layer network, each on a normalised input and added to its input.

    ``num_heads`` must divide ``width``. In a causal block, position ``t`` sees positions up to
    ``t`` only.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"model.num_heads={num_heads} must divide model.width={width}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape.

        ``mask``, for blocks that are not causal, is bool ``[batch, 1, 1, time]``, True where a
        position may be seen.
        """
        hidden = hidden + self._drop(self.attend(self.attention_norm(hidden), mask))
        return self.feed_forward(hidden)

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Multi-head self-attention over ``[batch, time, width]``."""
        batch, time, width = hidden.shape
        split = self.query_key_value(hidden).view(
            batch, time, 3, self.num_heads, width // self.num_heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        return self.attention_output(mixed.transpose(1, 2).reshape(batch, time, width))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Add the two-layer network's output, position by position."""
        expanded = functional.gelu(self.expand(self.feed_forward_norm(hidden)))
        return hidden + self._drop(self.contract(expanded))

    def _drop(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, self.dropout, self.training)


class TokenEmbedding(nn.Module):
    """The embedding of a token plus that of its position, times ``gain``."""

    def __init__(
        self, vocabulary_size: int, context_length: int, width: int, gain: float = 1.0
    ) -> None:
        super().__init__()
        self.gain = gain
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context_length, width)

    def initialise(self) -> None:
        """Draw small values: the linear layers keep PyTorch's, for which embeddings of unit
        variance are too large.
        """
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5 / self.gain)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 ``[batch, time]`` to ``[batch, time, width]``."""
        return self.gain * (
            self.tokens(tokens)
            + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        )


class Head(nn.Module):
    """From the hidden state to the logits of the next token."""

    def __init__(self, width: int, vocabulary_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to ``[batch, time, vocabulary_size]``."""
        return self.output(self.norm(hidden))


class TransformerLanguageModel(SplitSequential):
    """Predicts the next token at every position: maps int64 ``[batch, time]`` to ``[batch, time,
    vocabulary_size]``.

    Its children are ``embedding``, ``block_0``, ``block_1``, ..., ``head``, and between two pieces
    ``split_0``, ..., which compress the activations there. A single process runs them one after the
    other; ``DCTPipelineStrategy`` runs pieces on ranks. If its splits know the tokens
    (:func:`~nlp.splits.reads_tokens`), call it with ``tokens=``.

    Args:
        context_length: Longest sequence, in tokens.
        tie_weights: Use the token embedding as the output matrix.
        pieces: Parts that can run on different ranks; 1 for a model without split points.
        split: The settings of :func:`~nlp.splits.make_split`, of each split point.
        embedding_gain: Under Adam the embedding moves so many times as far in a step; see
            :class:`TokenEmbedding`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        num_layers: int = 2,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = False,
        pieces: int = 1,
        split: Mapping[str, Any] | None = None,
        embedding_gain: float = 1.0,
    ) -> None:
        super().__init__()
        cuts = cut_after(num_layers, pieces)
        self.embedding = TokenEmbedding(vocabulary_size, context_length, width, embedding_gain)
        for number in range(-1, num_layers):  # -1 is the embedding
            if number >= 0:
                self.add_module(f"block_{number}", Block(width, num_heads, dropout))
            if number in cuts:
                for part, module in make_split(width, vocabulary_size, **(split or {})).items():
                    self.add_module(f"split_{cuts.index(number)}{part}", module)
        self.head = Head(width, vocabulary_size)
        self.embedding.initialise()
        if tie_weights:
            self.head.output.weight = self.embedding.tokens.weight


def cut_after(num_layers: int, pieces: int) -> list[int]:
    """The blocks after which a model is cut into pieces of about as many blocks each; -1 stands for
    the embedding.

    Raises:
        ValueError: There are fewer modules than pieces.
    """
    if not 1 <= pieces <= num_layers + 2:
        raise ValueError(
            f"model.split.pieces={pieces}: a model of model.num_layers={num_layers} blocks can be"
            f" cut into 1 to {num_layers + 2} pieces"
        )
    if pieces <= num_layers:
        return [-(-piece * num_layers // pieces) - 1 for piece in range(1, pieces)]
    # The embedding is a piece of its own, and the head too when there is one more.
    return list(range(-1, pieces - 2))
