"""Saves and loads rows where they live, with ``torch.distributed.checkpoint``: no rank ever holds a whole table.

Each table is one tensor of the checkpoint, in its own order of rows, written in pieces by the ranks that own them.
Loading reads what a rank owns now, whatever the number of ranks was when it was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from lightning_dct.embedding.sharded import ROWS_AT_A_TIME, ShardedEmbeddingBags
from lightning_dct.state_file import CheckpointError


class RowShards(Tensor):
    """One rank's rows of one table, as ``torch.distributed.checkpoint`` wants them (its ``_Checkpointable`` protocol).

    A tensor in name only: that package looks for the protocol on tensors, and none of its memory is ever there.
    """

    _pieces: dict[torch.Size, Tensor]

    @staticmethod
    def of(num_rows: int, pieces: list[tuple[int, Tensor]], like: Tensor) -> RowShards:
        """Describe rows.

        Args:
            num_rows: Rows of the whole table.
            pieces: Where each piece begins in the table, and its rows, a view of shape ``[n, ...]``.
            like: A tensor with the dtype and the trailing shape of the rows.
        """
        size = torch.Size([num_rows, *like.shape[1:]])
        shards: RowShards = Tensor._make_wrapper_subclass(RowShards, size, dtype=like.dtype)
        trailing = [0] * (len(size) - 1)
        shards._pieces = {torch.Size([start, *trailing]): rows for start, rows in pieces}
        return shards

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} is nothing that rows for a checkpoint can do")

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


def save_rows(folder: str, tables: dict[str, ShardedEmbeddingBags], optimizers: list[Optimizer]) -> None:
    """Write every rank's rows and what the optimizers keep for them; a collective call.

    Args:
        folder: Where to; what it holds already is overwritten.
        tables: The modules by name.
        optimizers: The optimizers whose state goes along; none for weights alone.
    """
    shards: dict[str, Any] = {}
    for name, module in tables.items():
        shards |= _shards_of(name, module, module.weight.detach())
        for key, values in _row_states(name, module, optimizers).items():
            shards |= _shards_of(key, module, values)
    save(shards, storage_writer=row_writer(folder), no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_index_checksum(folder)


def load_rows(folder: str, tables: dict[str, ShardedEmbeddingBags]) -> None:
    """Read this rank's rows; a collective call.

    Args:
        folder: What :func:`save_rows` has written.
        tables: The modules by name.

    Raises:
        FileNotFoundError: It is not there.
        CheckpointError: It is damaged, or holds rows of other tables.
    """
    _check(folder)
    shards: dict[str, Any] = {}
    for name, module in tables.items():
        shards |= _shards_of(name, module, module.weight.detach())
    _load(folder, shards)


def load_row_states(folder: str, tables: dict[str, ShardedEmbeddingBags], optimizers: list[Optimizer]) -> None:
    """Read what the optimizers keep for this rank's rows; a collective call.

    Raises:
        FileNotFoundError: The folder is not there.
        CheckpointError: It is damaged.
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


def without_rows(
    state: dict[str, Any], optimizer: Optimizer, tables: dict[str, ShardedEmbeddingBags]
) -> dict[str, Any]:
    """An optimizer's ``state_dict`` less what :func:`save_rows` saves.

    ``ZeroRedundancyOptimizer`` hands its state over on rank 0 only, and an empty dict elsewhere.
    """
    if not tables or not state:
        return state
    weights = {id(module.weight): len(module.weight) for module in tables.values()}
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


def _row_states(name: str, module: ShardedEmbeddingBags, optimizers: list[Optimizer]) -> dict[str, Tensor]:
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


def _shards_of(name: str, module: ShardedEmbeddingBags, values: Tensor) -> dict[str, RowShards]:
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
        # torch.distributed.checkpoint would go on without an index it cannot read, and say so at length.
        reader.read_metadata()
        load(shards, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _naming(folder: str) -> Iterator[None]:
    """Say which folder it is when something in it is damaged."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (Exception, CheckpointException) as error:
        # What damaged files make pickle, zipfile and torch raise is of a dozen kinds; on several ranks they come
        # wrapped in a CheckpointException, which is no Exception.
        raise CheckpointError(
            f"The embedding rows in {folder!r} are damaged or are others ({_cause(error)}). Restore the folder from a"
            " copy, or resume from an earlier checkpoint."
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The first error a rank has met."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _check(folder: str) -> None:
    files, path = url_to_fs(folder)
    if not files.isdir(path):
        raise FileNotFoundError(
            f"The checkpoint's embedding rows should be in {folder!r}, which is not there. Put the folder that was"
            " saved with the checkpoint beside it."
        )
