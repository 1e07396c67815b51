"""Reads the rows that ``torch.distributed.checkpoint`` has written, without trust in the files.

That package unpickles its index without restrictions and checks no checksum. Here the index may name only the dozen
classes that it consists of, and the index and every piece of a table must match their checksums.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lightning_dct.state_file import check_sums

INDEX = ".metadata"
# The index's CRC-32 in hexadecimal digits, and the folder's name. Older versions wrote neither.
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


def row_writer(folder: str) -> FileSystemWriter:
    """A writer into a new folder, on a disk or wherever fsspec writes to."""
    files, path = url_to_fs(folder)
    if isinstance(files, LocalFileSystem):
        return FileSystemWriter(path)
    # torch's writer for fsspec is private, so nobody who writes to disks depends on it.
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(folder, sync_files=False)  # else it syncs this machine's disks after each file


def write_index_checksum(folder: str) -> None:
    """Write the checksum of a folder's index, and the folder's name."""
    files, path = url_to_fs(folder)
    with files.open(f"{path}/{INDEX}", "rb") as file:
        checksum = zlib.crc32(file.read())
    with files.open(f"{path}/{INDEX_CHECKSUM}", "w") as file:
        file.write(f"{checksum:08x} {os.path.basename(path)}\n")


class RowReader(FileSystemReader):
    """The reader for ``torch.distributed.checkpoint.load``, of wherever fsspec reads from."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._files, self._folder = url_to_fs(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            ValueError: It does not match its checksum, belongs to another folder, or is no index.
        """
        with self._files.open(f"{self._folder}/{INDEX}", "rb") as file:
            data = file.read()
        noted = f"{self._folder}/{INDEX_CHECKSUM}"
        if self._files.exists(noted):
            with self._files.open(noted, "r") as file:
                checksum, *owner = file.read().split(maxsplit=1)
            if checksum != f"{zlib.crc32(data):08x}":
                raise ValueError("the index does not match its checksum")
            if owner and owner[0].strip() != os.path.basename(self._folder):
                raise ValueError(f"they are those of {owner[0].strip()!r}")
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"the index is a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's rows, piece by piece.

        Raises:
            ValueError: A piece is not what the index says.
            zipfile.BadZipFile: It does not match its checksum.
        """
        for item in plan.items:
            where = self.storage_data[item.storage_index]
            name = os.path.basename(where.relative_path)  # never outside the folder
            with self._files.open(f"{self._folder}/{name}", "rb") as file:
                file.seek(where.offset)
                piece = io.BytesIO(file.read(where.length))
            check_sums(piece)
            piece.seek(0)
            rows = torch.load(piece, map_location="cpu", weights_only=True)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                rows = rows.narrow(dimension, start, length)
            wanted = planner.resolve_tensor(item).detach()
            if wanted.shape != rows.shape:
                raise ValueError(f"a piece of {item.storage_index.fqn} has shape {list(rows.shape)}")
            wanted.copy_(rows)
            planner.commit_tensor(item, wanted)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, set()):
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which no index of rows does")
        return super().find_class(module, name)
