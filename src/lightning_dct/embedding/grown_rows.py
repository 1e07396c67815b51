"""Growing tables in a checkpoint: for every owner, which key was in which slot, and the slots' values.

    tables.of_3.rows.row_at.rank_0    of 3 tables: keys by slot, -1 where it is free; and more arrays of the directory
    tables.rank_0                     rows by slot
    tables.optimizer_0.sum.rank_0     the optimizer's state by slot

The same number of ranks goes on with the same slots. Other ranks read the keys of all owners, keep those that are their
own now, and read the pieces with their rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.agreement import gather_objects
from lightning_dct.embedding.directory import PARTS
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.placement import Int64Array
from lightning_dct.embedding.row_files import RowReader
from lightning_dct.embedding.row_shards import RowShards, load_shards, naming
from lightning_dct.embedding.state import ROWS_AT_A_TIME
from lightning_dct.state_file import CheckpointError


def grown_shards(key: str, module: GrowingEmbeddingBags, values: Tensor) -> dict[str, RowShards]:
    """Values of this rank's slots, shape ``[slots, ...]``, as far as the slots were ever used."""
    return _whole(f"{key}.rank_{module.exchange_group.rank}", values[: module.directory.rows.num_slots])


def directory_shards(name: str, module: GrowingEmbeddingBags) -> dict[str, RowShards]:
    """This rank's directory."""
    return {
        key: shards
        for part, state in module.directory.state_dict().items()
        for field, value in state.items()
        for key, shards in _whole(
            f"{_directory(name, module)}.{part}.{field}.rank_{module.exchange_group.rank}",
            torch.as_tensor(value).reshape(-1),
        ).items()
    }


def load_directory(folder: str, name: str, module: GrowingEmbeddingBags) -> None:
    """Read which keys this rank has.

    Raises:
        CheckpointError: The folder is corrupt, or holds no growing tables of that name.
    """
    rank, capacity = module.exchange_group.rank, module.directory.rows.capacity
    with naming(folder):
        owners, has_same_slots = _sources(folder, name, module)
        key, fields = _directory(name, module), module.directory.rows.state_dict()
        states = [
            {part: {field: _read(folder, f"{key}.{part}.{field}", owner) for field in fields} for part in PARTS}
            for owner in owners
        ]
        if has_same_slots:
            module.directory.load_state_dict(states[0])
            return

        def is_own(keys: Int64Array) -> Any:
            return module.placement.locate(*module.placement.rows_of(rank, keys))[0] == rank

        module.directory.take_over(states, is_own)
        own = sum(int(is_own(rows[rows >= 0]).sum()) for rows in (s["rows"]["row_at"].numpy() for s in states))
    if own > capacity:
        warnings.warn(
            f"Rank {rank} owns {own} rows of {name!r} and has room for {capacity}: the {own - capacity} least recently"
            " requested are evicted. Raise `max_rows` to keep them.",
            stacklevel=2,
        )


def load_values(folder: str, name: str, key: str, module: GrowingEmbeddingBags, values: Tensor) -> None:
    """Read into ``values``, shape ``[slots, ...]``, what was saved under ``key`` for this rank's keys.

    Raises:
        CheckpointError: The folder is corrupt.
    """
    owners, has_same_slots = _sources(folder, name, module)
    if has_same_slots:
        load_shards(folder, grown_shards(key, module, values), alone=True)
        return
    for owner in owners:
        keys = _read(folder, f"{_directory(name, module)}.rows.row_at", owner).numpy()
        slots = np.where(keys >= 0, module.directory.find(keys), -1)
        for low in range(0, slots.size, ROWS_AT_A_TIME):
            part = slots[low : low + ROWS_AT_A_TIME]
            own = np.flatnonzero(part >= 0)
            if own.size:
                piece = values.new_empty(part.size, *values.shape[1:])
                shards = RowShards.of(slots.size, [(low, piece)], values)
                load_shards(folder, {f"{key}.rank_{owner}": shards}, alone=True)
                values[torch.from_numpy(part[own]).to(values.device)] = piece[torch.from_numpy(own).to(values.device)]


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on every rank what one rank raises inside; a collective call, as ranks read different files inside.

    Raises:
        CheckpointError: Another rank cannot read its rows.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    told = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for message in told:
        if message is not None:
            raise CheckpointError(message)


def _whole(key: str, values: Tensor) -> dict[str, RowShards]:
    """All of ``values`` under a key; nothing if they are empty, because files hold no empty tensors."""
    lows = range(0, len(values), ROWS_AT_A_TIME)
    pieces = [(low, values[low : low + ROWS_AT_A_TIME]) for low in lows]
    return {key: RowShards.of(len(values), pieces, values)} if pieces else {}


def _directory(name: str, module: GrowingEmbeddingBags) -> str:
    """What the directory's names in the files begin with. The number of tables says what the bits of a key mean."""
    return f"{name}.of_{len(module.table_rows)}"


def _sources(folder: str, name: str, module: GrowingEmbeddingBags) -> tuple[list[int], bool]:
    """The owners whose files have rows of this rank, and whether it is this one alone, and goes on with its slots."""
    key, index, rank = _directory(name, module), _index(folder), module.exchange_group.rank
    start = f"{key}.rows.requests.rank_"
    owners = sorted(int(found.removeprefix(start)) for found in index if found.startswith(start))
    if not owners:
        raise ValueError(f"they do not hold {len(module.table_rows)} growing tables {name!r}")
    has_room = _size(index, f"{key}.rows.row_at.rank_{rank}") <= module.directory.rows.capacity
    has_same_slots = len(owners) == module.exchange_group.world_size and has_room
    return ([rank] if has_same_slots else owners), has_same_slots


def _read(folder: str, key: str, owner: int) -> Tensor:
    """An int64 array of an owner."""
    key = f"{key}.rank_{owner}"
    array = torch.empty(_size(_index(folder), key), dtype=torch.int64)
    load_shards(folder, _whole(key, array), alone=True)
    return array


def _size(index: dict[str, Any], key: str) -> int:
    return int(index[key].size[0]) if key in index else 0


def _index(folder: str) -> dict[str, Any]:
    with naming(folder):
        return RowReader(folder).read_metadata().state_dict_metadata
