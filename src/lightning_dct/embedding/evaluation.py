"""Exact rows outside training, for ranks that need not have equally many batches.

Collectives want every rank in them, and a rank that has run out of batches would leave the others waiting. So each
round begins with every rank telling the others how many rows it asks for, or that it has finished; a rank that has
finished keeps answering until it hears the same from all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_dct.activations import SplitPoint
from lightning_dct.embedding.bags import Bags
from lightning_dct.embedding.lookup import DistinctRows
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire import PayloadError, PositionCode

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags

FINISHED = -1


class ExactReader:
    """A look-up of exact rows: asks in the constructor, pools in :meth:`pooled`."""

    def __init__(self, module: ShardedEmbeddingBags, bags: Bags) -> None:
        self._module = module
        self._rows = DistinctRows(bags, module)
        _, parts = _round(module, self._rows.wanted)
        own = self._rows.wanted[module.exchange_group.rank]
        parts[module.exchange_group.rank] = module.weight[torch.from_numpy(own).to(module.weight.device)]
        lookups = int(sum(self._rows.lookups[peer] for peer in module.peers))
        row_bytes = FP32_BYTES * module.embedding_dim
        module.evaluation_traffic.add(steps=1, bytes_dense=lookups * (ID_BYTES + 2 * row_bytes))
        self._distinct = torch.cat(parts)

    def pooled(self) -> Tensor:
        """The pooled rows, ``[samples, tables, dim]``."""
        pooled = self._rows.bags.pool(self._distinct[self._rows.inverse])
        if self._module.exchange == "changes":
            return pooled
        # A model trained on masked embeddings is worse without the mask. Thresholds are this batch's own.
        split = SplitPoint(**self._module.split).eval()
        split.completed_steps = self._module.completed_steps
        return split(pooled)

    @staticmethod
    def serve_until_all_finish(module: ShardedEmbeddingBags) -> None:
        """Answer without asking until every rank has finished."""
        while module.peers and not _round(module, None)[0]:
            pass


def _round(module: ShardedEmbeddingBags, wanted: list[Int64Array] | None) -> tuple[bool, list[Tensor]]:
    """Ask for rows (or say that this rank has finished) and answer the others.

    Returns:
        Whether all ranks have finished, and the rows by owner, ``[k, dim]`` each.
    """
    exchange, placement, weight = module.exchange_group, module.placement, module.weight
    none = torch.empty(0, dtype=torch.uint8, device=weight.device)
    asked = [np.empty(0, dtype=np.int64)] * placement.world_size if wanted is None else wanted
    told = np.array([[FINISHED if wanted is None else len(places)] for places in asked], dtype=np.int64)
    heard = exchange.announce(told, module.evaluation_traffic)[:, 0]
    if wanted is None and (heard == FINISHED).all():
        return True, []
    universe = placement.owned_rows[exchange.rank]
    counts = [max(int(heard[peer]), 0) if peer in module.peers else 0 for peer in range(placement.world_size)]
    payloads = [
        _encode(asked[peer], placement.owned_rows[peer], weight.device) if peer in module.peers else none
        for peer in range(placement.world_size)
    ]
    sizes = [
        PositionCode(universe, counts[peer]).num_bytes if peer in module.peers else 0
        for peer in range(placement.world_size)
    ]
    requests = exchange.start(payloads, sizes, module.evaluation_traffic).wait()
    answers = [none] * placement.world_size
    for peer in module.peers:
        places = _decode(requests[peer], universe, counts[peer])
        rows = weight.detach()[torch.from_numpy(places).to(weight.device)]
        answers[peer] = rows.contiguous().view(-1).view(torch.uint8)
    row_bytes = module.embedding_dim * weight.element_size()
    sizes = [len(asked[peer]) * row_bytes if peer in module.peers else 0 for peer in range(placement.world_size)]
    received = exchange.start(answers, sizes, module.evaluation_traffic).wait()
    return False, [part.clone().view(weight.dtype).view(-1, module.embedding_dim) for part in received]


def _encode(places: Int64Array, universe: int, device: torch.device) -> Tensor:
    return PositionCode(universe, places.size).encode(torch.from_numpy(places).to(device))


def _decode(data: Tensor, universe: int, count: int) -> Int64Array:
    try:
        return PositionCode(universe, count).decode(data, count).cpu().numpy()
    except ValueError as error:
        raise PayloadError(f"the ids another rank asks for are corrupt: {error}") from error
