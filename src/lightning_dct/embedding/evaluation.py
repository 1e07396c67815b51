"""Exact rows outside training, for ranks that need not have equally many batches.

Collectives want every rank in them, and a rank that has run out of batches would leave the others waiting. So each
round begins with every rank telling the others how many rows it asks for, or that it has finished; a rank that has
finished keeps answering until it hears the same from all. Modules of one model share their rounds: a rank may ask one
of them while another rank has finished or asks another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_dct.activations import SplitPoint
from lightning_dct.embedding.bags import Bags
from lightning_dct.embedding.exchange import check_announced
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
        _, parts = _round(module.evaluated_with or (module,), module, self._rows.wanted)
        own = self._rows.wanted[module.exchange_group.rank]
        parts[module.exchange_group.rank] = module.own_rows(own)
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


def serve_until_all_finish(modules: Sequence[ShardedEmbeddingBags]) -> None:
    """Answer without asking until every rank has finished.

    Args:
        modules: All that are evaluated together, in the same order on every rank.
    """
    while modules[0].peers and not _round(modules, modules[0], None)[0]:
        pass


def _round(
    modules: Sequence[ShardedEmbeddingBags], module: ShardedEmbeddingBags, wanted: list[Int64Array] | None
) -> tuple[bool, list[Tensor]]:
    """Ask for rows of one module (or say that this rank has finished) and answer the others, whichever they ask.

    Returns:
        Whether all ranks have finished, and the rows by owner, ``[k, dim]`` each.
    """
    exchange, placement, traffic = modules[0].exchange_group, module.placement, module.evaluation_traffic
    weight, row_bytes = module.weight, module.embedding_dim * module.weight.element_size()
    none = torch.empty(0, dtype=torch.uint8, device=weight.device)
    ranks = range(placement.world_size)
    asked = [np.empty(0, dtype=np.int64)] * placement.world_size if wanted is None else wanted
    which = modules.index(module)
    told = [(which, FINISHED if wanted is None else len(places)) for places in asked]
    heard = exchange.announce(np.array(told, dtype=np.int64), traffic)
    check_announced(heard, FINISHED)
    if (heard[:, 0] < 0).any() or (heard[:, 0] >= len(modules)).any():
        raise PayloadError(f"A rank asks for module {heard[:, 0].max()} of {len(modules)} sharded tables.")
    if wanted is None and (heard[:, 1] == FINISHED).all():
        return True, []
    payloads, sizes, universes, counts = [], [], [], []
    for peer in ranks:
        theirs = modules[heard[peer, 0]]
        universes.append(theirs.placement.owned_rows[exchange.rank])
        counts.append(max(int(heard[peer, 1]), 0) if peer in module.peers else 0)
        if counts[peer] > universes[peer]:
            raise PayloadError(f"Rank {peer} asks for {counts[peer]} rows where there are {universes[peer]}.")
        sizes.append(PositionCode(universes[peer], counts[peer]).num_bytes if peer in module.peers else 0)
        others = peer in module.peers
        payloads.append(_encode(asked[peer], placement.owned_rows[peer], weight.device) if others else none)
    requests = exchange.start(payloads, sizes, traffic).wait()
    answers = [none] * placement.world_size
    for peer in module.peers:
        theirs = modules[heard[peer, 0]]
        places = _decode(requests[peer], universes[peer], counts[peer])
        answers[peer] = theirs.own_rows(places).view(-1).view(torch.uint8)
    sizes = [len(asked[peer]) * row_bytes if peer in module.peers else 0 for peer in ranks]
    received = exchange.start(answers, sizes, traffic).wait()
    return False, [part.clone().view(weight.dtype).view(-1, module.embedding_dim) for part in received]


def _encode(places: Int64Array, universe: int, device: torch.device) -> Tensor:
    return PositionCode(universe, places.size).encode(torch.from_numpy(places).to(device))


def _decode(data: Tensor, universe: int, count: int) -> Int64Array:
    try:
        return PositionCode(universe, count).decode(data, count).cpu().numpy()
    except ValueError as error:
        raise PayloadError(f"the ids another rank asks for are corrupt: {error}") from error
