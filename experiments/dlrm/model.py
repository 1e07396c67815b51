"""DLRM: dense features through a network, categories through embedding tables, all pairs of dot products on top.

The architecture and the initialisation of Naumov et al., *Deep Learning Recommendation Model for Personalization
and Recommendation Systems* (2019)::

    dense [B, D] --> bottom network --> [B, d] --+-------------------------------+
                                                 +--> dot products of all pairs --+--> top network --> logit [B]
    ids   [B, T] --> T embedding bags --> T x [B, d]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct import GrowingEmbeddingBags, ShardedEmbeddingBags, SplitPoint
from lightning_dct.traffic import Traffic


def fully_connected(sizes: Sequence[int], *, activate_last: bool) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them, initialised as in the reference."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(layer.bias, std=math.sqrt(1 / outputs))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers if activate_last else layers[:-1])


class ThresholdedTables(nn.Module):
    """The paper's exchange (Gupta et al., KDD 2021, section 3.2), to compare changes with.

    Only the largest entries of a batch's pooled embeddings cross, and the others are zero for the model; gradients come
    back under the same mask. Here rows cross as they are, and the rank that uses them masks what it has pooled: the
    same model, but each threshold sees one rank's batch. The counter has the bytes that would cross of all tables,
    without ids.

    ``density`` is the share of a table's pooled entries that crosses, and ``value_format`` that of pooled embeddings
    and of their gradients. Other settings are those of :class:`lightning_dct.ShardedEmbeddingBags`.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        embedding_dim: int,
        density: float,
        value_format: Any = "bf16",
        refresh_every: int = 1000,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.rows = ShardedEmbeddingBags(table_rows, embedding_dim, density=1.0, value_format="fp32", **settings)
        formats = {"forward_format": value_format, "backward_format": value_format}
        self.masks = nn.ModuleList(
            SplitPoint(density, refresh_every=refresh_every, **formats, seed=table) for table in range(len(table_rows))
        )
        self._not_reported = Traffic()

    def request(self, ids: Tensor) -> ThresholdedTables:
        """Start the exchange of rows for ids ``[batch, tables]``."""
        self.rows.traffic = self._not_reported  # the strategy gives it the counter of the masks
        self._lookup = self.rows.request(ids)
        return self

    def pooled(self) -> Tensor:
        """Wait for the rows; pool and mask them: ``[batch, tables, dim]``."""
        parts = self._lookup.pooled().unbind(1)
        return torch.stack([mask(part) for mask, part in zip(self.masks, parts, strict=True)], dim=1)


class DLRM(nn.Module):
    """The reference model, one embedding bag (sum) a categorical feature.

    Args:
        num_dense: Number of dense features.
        table_rows: Rows of each embedding table.
        embedding_dim: Size of an embedding, and of the bottom network's output.
        bottom_sizes: Hidden widths of the bottom network.
        top_sizes: Hidden widths of the top network.
        exchange: Settings of the tables' class to spread them over the ranks; None keeps whole tables on every rank.
        kind: That class: ``"sharded"`` for ``ShardedEmbeddingBags``, ``"growing"`` for ``GrowingEmbeddingBags``, or
            ``"thresholded"`` for :class:`ThresholdedTables`.
    """

    def __init__(
        self,
        num_dense: int,
        table_rows: Sequence[int],
        embedding_dim: int = 16,
        bottom_sizes: Sequence[int] = (64, 32),
        top_sizes: Sequence[int] = (64, 32),
        exchange: Mapping[str, Any] | None = None,
        kind: str = "sharded",
    ) -> None:
        super().__init__()
        self.bottom = fully_connected([num_dense, *bottom_sizes, embedding_dim], activate_last=True)
        self.tables: nn.Module
        if exchange is not None and kind == "growing":
            self.tables = GrowingEmbeddingBags(len(table_rows), embedding_dim, **exchange)
        elif exchange is not None:
            fixed = ThresholdedTables if kind == "thresholded" else ShardedEmbeddingBags
            self.tables = fixed(table_rows, embedding_dim, **exchange)
        else:
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, embedding_dim, mode="sum") for rows in table_rows)
            for table in self.tables:
                bound = 1 / math.sqrt(table.num_embeddings)
                nn.init.uniform_(table.weight, -bound, bound)
        num_vectors = 1 + len(table_rows)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = fully_connected([embedding_dim + num_pairs, *top_sizes, 1], activate_last=False)

    def interact(self, vectors: Tensor) -> Tensor:
        """Dot products of all pairs among ``[batch, vectors, embedding_dim]``: ``[batch, pairs]``."""
        products = vectors @ vectors.transpose(1, 2)
        # Each pair once, and no vector with itself: the lower triangle. Not kept as buffers, which
        # DistributedDataParallel would send to every rank before every forward.
        count = vectors.shape[1]
        rows, columns = torch.tril_indices(count, count, offset=-1, device=vectors.device)
        return products[:, rows, columns]

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """The logit of a click ``[batch]``; ``categorical`` has one row number a table, ``[batch, tables]``."""
        if hasattr(self.tables, "request"):
            # Rows travel while the bottom network computes.
            lookup = self.tables.request(categorical)
            bottom = self.bottom(dense)
            pooled = lookup.pooled()
        else:
            bottom = self.bottom(dense)
            bags = [table(categorical[:, index : index + 1]) for index, table in enumerate(self.tables)]
            pooled = torch.stack(bags, dim=1)
        pairs = self.interact(torch.cat([bottom.unsqueeze(1), pooled], dim=1))
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)
