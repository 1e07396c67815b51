"""Saves and loads rows on their owners, with ``torch.distributed.checkpoint``: no rank ever holds a whole table.

Each table is one tensor of the checkpoint, in its own order of rows. The owners write it in pieces. Any number of ranks
can load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_dct.embedding.row_files import RowReader, row_writer, write_index_checksum
from lightning_dct.embedding.state import ROWS_AT_A_TIME, TableState
from lightning_dct.state_file import CheckpointError


class RowShards(Tensor):
    """One rank's rows of one table, in the ``_Checkpointable`` protocol of ``torch.distributed.checkpoint``.

    That package looks for the protocol on tensors, so this is a tensor, but one without memory.
    """

    _pieces: dict[torch.Size, Tensor]

    @staticmethod
    def of(num_rows: int, pieces: list[tuple[int, Tensor]], like: Tensor) -> RowShards:
        """The rows of a table of ``num_rows``: where each piece begins, and a view of its rows, ``[n, ...]``.

        ``like`` has their dtype and trailing shape.
        """
        size = torch.Size([num_rows, *like.shape[1:]])
        shards: RowShards = Tensor._make_wrapper_subclass(RowShards, size, dtype=like.dtype)
        trailing = [0] * (len(size) - 1)
        shards._pieces = {torch.Size([start, *trailing]): rows for start, rows in pieces}
        return shards

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"Rows for a checkpoint do not support {func}.")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offset, sizes=rows.shape) for offset, rows in self._pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[index.offset]


def save_rows(folder: str, tables: Mapping[str, TableState], optimizers: list[Optimizer]) -> None:
    """Write every rank's rows of ``tables``, and the optimizers' state for them; a collective call.

    It overwrites what ``folder`` holds.
    """
    shards: dict[str, Any] = {}
    for name, module in tables.items():
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
    _check(folder)
    shards: dict[str, Any] = {}
    for name, module in tables.items():
        shards |= _shards_of(name, module, module.weight.detach())
    _load(folder, shards)


def load_row_states(folder: str, tables: Mapping[str, TableState], optimizers: list[Optimizer]) -> None:
    """Read the optimizers' state for this rank's rows; a collective call.

    Raises:
        FileNotFoundError: The folder is missing.
        CheckpointError: It is corrupt.
    """
    _check(folder)
    with _naming(folder):
        saved = RowReader(folder).read_metadata().state_dict_metadata
    shards: dict[str, Any] = {}
    for name, module in tables.items():
        for number, optimizer in enumerate(optimizers):
            if not any(module.weight is p for group in optimizer.param_groups for p in group["params"]):
                continue
            prefix = _state_key(name, number, "")
            for key in sorted({key.rpartition(".table_")[0] for key in saved if key.startswith(prefix)}):
                metadata = next(value for other, value in saved.items() if other.startswith(f"{key}.table_"))
                values = torch.zeros(
                    len(module.weight),
                    *metadata.size[1:],  # type: ignore[union-attr]
                    dtype=metadata.properties.dtype,  # type: ignore[union-attr]
                    device=module.weight.device,
                )
                optimizer.state[module.weight][key.removeprefix(prefix)] = values
                shards |= _shards_of(key, module, values)
    _load(folder, shards)


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
            if not (id(parameters[index]) in weights and _is_row_state(value, parameters[index]))
        }
        for index, entries in state["state"].items()
    }
    return {**state, "state": kept}


def _row_states(name: str, module: TableState, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    return {
        _state_key(name, number, key): value
        for number, optimizer in enumerate(optimizers)
        for key, value in optimizer.state.get(module.weight, {}).items()
        if _is_row_state(value, module.weight)
    }


def _is_row_state(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == weight.shape[0]


def _state_key(name: str, number: int, key: str) -> str:
    return f"{name}.optimizer_{number}.{key}"


def _shards_of(name: str, module: TableState, values: Tensor) -> dict[str, RowShards]:
    """One tensor a table, from values of shape ``[owned rows, ...]``."""
    pieces: dict[int, list[tuple[int, Tensor]]] = {table: [] for table in range(len(module.table_rows))}
    for table, start, stop, place in module.placement.ranges(module.exchange_group.rank):
        for low in range(start, stop, ROWS_AT_A_TIME):
            high = min(low + ROWS_AT_A_TIME, stop)
            pieces[table].append((low, values[place + low - start : place + high - start]))
    return {
        f"{name}.table_{table}": RowShards.of(module.table_rows[table], owned, values)
        for table, owned in pieces.items()
    }


def _load(folder: str, shards: dict[str, Any]) -> None:
    with _naming(folder):
        reader = RowReader(folder)
        # torch.distributed.checkpoint would only warn about an index that it cannot read.
        reader.read_metadata()
        load(shards, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _naming(folder: str) -> Iterator[None]:
    """Name the folder in the error about a corrupt file in it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (Exception, CheckpointException) as error:
        # Corrupt files make pickle, zipfile and torch raise a dozen kinds of errors. With several ranks they come in a
        # CheckpointException, which is no Exception.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise CheckpointError(
            f"The embedding rows in {folder!r} are corrupt or are others ({cause}). Restore the folder from a"
            " copy, or resume from an earlier checkpoint."
        ) from error


def _check(folder: str) -> None:
    files, path = url_to_fs(folder)
    if not files.isdir(path):
        raise FileNotFoundError(
            f"The checkpoint's embedding rows should be in {folder!r}, which is not there. Put the folder that was"
            " saved with the checkpoint beside it."
        )
