"""Saves and loads rows on their owners, with ``torch.distributed.checkpoint``: no rank ever holds a whole table.

Each table of fixed size is one tensor of the checkpoint, in its own order of rows. The owners write it in pieces. Any
number of ranks can load it, and growing tables as well (:mod:`lightning_dct.embedding.grown_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.grown_rows import (
    directory_shards,
    failing_together,
    grown_shards,
    load_directory,
    load_values,
)
from lightning_dct.embedding.row_files import RowReader, row_writer, write_index_checksum
from lightning_dct.embedding.row_shards import RowShards, check_folder, load_shards, naming
from lightning_dct.embedding.state import ROWS_AT_A_TIME, TableState, is_row_state


def save_rows(folder: str, tables: Mapping[str, TableState], optimizers: list[Optimizer]) -> None:
    """Write every rank's rows of ``tables``, and the optimizers' state for them; a collective call.

    It overwrites what ``folder`` holds.
    """
    shards: dict[str, Any] = {}
    for name, module in tables.items():
        if isinstance(module, GrowingEmbeddingBags):
            module.reset_states(optimizers)
            shards |= directory_shards(name, module)
        shards |= _shards_of(name, module, module.weight.detach())
        for key, values in _row_states(name, module, optimizers).items():
            shards |= _shards_of(key, module, values)
    save(shards, storage_writer=row_writer(folder), no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_index_checksum(folder)


def load_rows(folder: str, tables: Mapping[str, TableState]) -> None:
    """Read this rank's rows from what :func:`save_rows` has written; a collective call.

    Raises:
        FileNotFoundError: The folder is missing.
        CheckpointError: It is corrupt, or holds rows of other tables.
    """
    check_folder(folder)
    shards: dict[str, Any] = {}
    with failing_together():
        for name, module in tables.items():
            if isinstance(module, GrowingEmbeddingBags):
                load_directory(folder, name, module)
                load_values(folder, name, name, module, module.weight.detach())
            else:
                shards |= _shards_of(name, module, module.weight.detach())
    load_shards(folder, shards)


def load_row_states(folder: str, tables: Mapping[str, TableState], optimizers: list[Optimizer]) -> None:
    """Read the optimizers' state for this rank's rows; a collective call.

    Raises:
        FileNotFoundError: The folder is missing.
        CheckpointError: It is corrupt.
    """
    check_folder(folder)
    with naming(folder):
        saved = RowReader(folder).read_metadata().state_dict_metadata
    shards: dict[str, Any] = {}
    grown: list[tuple[str, str, GrowingEmbeddingBags, Tensor]] = []
    for name, module in tables.items():
        for number, optimizer in enumerate(optimizers):
            if not any(module.weight is p for group in optimizer.param_groups for p in group["params"]):
                continue
            prefix = _state_key(name, number, "")
            for key in sorted({key.rpartition(".")[0] for key in saved if key.startswith(prefix)}):
                metadata = next(value for other, value in saved.items() if other.startswith(f"{key}."))
                values = torch.zeros(
                    len(module.weight),
                    *metadata.size[1:],  # type: ignore[union-attr]
                    dtype=metadata.properties.dtype,  # type: ignore[union-attr]
                    device=module.weight.device,
                )
                optimizer.state[module.weight][key.removeprefix(prefix)] = values
                if isinstance(module, GrowingEmbeddingBags):
                    grown.append((name, key, module, values))
                else:
                    shards |= _shards_of(key, module, values)
    with failing_together():
        for name, key, module, values in grown:
            load_values(folder, name, key, module, values)
    load_shards(folder, shards)


def without_rows(state: dict[str, Any], optimizer: Optimizer, tables: Mapping[str, TableState]) -> dict[str, Any]:
    """An optimizer's ``state_dict`` without what :func:`save_rows` saves.

    On ranks other than 0, ``ZeroRedundancyOptimizer`` gives an empty dict.
    """
    if not tables or not state:
        return state
    weights = {id(module.weight) for module in tables.values()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {
        index: {
            key: value
            for key, value in entries.items()
            if not (id(parameters[index]) in weights and is_row_state(value, parameters[index]))
        }
        for index, entries in state["state"].items()
    }
    return {**state, "state": kept}


def _row_states(name: str, module: TableState, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    return {
        _state_key(name, number, key): value
        for number, optimizer in enumerate(optimizers)
        for key, value in optimizer.state.get(module.weight, {}).items()
        if is_row_state(value, module.weight)
    }


def _state_key(name: str, number: int, key: str) -> str:
    return f"{name}.optimizer_{number}.{key}"


def _shards_of(name: str, module: TableState, values: Tensor) -> dict[str, RowShards]:
    """One tensor a table, from values of shape ``[owned rows, ...]``; one a rank for growing tables."""
    if isinstance(module, GrowingEmbeddingBags):
        return grown_shards(name, module, values)
    pieces: dict[int, list[tuple[int, Tensor]]] = {table: [] for table in range(len(module.table_rows))}
    for table, start, stop, place in module.placement.ranges(module.exchange_group.rank):
        for low in range(start, stop, ROWS_AT_A_TIME):
            high = min(low + ROWS_AT_A_TIME, stop)
            pieces[table].append((low, values[place + low - start : place + high - start]))
    return {
        f"{name}.table_{table}": RowShards.of(module.table_rows[table], owned, values)
        for table, owned in pieces.items()
    }
