"""Writes and reads tensors piece by piece, as ``torch.distributed.checkpoint`` stores them, without trust in the files.

That package unpickles its index without restrictions and checks no checksum. Here the index may name only the dozen
classes that it consists of, and the index and every piece must match their checksums.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_dct.agreement import gather_objects
from lightning_dct.state_file import CheckpointError, check_sums

INDEX = ".metadata"
# The index's CRC-32 in hexadecimal digits, and the folder's name.
INDEX_CHECKSUM = "metadata.crc32"
_CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class LazyRows(NamedTuple):
    """Rows that are made when they are written, so that not all of them exist at once."""

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]


# One rank's pieces of a tensor: the tensor's number of rows, and the pieces by their first row.
Pieces = tuple[int, Mapping[int, Tensor | LazyRows]]


def write_rows(folder: str, tensors: Mapping[str, Pieces]) -> None:
    """Write every rank's pieces of tensors, and overwrite what the folder holds.

    A collective call. Rank 0 ends last, so other ranks can read the folder after a barrier only.
    """
    files, path = url_to_fs(folder)
    if isinstance(files, LocalFileSystem):
        writer = FileSystemWriter(path)
    else:
        # torch's writer for fsspec is private, so only those who need it depend on it.
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(folder, sync_files=False)  # else it syncs this machine's disks after each file
    planner = _PiecesPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save({**tensors}, storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        with files.open(f"{path}/{INDEX}", "rb") as file:
            checksum = zlib.crc32(file.read())
        with files.open(f"{path}/{INDEX_CHECKSUM}", "w") as file:
            file.write(f"{checksum:08x} {os.path.basename(path)}\n")


class _PiecesPlanner(DefaultSavePlanner):
    """Plans :data:`Pieces`, which torch's planner does not support."""

    def create_local_plan(self) -> SavePlan:
        """This rank's items: one for each piece."""
        items = []
        for name, (num_rows, pieces) in self.state_dict.items():
            for start, rows in pieces.items():
                offset = torch.Size([start, *(0 for _ in rows.shape[1:])])
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, rows.shape),
                    properties=TensorProperties(rows.dtype),
                    size=torch.Size([num_rows, *rows.shape[1:]]),
                )
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The piece at an index."""
        assert index.offset is not None
        piece = self.state_dict[index.fqn][1][index.offset[0]]
        return piece.make() if isinstance(piece, LazyRows) else piece


class RowFiles:
    """Reads what :func:`write_rows` has written, from wherever fsspec reads; see :func:`reading_rows`.

    Raises:
        ValueError: The index does not match its checksum, belongs to another folder, or is no index.
    """

    def __init__(self, folder: str) -> None:
        self._files, self._folder = url_to_fs(folder)
        index, note = (self._files.cat_file(f"{self._folder}/{name}") for name in (INDEX, INDEX_CHECKSUM))
        checksum, _, owner = note.decode().strip().partition(" ")
        if checksum != f"{zlib.crc32(index):08x}":
            raise ValueError("the index does not match its checksum")
        if owner != os.path.basename(self._folder):
            raise ValueError(f"they are those of {owner!r}")
        metadata = _IndexUnpickler(io.BytesIO(index)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"the index is a {type(metadata).__name__}")
        self._places = metadata.storage_data
        # Shape, dtype and pieces of each tensor, by name.
        self.index: dict[str, Any] = metadata.state_dict_metadata

    def num_rows(self, name: str) -> int:
        """The number of rows of a tensor; 0 if there is none of this name."""
        return int(self.index[name].size[0]) if name in self.index else 0

    def read(self, name: str, start: int, rows: Tensor) -> None:
        """Overwrite ``rows``, shape ``[n, ...]``, with the rows of a tensor from ``start`` on.

        Raises:
            KeyError: There is no tensor of this name.
            ValueError: A piece is not what the index says, or rows are missing.
            zipfile.BadZipFile: A piece does not match its checksum.
        """
        missing = len(rows)
        for piece in self.index[name].chunks:
            first = piece.offsets[0]
            low, high = max(start, first), min(start + len(rows), first + piece.sizes[0])
            if low >= high:
                continue
            saved = self._read_piece(MetadataIndex(name, piece.offsets))
            if saved.shape != piece.sizes or saved.shape[1:] != rows.shape[1:]:
                raise ValueError(f"a piece of {name} has shape {list(saved.shape)}")
            rows[low - start : high - start] = saved[low - first : high - first].to(rows)
            missing -= high - low
        if missing:
            raise ValueError(f"{missing} rows of {name} are missing")

    def _read_piece(self, index: MetadataIndex) -> Tensor:
        place = self._places[index]
        name = os.path.basename(place.relative_path)  # never outside the folder
        with self._files.open(f"{self._folder}/{name}", "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        check_sums(data)
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)


@contextmanager
def reading_rows(folder: str) -> Iterator[RowFiles]:
    """Open a folder of rows, and raise on every rank what one rank raises inside; a collective call.

    Raises:
        FileNotFoundError: The folder is missing on this rank.
        CheckpointError: It is corrupt or has other rows, or another rank cannot read it.
    """
    failure: Exception | None = None
    try:
        files, path = url_to_fs(folder)
        if files.isdir(path):
            yield RowFiles(folder)
        else:
            failure = FileNotFoundError(
                f"The checkpoint's embedding rows should be in {folder!r}, which is not there. Put the folder that was"
                " saved with the checkpoint beside it."
            )
    except Exception as error:
        # On corrupt files pickle, zipfile and torch raise a dozen kinds of errors.
        failure = CheckpointError(
            f"The embedding rows in {folder!r} are corrupt or are others ({error}). Restore the folder from a copy, or"
            " resume from an earlier checkpoint."
        )
        failure.__cause__ = error
    messages = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise CheckpointError(f"Rank {rank}: {message}")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, set()):
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which no index of rows does")
        return super().find_class(module, name)
