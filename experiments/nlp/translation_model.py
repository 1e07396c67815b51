"""An encoder-decoder transformer in two pieces, with one float tensor between them: the memory.

The encoder reads the source only. The decoder reads the memory and, from the batch, the source (for
its padding) and the target so far. So the two can be on different machines if both have the batch:
only the memory and its gradient cross, through a ``SplitPoint``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dct import SplitSequential
from lightning_dct.pipeline.sequential import context_of
from nlp.model import Block, TokenEmbedding
from nlp.splits import make_split
from nlp.translation_data import PAD


def visible(source: Tensor) -> Tensor:
    """Which source positions hold a token: int64 ``[batch, time]`` to bool ``[batch, 1, 1,
    time]``.
    """
    return (source != PAD)[:, None, None, :]


class DecoderBlock(Block):
    """A causal block that also looks at the memory, between looking at itself and the two-layer
    network.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__(width, num_heads, dropout, causal=True)
        self.memory_norm = nn.LayerNorm(width)
        self.memory_query = nn.Linear(width, width)
        self.memory_key_value = nn.Linear(width, 2 * width)
        self.memory_output = nn.Linear(width, width)

    def forward(self, hidden: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape, given memory ``[batch, source time,
        width]`` and its mask.

        The mask is bool ``[batch, 1, 1, source time]``, True where the memory may be seen.
        """
        hidden = hidden + self._drop(self.attend(self.attention_norm(hidden)))
        hidden = hidden + self._drop(
            self.attend_memory(self.memory_norm(hidden), memory, memory_mask)
        )
        return self.feed_forward(hidden)

    def attend_memory(self, hidden: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Multi-head attention of ``hidden`` over the memory; shapes as in ``forward``."""

        def heads(values: Tensor) -> Tensor:
            return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        key, value = self.memory_key_value(memory).chunk(2, dim=-1)
        mixed = functional.scaled_dot_product_attention(
            heads(self.memory_query(hidden)),
            heads(key),
            heads(value),
            memory_mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.memory_output(mixed.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """The first piece: source tokens to memory."""

    def __init__(
        self,
        vocabulary_size: int,
        source_length: int,
        num_layers: int,
        width: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary_size, source_length, width)
        self.embedding.initialise()
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout, causal=False) for _ in range(num_layers)
        )
        self.output_norm = nn.LayerNorm(width)

    def forward(self, source: Tensor) -> Tensor:
        """Map int64 ``[batch, source time]`` to float ``[batch, source time, width]``."""
        mask = visible(source)
        hidden = self.embedding(source)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.output_norm(hidden)


class Decoder(nn.Module):
    """The last piece: memory to the logits of the next target token."""

    def __init__(
        self,
        vocabulary_size: int,
        target_length: int,
        num_layers: int,
        width: int,
        num_heads: int,
        dropout: float,
        tie_weights: bool,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary_size, target_length, width)
        self.embedding.initialise()
        self.blocks = nn.ModuleList(
            DecoderBlock(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.output_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary_size, bias=False)
        if tie_weights:
            self.output.weight = self.embedding.tokens.weight

    def forward(self, memory: Tensor, source: Tensor, target_in: Tensor) -> Tensor:
        """The logits ``[batch, time, vocabulary_size]`` of the token after each position of
        ``target_in``.

        ``source`` shows where the padding of the memory is.
        """
        mask = visible(source)
        hidden = self.embedding(target_in)
        for block in self.blocks:
            hidden = block(hidden, memory, mask)
        return self.output(self.output_norm(hidden))


class EncoderDecoder(SplitSequential):
    """Translates, one target token at a time: ``network(source, source=source,
    target_in=target_in)``.

    It maps tokens ``[batch, source time]`` and ``[batch, time]`` to logits ``[batch, time,
    vocabulary_size]``. Its children are ``encoder``, ``decoder``, and between two pieces ``split``
    with its code. A single process runs them one after the other; ``DCTPipelineStrategy`` runs the
    encoder on one rank and the decoder on another. If its split knows the tokens
    (:func:`~nlp.splits.reads_tokens`), call it with ``tokens=source`` besides.

    Args:
        vocabulary_size: Of both languages.
        source_length: Longest source, as ``target_length`` in tokens.
        num_layers: Number of blocks in the encoder, and again in the decoder.
        tie_weights: Use the decoder's token embedding as its output matrix. The encoder has an
            embedding of its own, as it may be on another machine.
        pieces: 2 with a split point between encoder and decoder, 1 without.
        split: The settings of :func:`~nlp.splits.make_split`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        source_length: int,
        target_length: int,
        num_layers: int = 2,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = True,
        pieces: int = 1,
        split: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_pieces(pieces)
        self.encoder = Encoder(
            vocabulary_size, source_length, num_layers, width, num_heads, dropout
        )
        if pieces == 2:
            for part, module in make_split(width, vocabulary_size, **(split or {})).items():
                self.add_module(f"split{part}", module)
        self.decoder = Decoder(
            vocabulary_size, target_length, num_layers, width, num_heads, dropout, tie_weights
        )

    def remember(self, source: Tensor) -> Tensor:
        """Give the memory of a source as the decoder gets it, float ``[batch, source time,
        width]``.
        """
        # When a pipeline evaluates, a rank also has the other rank's piece, on the CPU.
        memory = source
        for child in list(self)[:-1]:
            device = next((parameter.device for parameter in child.parameters()), memory.device)
            memory = child(memory.to(device), **context_of(child, {"tokens": source.to(device)}))
        return memory.to(source.device)


def check_pieces(pieces: int) -> None:
    """Refuse ``pieces`` other than 1 and 2, with a ValueError."""
    if pieces not in (1, 2):
        raise ValueError(
            f"model.split.pieces={pieces}: the translation model is cut into 2 pieces, encoder and"
            " decoder, or not at all (1). With strategy=dct_pipeline use strategy.stages=2, and"
            " 'gpipe' or '1f1b' as strategy.schedule"
        )


@torch.no_grad()
def translate_greedily(
    network: EncoderDecoder, source: Tensor, begin: int, end: int, length: int
) -> Tensor:
    """Translate by taking the likeliest token, one after the other, at most ``length`` with the
    ``end``.

    Returns:
        int64 ``[batch, length]``, without ``begin``, padded after ``end``.
    """
    memory = network.remember(source)
    tokens = torch.full((len(source), length + 1), PAD, device=source.device)
    tokens[:, 0] = begin
    finished = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for time in range(length):
        likeliest = network.decoder(memory, source, tokens[:, : time + 1])[:, -1].argmax(-1)
        tokens[:, time + 1] = likeliest.where(~finished, PAD)
        finished |= likeliest == end
        if finished.all():
            break
    return tokens[:, 1:]
