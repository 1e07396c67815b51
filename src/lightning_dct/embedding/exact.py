"""Look-ups of exact rows, where no gradient is wanted: evaluation, frozen tables.

Outside training ranks may have different numbers of batches, and a collective needs every rank. So
in each round every rank announces how many rows it requests, or that it has no more batches. It
then answers the others until no rank has batches. The modules of one model share their rounds:
ranks may request rows of different modules in the same round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.bags import Bags, DistinctRows
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire.positions import PayloadError, PositionCode, reading

if TYPE_CHECKING:
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags

# What a round announces: the module's index, and the number of rows or that there are no more
# batches.
ANNOUNCED_EXACT = 2
FINISHED = -1


class ExactReader:
    """A look-up of exact rows: the constructor reads them, :meth:`pooled` pools them."""

    def __init__(self, module: ShardedEmbeddingBags, bags: Bags) -> None:
        self._rows = DistinctRows(
            bags, module.placement, module.exchange_group.rank, module.weight.device
        )
        rows = exact_round(module, self._rows.wanted)
        assert rows is not None  # this rank has not finished
        self._distinct = rows
        lookups = int(sum(self._rows.lookups[peer] for peer in module.exchange_group.peers))
        row_bytes = FP32_BYTES * module.embedding_dim
        module.evaluation_traffic.add(steps=1, bytes_dense=lookups * (ID_BYTES + 2 * row_bytes))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pooled(self) -> Tensor:
        """The pooled rows, ``[samples, features, dim]``."""
        return self._rows.bags.pool(self.rows())

    def rows(self) -> Tensor:
        """The row of each look-up, ``[lookups, dim]``."""
        return self._distinct.index_select(0, self._rows.inverse)


def exact_round(module: ShardedEmbeddingBags, wanted: list[Int64Array] | None) -> Tensor | None:
    """Request rows of a module, None if this rank has no more batches, and answer the others.

    The result has the rows of all owners, ``[k, dim]``; it is None if all ranks have finished.
    """
    modules = module.evaluated_with or (module,)  # in the same order on every rank
    modules[0].take_answers()
    exchange = modules[0].exchange_group
    placement = module.placement
    traffic = module.evaluation_traffic
    weight = module.weight
    row_bytes = module.embedding_dim * module.weight.element_size()
    places = [np.empty(0, dtype=np.int64)] * placement.world_size if wanted is None else wanted
    which = modules.index(module)
    numbers = [(which, FINISHED if wanted is None else len(part)) for part in places]
    announced = exchange.announce(np.array(numbers, dtype=np.int64), traffic, FINISHED)
    requested = announced[:, 0]
    if (requested < 0).any() or (requested >= len(modules)).any():
        raise PayloadError(
            f"A rank requests module {requested.max()} of {len(modules)} sharded tables."
        )
    if wanted is None and (announced[:, 1] == FINISHED).all():
        return None
    payloads: dict[int, Tensor] = {}
    codes: dict[int, PositionCode] = {}
    for peer in exchange.peers:
        count = max(int(announced[peer, 1]), 0)
        universe = modules[requested[peer]].placement.owned_rows[exchange.rank]
        if count > universe:
            raise PayloadError(f"Rank {peer} requests {count} rows where there are {universe}.")
        codes[peer] = PositionCode(universe, count)
        own = PositionCode(placement.owned_rows[peer], places[peer].size)
        payloads[peer] = own.encode(torch.from_numpy(places[peer]).to(weight.device))
    sizes = {peer: code.num_bytes for peer, code in codes.items()}
    requests = exchange.start(payloads, sizes, traffic)()
    answers = {}
    for peer, code in codes.items():
        with reading(f"Ids that rank {peer} of the process group requests"):
            requested_places = code.decode(requests[peer], code.capacity).cpu().numpy()
        answers[peer] = (
            modules[requested[peer]].own_rows(requested_places).view(-1).view(torch.uint8)
        )
        sizes[peer] = len(places[peer]) * row_bytes
    received = exchange.start(answers, sizes, traffic)()
    rows = [part.clone().view(weight.dtype).view(-1, module.embedding_dim) for part in received]
    rows[exchange.rank] = module.own_rows(places[exchange.rank])
    return torch.cat(rows)
