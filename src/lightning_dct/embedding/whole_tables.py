"""Gives tables back whole, for serving: a file a table, which any program with torch reads, in
bounded memory.

The owners send their rows to rank 0, some at a time. It writes them to files that ``torch.load``
reads, or maps::

    serving/items.pt    float32 [rows, dim]
    serving/users.pt
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.owners import ROWS_AT_A_TIME, in_parts
from lightning_dct.embedding.sharded import ShardedEmbeddingBags


def gather_tables(tables: ShardedEmbeddingBags, folder: str | Path) -> dict[str, Tensor]:
    """Write each table to a file of its own, ``[rows, dim]``; a collective call.

    No rank ever has more than 65,536 rows beside its own. The folder is one of rank 0, which need
    not share a disk with others; an existing file is overwritten.

    Args:
        tables: The tables; not growing ones, whose rows have no order.
        folder: Where the files go: ``NAME.pt`` of each table.

    Returns:
        The tables by name, mapped from the files; nothing on ranks other than 0.

    Raises:
        TypeError: The tables grow.
        RuntimeError: The tables have no rows yet.
    """
    if isinstance(tables, GrowingEmbeddingBags):
        raise TypeError(
            "Growing tables have no order of rows: save a checkpoint instead, or export what you"
            " look up."
        )
    if not tables.is_materialized:
        raise RuntimeError(
            "The tables have no rows yet: call this after `fit`, or after `materialize()`."
        )
    tables.take_answers()
    is_writer = tables.exchange_group.rank == 0
    found: dict[str, Tensor] = {}
    for number, table in enumerate(tables.tables):
        whole = None
        if is_writer:
            whole = _new_file(
                Path(folder) / f"{quote(table.name, safe='')}.pt",
                (table.rows, table.dim),
                tables.weight,
            )
            found[table.name] = whole
        for start in range(0, table.rows, ROWS_AT_A_TIME):
            _gather_part(tables, number, start, min(start + ROWS_AT_A_TIME, table.rows), whole)
    return found


def _gather_part(
    tables: ShardedEmbeddingBags, number: int, start: int, stop: int, whole: Tensor | None
) -> None:
    """Send rank 0 the rows of a table from ``start`` to ``stop``; there they are written into
    ``whole``.
    """
    exchange = tables.exchange_group
    placement = tables.placement
    weight = tables.weight
    ranges: dict[int, list[tuple[int, int, int]]] = {
        rank: [
            (max(low, start), min(high, stop), place + max(start - low, 0))
            for table, low, high, place in placement.ranges(rank)
            if table == number and max(low, start) < min(high, stop)
        ]
        for rank in range(placement.world_size)
    }
    own = [
        tables.own_rows(places)
        for low, high, at in ranges[exchange.rank]
        for places in in_parts(at, at + high - low)
    ]
    mine = torch.cat([weight.new_empty(0, tables.embedding_dim), *own])
    row_bytes = mine.shape[1] * mine.element_size()
    counts = {rank: sum(high - low for low, high, _ in parts) for rank, parts in ranges.items()}
    sizes = {rank: count * row_bytes for rank, count in counts.items()} if whole is not None else {}
    received = exchange.start(
        {0: mine.view(-1).view(torch.uint8)}, sizes, tables.evaluation_traffic
    )()
    if whole is None:
        return
    for rank, parts in ranges.items():
        rows = received[rank].clone().view(weight.dtype).view(-1, tables.embedding_dim)
        for low, high, _ in parts:
            whole[low:high] = rows[: high - low].cpu()
            rows = rows[high - low :]


def _new_file(path: Path, shape: tuple[int, int], like: Tensor) -> Tensor:
    """A tensor in a new file of ``torch.save``; what is written into it is in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FakeTensorMode():
        unwritten = torch.empty(shape, dtype=like.dtype)
    # Writes all of the file but the values, for which it leaves room.
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(unwritten, path)
    return _mapped(path)


def _mapped(path: Path) -> Tensor:
    import mmap

    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        whole: Any = torch.load(path, mmap=True, weights_only=True)
    assert isinstance(whole, Tensor)
    return whole
