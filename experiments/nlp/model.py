"""A decoder-only transformer language model, small enough to read from top to bottom."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention, then a two-layer network, each on a normalised input and added to what came in.

    Args:
        width: Size of the hidden state.
        num_heads: Attention heads; must divide ``width``.
        dropout: Fraction of activations dropped while training.
        causal: Position ``t`` sees positions up to ``t`` only; otherwise all of them.

    Raises:
        ValueError: If ``num_heads`` does not divide ``width``.
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

        Args:
            hidden: The hidden state.
            mask: bool ``[batch, 1, 1, time]``, True where a position may be seen; for blocks that are not causal.
        """
        hidden = hidden + self._drop(self.attend(self.attention_norm(hidden), mask))
        return self.feed_forward(hidden)

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Multi-head self-attention over ``[batch, time, width]``."""
        batch, time, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        return self.attention_output(mixed.transpose(1, 2).reshape(batch, time, width))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Add the two-layer network's output, position by position."""
        expanded = functional.gelu(self.expand(self.feed_forward_norm(hidden)))
        return hidden + self._drop(self.contract(expanded))

    def _drop(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, self.dropout, self.training)


class TransformerLanguageModel(nn.Module):
    """Predicts the next token at every position.

    Args:
        vocabulary_size: Number of distinct tokens.
        context_length: Longest sequence, in tokens.
        num_layers: Number of blocks.
        width: Size of the hidden state.
        num_heads: Attention heads; must divide ``width``.
        dropout: Fraction of activations dropped while training.
        tie_weights: Use the token embedding as the output matrix.

    Raises:
        ValueError: If ``num_heads`` does not divide ``width``.
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
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.token_embedding = nn.Embedding(vocabulary_size, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.output_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary_size, bias=False)
        # The linear layers keep PyTorch's initialisation; its embeddings of unit variance would drown them.
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        if tie_weights:
            self.output.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the next token.

        Args:
            tokens: int64 ``[batch, time]``, ``time`` at most the context length.

        Returns:
            float ``[batch, time, vocabulary_size]``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.output_norm(hidden))
