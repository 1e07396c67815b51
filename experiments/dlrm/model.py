"""DLRM: dense features through a network, categories through embedding tables, all pairs of dot
products on top.

The architecture and the initialisation of Naumov et al., *Deep Learning Recommendation Model for
Personalization and Recommendation Systems* (2019)::

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

from dlrm.other_tables import QuantisedTables, ThresholdedTables
from lightning_dct import GrowingEmbeddingBags, ShardedEmbeddingBags

FIXED_TABLES = {
    "sharded": ShardedEmbeddingBags,
    "thresholded": ThresholdedTables,
    "quantised": QuantisedTables,
}
"""Tables of a fixed number of rows that are spread over the ranks, by kind."""


def fully_connected(sizes: Sequence[int], *, activate_last: bool) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them, initialised as in the reference."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(layer.bias, std=math.sqrt(1 / outputs))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers if activate_last else layers[:-1])


class DLRM(nn.Module):
    """The reference model, one embedding bag (sum) a categorical feature.

    Args:
        num_dense: Number of dense features.
        table_rows: Rows of each embedding table.
        embedding_dim: Size of an embedding, and of the bottom network's output.
        bottom_sizes: Hidden widths of the bottom network.
        top_sizes: Hidden widths of the top network.
        exchange: Settings of the tables' class to spread them over the ranks; None keeps whole
            tables on every rank.
        kind: That class: ``"sharded"`` for ``ShardedEmbeddingBags``, ``"growing"`` for
            ``GrowingEmbeddingBags``, or one of ``"thresholded"`` and ``"quantised"`` for a class of
            :mod:`dlrm.other_tables`.
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
            self.tables = FIXED_TABLES[kind](table_rows, embedding_dim, **exchange)
        else:
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(rows, embedding_dim, mode="sum") for rows in table_rows
            )
            for table in self.tables:
                bound = 1 / math.sqrt(table.num_embeddings)
                nn.init.uniform_(table.weight, -bound, bound)
        num_vectors = 1 + len(table_rows)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = fully_connected([embedding_dim + num_pairs, *top_sizes, 1], activate_last=False)

    def interact(self, vectors: Tensor) -> Tensor:
        """Dot products of all pairs among ``[batch, vectors, embedding_dim]``: ``[batch,
        pairs]``.
        """
        products = vectors @ vectors.transpose(1, 2)
        # Each pair once, and no vector with itself: the lower triangle. Not kept as buffers, which
        # DistributedDataParallel would send to every rank before every forward.
        count = vectors.shape[1]
        rows, columns = torch.tril_indices(count, count, offset=-1, device=vectors.device)
        return products[:, rows, columns]

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """The logit of a click ``[batch]``; ``categorical`` has one row number a table, ``[batch,
        tables]``.
        """
        if hasattr(self.tables, "request"):
            # Rows travel while the bottom network computes.
            lookup = self.tables.request(categorical)
            bottom = self.bottom(dense)
            pooled = lookup.pooled()
        else:
            bottom = self.bottom(dense)
            bags = [
                table(categorical[:, index : index + 1]) for index, table in enumerate(self.tables)
            ]
            pooled = torch.stack(bags, dim=1)
        pairs = self.interact(torch.cat([bottom.unsqueeze(1), pooled], dim=1))
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)
