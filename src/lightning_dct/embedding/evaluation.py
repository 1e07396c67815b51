"""Exact rows outside training, for ranks with different numbers of batches.

A collective needs every rank. So in each round every rank announces how many rows it requests, or that it has no more
batches. It then answers the others until no rank has batches. The modules of one model share their rounds: ranks may
request rows of different modules in the same round.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.bags import Bags
from lightning_dct.embedding.lookup import DistinctRows
from lightning_dct.embedding.owners import Int64Array
from lightning_dct.embedding.state import TableState
from lightning_dct.traffic import FP32_BYTES, ID_BYTES
from lightning_dct.wire.positions import PayloadError, PositionCode, reading

FINISHED = -1
# The number of integers that a round announces to each rank: the module's index, and the number of rows.
ANNOUNCED = 2


class ExactReader:
    """A look-up of exact rows: the constructor reads them, :meth:`pooled` pools them."""

    def __init__(self, module: TableState, bags: Bags) -> None:
        self._rows = DistinctRows(bags, module)
        _, parts = exact_round(module.evaluated_with or (module,), module, self._rows.wanted)
        own = self._rows.wanted[module.exchange_group.rank]
        parts[module.exchange_group.rank] = module.own_rows(own)
        lookups = int(sum(self._rows.lookups[peer] for peer in module.peers))
        row_bytes = FP32_BYTES * module.embedding_dim
        module.evaluation_traffic.add(steps=1, bytes_dense=lookups * (ID_BYTES + 2 * row_bytes))
        self._distinct = torch.cat(parts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pooled(self) -> Tensor:
        """The pooled rows, ``[samples, tables, dim]``."""
        return self._rows.bags.pool(self._distinct[self._rows.inverse])


def exact_round(
    modules: Sequence[TableState], module: TableState, wanted: list[Int64Array] | None
) -> tuple[bool, list[Tensor]]:
    """Request rows of one of the modules, which have the same order on every rank, and answer the others.

    ``wanted`` is None if this rank has no more batches.

    Returns:
        Whether all ranks have finished, and the rows by owner, ``[k, dim]`` each.
    """
    exchange, placement, traffic = modules[0].exchange_group, module.placement, module.evaluation_traffic
    weight, row_bytes = module.weight, module.embedding_dim * module.weight.element_size()
    places = [np.empty(0, dtype=np.int64)] * placement.world_size if wanted is None else wanted
    which = modules.index(module)
    numbers = [(which, FINISHED if wanted is None else len(part)) for part in places]
    announced = exchange.announce(np.array(numbers, dtype=np.int64), traffic, FINISHED)
    requested = announced[:, 0]
    if (requested < 0).any() or (requested >= len(modules)).any():
        raise PayloadError(f"A rank requests module {requested.max()} of {len(modules)} sharded tables.")
    if wanted is None and (announced[:, 1] == FINISHED).all():
        return True, []
    payloads: dict[int, Tensor] = {}
    codes: dict[int, PositionCode] = {}
    for peer in module.peers:
        count, universe = max(int(announced[peer, 1]), 0), modules[requested[peer]].placement.owned_rows[exchange.rank]
        if count > universe:
            raise PayloadError(f"Rank {peer} requests {count} rows where there are {universe}.")
        codes[peer] = PositionCode(universe, count)
        own = PositionCode(placement.owned_rows[peer], places[peer].size)
        payloads[peer] = own.encode(torch.from_numpy(places[peer]).to(weight.device))
    sizes = {peer: code.num_bytes for peer, code in codes.items()}
    requests = exchange.start(payloads, sizes, traffic).wait()
    answers = {}
    for peer, code in codes.items():
        with reading(f"Ids that rank {peer} of the process group requests"):
            requested_places = code.decode(requests[peer], code.capacity).cpu().numpy()
        answers[peer] = modules[requested[peer]].own_rows(requested_places).view(-1).view(torch.uint8)
        sizes[peer] = len(places[peer]) * row_bytes
    received = exchange.start(answers, sizes, traffic).wait()
    return False, [part.clone().view(weight.dtype).view(-1, module.embedding_dim) for part in received]
