"""Saves and loads rows on their owners: no rank ever has a whole table, and any number of ranks can
load it.

A table of fixed size is one tensor, in its own order of rows, of which each owner writes pieces.
Growing tables are one tensor for each owner, by slot, together with the owner's directory, which
names the keys in the slots::

    tables.table_0                    rows of a table of fixed size
    tables.optimizer_0.sum.table_0    the optimizer's state of these rows
    tables.kept.table_0               which pieces of the rows are kept, if they are pruned
    tables.row_requests.table_0       how often each row was requested, if they are to be pruned
    tables.of_3.rows.row_at.rank_0    of 3 growing tables: keys by slot, -1 where it is free; and more such arrays
    tables.rank_0                     rows by slot
    tables.optimizer_0.sum.rank_0     the optimizer's state by slot

Pruned rows are saved whole, ``[rows, PIECES, embedding_dim / PIECES]``, with zeros where no piece
is kept.

Tensors are written piece by piece, as plain bytes. An index that is no pickle has every checksum::

    rank-0.rows    the pieces that rank 0 has written, one after the other
    rank-1.rows
    index          a checksum of what follows; then, as JSON, this folder's name, and of each tensor dtype, shape and
                   pieces (first row, number of rows, rank, offset in that rank's file, checksum)

With the same number of ranks, growing tables keep their slots. With another number, each rank reads
the keys of all owners, keeps those that it owns now, and reads the pieces with their rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.checkpoint.files import write_on_all_ranks
from lightning_dct.checkpoint.reading import read_on_all_ranks
from lightning_dct.checksums import CheckpointError, bytes_of, with_checksum, without_checksum
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.optimizers import group_of
from lightning_dct.embedding.owners import ROWS_AT_A_TIME, Int64Array, in_parts
from lightning_dct.embedding.pruning import PIECES, KeptPieces, is_row_state
from lightning_dct.embedding.sharded import ShardedEmbeddingBags

INDEX = "index"
Tables = Mapping[str, ShardedEmbeddingBags]  # by name
# Adjacent rows of a tensor, which one rank writes: the tensor's name, all its rows, the first of
# these, and they.
Piece = tuple[str, int, int, Tensor]


def row_files(ranks: Iterable[int]) -> list[str]:
    """The names of what :func:`save_rows` writes: the index, and the rows of these ranks."""
    return [INDEX, *(f"rank-{rank}.rows" for rank in ranks)]


@contextmanager
def saved_in_shards(tables: Tables) -> Iterator[None]:
    """Leave the rows of tables to files of their own: out of ``state_dict``, and as they are in
    ``load_state_dict``.
    """
    for module in tables.values():
        module.saved_in_shards = True
    try:
        yield
    finally:
        for module in tables.values():
            module.saved_in_shards = False


def save_rows(folder: str, tables: Tables, optimizers: list[Optimizer]) -> None:
    """Write every rank's rows of ``tables``, and the optimizers' state for them; a collective call.

    It overwrites what ``folder`` holds.
    """
    write_rows(folder, _pieces_of_all(tables, optimizers))


def load_rows(folder: str, tables: Tables) -> None:
    """Read this rank's rows from a folder of :func:`save_rows`; a collective call.

    Raises:
        FileNotFoundError: The folder is missing.
        CheckpointError: It is corrupt, or has rows of other tables.
    """

    def load() -> None:
        files = RowFiles(folder)
        for name, module in tables.items():
            _check_same_tables(files, name, module, folder)
            if isinstance(module, GrowingEmbeddingBags):
                _load_directory(files, name, module)
            else:
                _load_kept(files, name, module)
            _load_values(files, name, name, module, module.weight.detach())

    read_on_all_ranks(load, folder)


def _check_same_tables(
    files: RowFiles, name: str, module: ShardedEmbeddingBags, folder: str
) -> None:
    """Refuse rows of other tables than the model's, which are not damaged (CheckpointError)."""
    saved = files.tables(name)
    own = [f"{table.rows:,} rows of dim {table.dim}" for table in module.tables]
    if isinstance(module, GrowingEmbeddingBags):
        own = [_growing_rows(table.dim) for table in module.tables]
    if saved == own:
        return
    if not saved:
        differ = f"no tables were saved under the name {name!r}"
    elif len(saved) != len(own):
        differ = (
            f"{name!r} had {len(saved)} tables when it was saved, and the model's has {len(own)}"
        )
    else:
        number = next(
            number
            for number, (before, now) in enumerate(zip(saved, own, strict=True))
            if before != now
        )
        table = module.tables[number].name
        differ = (
            f"table {table!r} of {name!r} had {saved[number]} when it was saved, and the model's"
            f" has {own[number]}"
        )
    raise CheckpointError(
        f"The checkpoint's rows in {folder!r} are whole, and of other tables: {differ}. Resume with"
        " the tables that were saved. To start a new run with more rows, load the checkpoint into"
        " tables of the saved sizes, write them by `lightning_dct.gather_tables`, put new rows"
        " behind theirs, and give all to `load_tables`."
    )


def _growing_rows(dim: int) -> str:
    return f"any number of rows of dim {dim}"


def load_row_states(folder: str, tables: Tables, optimizers: list[Optimizer]) -> None:
    """Read the optimizers' state for this rank's rows; a collective call.

    Errors are those of :func:`load_rows`.
    """

    def load() -> None:
        files = RowFiles(folder)
        for name, module in tables.items():
            for number, optimizer in enumerate(optimizers):
                if group_of(module.weight, optimizer) is None:
                    continue
                prefix = f"{name}.optimizer_{number}."
                saved = {
                    key.rpartition(".")[0]: entry
                    for key, entry in files.index.items()
                    if key.startswith(prefix)
                }
                for key, entry in sorted(saved.items()):
                    shape = (len(module.weight), *entry["shape"][1 if module.kept is None else 2 :])
                    values = torch.zeros(
                        shape, dtype=getattr(torch, entry["dtype"]), device=module.weight.device
                    )
                    optimizer.state[module.weight][key.removeprefix(prefix)] = values
                    _load_values(files, name, key, module, values)

    read_on_all_ranks(load, folder)


def without_rows(state: dict[str, Any], optimizer: Optimizer, tables: Tables) -> dict[str, Any]:
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


def _pieces_of_all(tables: Tables, optimizers: list[Optimizer]) -> Iterator[Piece]:
    """Everything that this rank writes.

    Pieces are made one at a time, so that not all of them exist at once.
    """
    for name, module in tables.items():
        if isinstance(module, GrowingEmbeddingBags):
            module.reset_states(optimizers)
            for part, state in module.directory.state_dict().items():
                for field, value in state.items():
                    key = f"{_directory_name(name, module)}.{part}.{field}"
                    yield from _by_rank(key, module, torch.as_tensor(value).reshape(-1))
        elif module.kept is not None:
            yield from _by_table(f"{name}.kept", module, torch.from_numpy(module.kept.masks), None)
        elif module.row_requests is not None:
            yield from _by_table(f"{name}.row_requests", module, module.row_requests, None)
        yield from _pieces_of(name, module, module.weight.detach())
        for number, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(module.weight, {}).items():
                if is_row_state(value, module.weight):
                    yield from _pieces_of(f"{name}.optimizer_{number}.{key}", module, value)


def _pieces_of(key: str, module: ShardedEmbeddingBags, values: Tensor) -> Iterator[Piece]:
    """Values that have a row for each of ``module.weight``, shape ``[owned rows, ...]``."""
    if values.is_sparse:  # the momentum of SGD
        values = values.to_dense()
    if isinstance(module, GrowingEmbeddingBags):
        return _by_rank(key, module, values[: module.directory.rows.num_slots])
    return _by_table(key, module, values, module.kept)


def _by_table(
    key: str, module: ShardedEmbeddingBags, values: Tensor, kept: KeptPieces | None
) -> Iterator[Piece]:
    """Values for each of this rank's rows, or for each kept piece of them."""
    for table, start, places in _own_rows(module):
        if kept is None:
            rows = values[places[0] : places[-1] + 1]
        else:
            rows = kept.expand(
                values, places, values.new_zeros(places.size, PIECES, *values.shape[1:])
            )
        yield f"{key}.table_{table}", module.table_rows[table], start, rows


def _by_rank(key: str, module: ShardedEmbeddingBags, values: Tensor) -> Iterator[Piece]:
    """A tensor that this rank has all of."""
    # An empty tensor has an empty piece.
    for start in range(0, max(len(values), 1), ROWS_AT_A_TIME):
        rows = values[start : start + ROWS_AT_A_TIME]
        yield f"{key}.rank_{module.exchange_group.rank}", len(values), start, rows


def _own_rows(module: ShardedEmbeddingBags) -> Iterator[tuple[int, int, Int64Array]]:
    """For tables of fixed size, a part at a time: table, first row there, and the places here."""
    for table, start, stop, place in module.placement.ranges(module.exchange_group.rank):
        for places in in_parts(place, place + stop - start):
            yield table, start + int(places[0]) - place, places


def _load_values(
    files: RowFiles, name: str, key: str, module: ShardedEmbeddingBags, values: Tensor
) -> None:
    """Overwrite ``values``, shape ``[owned rows, ...]``, with this rank's rows of the values saved
    under ``key``.
    """
    if not isinstance(module, GrowingEmbeddingBags):
        _load_by_table(files, key, module, values)
        return
    for owner in _owners(files, name, module)[0]:
        keys = _read_array(
            files, f"{_directory_name(name, module)}.rows.row_at.rank_{owner}"
        ).numpy()
        slots = np.where(keys >= 0, module.directory.rows.find(keys), -1)
        for there in in_parts(0, slots.size):
            here = torch.from_numpy(slots[there]).to(values.device)
            if (own := here >= 0).any():
                rows = values.new_empty(here.numel(), *values.shape[1:])
                files.read(f"{key}.rank_{owner}", int(there[0]), rows)
                values[here[own]] = rows[own]


def _load_by_table(files: RowFiles, key: str, module: ShardedEmbeddingBags, values: Tensor) -> None:
    for table, start, places in _own_rows(module):
        saved = files.num_rows(f"{key}.table_{table}")
        if saved != module.table_rows[table]:
            raise ValueError(
                f"table {table} has {saved} rows instead of {module.table_rows[table]}"
            )
        if module.kept is None:
            files.read(f"{key}.table_{table}", start, values[places[0] : places[-1] + 1])
            continue
        rows = values.new_empty(places.size, PIECES, *values.shape[1:])
        files.read(f"{key}.table_{table}", start, rows)
        module.kept.compact(values, places, rows)


def _load_kept(files: RowFiles, name: str, module: ShardedEmbeddingBags) -> None:
    """Read which pieces of this rank's rows are kept, or how often the rows were requested."""
    module.set_kept(None)
    read: dict[str, Tensor] = {}
    for part, dtype in (("kept", torch.uint8), ("row_requests", torch.int32)):
        if any(
            f"{name}.{part}.table_{table}" in files.index for table in range(len(module.table_rows))
        ):
            read[part] = torch.zeros(module.capacity(), dtype=dtype)
            _load_by_table(files, f"{name}.{part}", module, read[part])
    module.row_requests = read.get("row_requests")
    if "kept" in read:
        module.set_kept(KeptPieces(read["kept"].numpy()))


def _directory_name(name: str, module: GrowingEmbeddingBags) -> str:
    """The prefix of the directory's arrays.

    The number of tables determines what the bits of a key mean.
    """
    return f"{name}.of_{len(module.table_rows)}"


def _load_directory(files: RowFiles, name: str, module: GrowingEmbeddingBags) -> None:
    rank = module.exchange_group.rank
    capacity = module.directory.rows.capacity
    prefix = _directory_name(name, module)
    owners, keeps_slots = _owners(files, name, module)
    fields = module.directory.rows.state_dict()
    states = [
        {
            part: {
                field: _read_array(files, f"{prefix}.{part}.{field}.rank_{owner}")
                for field in fields
            }
            for part in module.directory.parts
        }
        for owner in owners
    ]
    if keeps_slots:
        module.directory.load_state_dict(states[0])
        module.evicted_on_load = module.evicted_on_load[:0]
        return

    def is_own(keys: Int64Array) -> Any:
        return module.placement.locate(*module.placement.rows_of(rank, keys))[0] == rank

    module.evicted_on_load = module.directory.merge(states, is_own)
    if more := module.evicted_on_load.size:
        warnings.warn(
            f"Rank {rank} owns {capacity + more} rows of {name!r} and has room for {capacity}: the"
            f" {more} least recently requested are evicted. Raise `max_rows` to keep them.",
            stacklevel=2,
        )


def _owners(files: RowFiles, name: str, module: GrowingEmbeddingBags) -> tuple[list[int], bool]:
    """The owners whose files may have rows of this rank; and whether it is this rank alone, which
    keeps its slots.

    That is so if the number of ranks is the same and the saved slots fit.
    """
    prefix = _directory_name(name, module)
    rank = module.exchange_group.rank
    start = f"{prefix}.rows.requests.rank_"
    owners = sorted(int(key.removeprefix(start)) for key in files.index if key.startswith(start))
    if not owners:
        raise ValueError(f"there are no {len(module.table_rows)} growing tables {name!r}")
    fits = files.num_rows(f"{prefix}.rows.row_at.rank_{rank}") <= module.directory.rows.capacity
    keeps_slots = len(owners) == module.exchange_group.world_size and fits
    return ([rank] if keeps_slots else owners), keeps_slots


def _read_array(files: RowFiles, key: str) -> Tensor:
    """An int64 array, empty if nothing was saved."""
    array = torch.empty(files.num_rows(key), dtype=torch.int64)
    if array.numel():
        files.read(key, 0, array)
    return array


def write_rows(folder: str, pieces: Iterable[Piece]) -> None:
    """Write every rank's pieces of tensors.

    A collective call. Rank 0 ends last, so other ranks can read the folder after a barrier only.

    Raises:
        OSError: Some rank cannot write, for example because its disk is full. Raised on every rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    everyone = write_on_all_ranks(lambda: _write_pieces(folder, pieces, rank), folder)
    if rank == 0:
        merged: dict[str, dict[str, Any]] = {}
        for written in everyone:
            for name, tensor in written.items():
                merged.setdefault(name, {**tensor, "pieces": []})["pieces"] += tensor["pieces"]
        text = json.dumps({"folder": os.path.basename(folder), "tensors": merged}).encode()
        with _written(f"{folder}/{INDEX}") as file:
            file.write(with_checksum(text))


def _write_pieces(folder: str, pieces: Iterable[Piece], rank: int) -> dict[str, Any]:
    """Write one rank's file, and return its part of the index."""
    index: dict[str, Any] = {}
    offset = 0
    with _written(f"{folder}/rank-{rank}.rows") as file:
        for name, num_rows, start, rows in pieces:
            data = bytes_of(rows)
            shape = [num_rows, *rows.shape[1:]]
            dtype = str(rows.dtype).removeprefix("torch.")
            tensor = index.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            tensor["pieces"].append([start, len(rows), rank, offset, zlib.crc32(data)])
            file.write(data)
            offset += data.nbytes
    return index


@contextmanager
def _written(path: str) -> Iterator[Any]:
    """A file to write to, which on a local disk is there when the context ends."""
    files, place = url_to_fs(path)
    files.makedirs(os.path.dirname(place), exist_ok=True)
    with files.open(place, "wb") as file:
        yield file
        if isinstance(files, LocalFileSystem):
            file.flush()
            os.fsync(file.fileno())


class RowFiles:
    """Reads what :func:`save_rows` has written, from wherever fsspec reads.

    Raises:
        FileNotFoundError: The folder is missing.
        ValueError: The index does not match its checksum, belongs to another folder, or is no
            index.
    """

    def __init__(self, folder: str) -> None:
        self._files, self._folder = url_to_fs(folder)
        if not self._files.isdir(self._folder):
            raise FileNotFoundError(
                f"The checkpoint's embedding rows should be in {folder!r}, which is not there. Put"
                " the folder that was saved with the checkpoint beside it."
            )
        index = json.loads(
            without_checksum(
                self._files.cat_file(f"{self._folder}/{INDEX}"), f"the index of {folder!r}"
            )
        )
        if index["folder"] != os.path.basename(self._folder):
            raise ValueError(f"the index of {folder!r} belongs to {index['folder']!r}")
        # By name: the dtype, as torch calls it, the shape and the pieces of each tensor.
        self.index: dict[str, dict[str, Any]] = index["tensors"]

    def num_rows(self, name: str) -> int:
        """The number of rows of a tensor; 0 if there is none of this name."""
        return int(self.index[name]["shape"][0]) if name in self.index else 0

    def tables(self, name: str) -> list[str]:
        """The tables that were saved under the name of a module, in words; none if there are
        none.
        """
        shapes: list[list[int]] = []
        while (key := f"{name}.table_{len(shapes)}") in self.index:
            shapes.append(self.index[key]["shape"])
        if shapes:  # those of pruned rows have a dimension more
            return [f"{shape[0]:,} rows of dim {math.prod(shape[1:])}" for shape in shapes]
        growing = re.compile(rf"{re.escape(name)}\.of_(\d+)\.")
        number = next((int(found[1]) for key in self.index if (found := growing.match(key))), 0)
        dim = next(
            (one["shape"][1] for key, one in self.index.items() if key.startswith(f"{name}.rank_")),
            0,
        )
        return [_growing_rows(dim)] * number

    def read(self, name: str, start: int, rows: Tensor) -> None:
        """Overwrite ``rows``, shape ``[n, ...]``, with the rows of a tensor from ``start`` on.

        Raises:
            KeyError: There is no tensor of this name.
            FileNotFoundError: A rank's file is missing.
            ValueError: A piece does not match its checksum, rows are missing, or they have another
                shape.
        """
        missing = len(rows)
        saved = self.index[name]
        dtype = getattr(torch, saved["dtype"])
        shape = rows.shape[1:]
        if saved["shape"][1:] != list(shape):
            raise ValueError(f"{name} in {self._folder!r} has shape {saved['shape']}")
        for first, length, rank, offset, checksum in saved["pieces"]:
            low = max(start, first)
            high = min(start + len(rows), first + length)
            if low >= high:
                continue
            own = f"{self._folder}/rank-{rank}.rows"
            if not self._files.exists(own):
                raise FileNotFoundError(
                    f"The checkpoint's embedding rows of rank {rank} should be in {own!r}, which is"
                    " not there. Copy it from the host on which that rank has saved it."
                )
            with self._files.open(own, "rb") as file:
                file.seek(offset)
                data = bytearray(file.read(length * math.prod(shape) * dtype.itemsize))
            if zlib.crc32(data) != checksum:
                raise ValueError(
                    f"a piece of {name} in {self._folder!r} does not match its checksum"
                )
            values = torch.frombuffer(data, dtype=dtype).view(length, *shape)
            rows[low - start : high - start] = values[low - first : high - first].to(rows)
            missing -= high - low
        if missing:
            raise ValueError(f"{missing} rows of {name} are missing in {self._folder!r}")
