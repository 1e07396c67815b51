"""What ranks do in the tests of growing tables."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embedding.hybrid import DIM, TABLE_ROWS, Hybrid, fit, whole
from embedding.plain_directory import GrowingEmulation
from embedding.training import train_beside
from lightning_dct import GrowingEmbeddingBags
from lightning_dct.embedding.owners import place_by_hash
from lightning_dct.reference import Settings


def spread(ids: Tensor) -> Tensor:
    """Small ids as large ones, some of which need more bits than a key leaves."""
    return ids * (2**54 + 3)


class Growing(Hybrid):
    """A small hybrid-parallel model with growing tables."""

    def __init__(
        self, exchange: dict[str, Any], optimizer: str = "sgd", learning_rate: float = 0.2
    ) -> None:
        super().__init__({}, optimizer, learning_rate)
        self.tables = GrowingEmbeddingBags(len(TABLE_ROWS), DIM, seed=5, **exchange)

    def slots(self) -> dict[str, int]:
        keys, slots = self.tables.directory.rows.contents()
        located = zip(*self.tables.placement.rows_of(0, keys), slots, strict=True)
        return {f"{table}.{row}": slot for table, row, slot in located}

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(spread(ids))


def train(
    number: int,
    exchange: dict[str, Any],
    optimizer: str = "sgd",
    settings: dict[str, Any] | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Train, save when told where, and give this rank's weights, and how many rows it has
    evicted.
    """
    module = Growing(exchange, optimizer)
    fit(module, number, **(settings or {}))
    return whole(module), module.tables.traffic.totals.evicted_rows


def train_beside_the_reference(
    steps: int, kind: str, admit_after: int, **settings: Any
) -> dict[str, Any]:
    """Train tables that are too small beside the reference; the largest differences, and how many
    rows there are.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sizes = [40, 3, 17, 200]
    tables = GrowingEmbeddingBags(
        len(sizes), DIM, max_rows=40, admit_after=admit_after, seed=3, **settings
    )
    tables.materialize()
    # Ids in the order of their keys, because messages name rows in that order.
    ids = [spread(torch.arange(size)) for size in sizes]
    placement = place_by_hash(len(sizes), world_size)
    for table, known in enumerate(ids):
        keys = placement.locate(torch.full_like(known, table).numpy(), known.numpy())[1]
        ids[table] = known[torch.from_numpy(keys).argsort()]
    options = Settings(**settings)
    emulation = GrowingEmulation(
        ids, tables._default_rows, placement, options, tables.capacity(), admit_after
    )

    def given(small: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if offsets is None:
            return torch.stack(
                [ids[table][column] for table, column in enumerate(small.T)], dim=1
            ), None
        samples = (len(offsets) - 1) // len(sizes)
        of_table = offsets[::samples] if samples else offsets.new_zeros(len(sizes) + 1)
        pieces = zip(ids, of_table, of_table[1:], strict=False)
        return torch.cat([known[small[start:stop]] for known, start, stop in pieces]), offsets

    def compared(_: list[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for keys, rows in zip(emulation.keys, emulation.tables, strict=True):
            own = (placement.locate(*placement.rows_of(0, keys))[0] == rank).nonzero()[0]
            yield "rows", tables.own_rows(keys[own]), rows[torch.from_numpy(own)]

    worst = train_beside(emulation, tables, steps, kind, sizes, given, compared)
    totals = tables.traffic.totals
    there = len(tables.directory.rows)
    assert (totals.admitted_rows, totals.evicted_rows) == (
        emulation.admitted[rank],
        emulation.evicted[rank],
    )
    return {**worst, "evicted": totals.evicted_rows, "there": there, "room": tables.capacity()}
