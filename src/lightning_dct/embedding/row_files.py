"""Reads the rows that ``torch.distributed.checkpoint`` has written, trusting nothing in the files.

That package unpickles its index without restrictions and looks at no checksum. Here the index may name the dozen
classes it is made of and nothing else, and it and every piece of a table must match their checksums.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lightning_dct.state_file import check_sums

INDEX = ".metadata"
# Its CRC-32 in hexadecimal digits; rows that older versions have saved come without it.
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


def write_index_checksum(folder: str) -> None:
    """Note the checksum of a folder's index, once it is written."""
    with open(os.path.join(folder, INDEX), "rb") as file:
        checksum = zlib.crc32(file.read())
    with open(os.path.join(folder, INDEX_CHECKSUM), "w") as file:
        file.write(f"{checksum:08x}\n")


class RowReader(FileSystemReader):
    """The reader for ``torch.distributed.checkpoint.load``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            ValueError: It does not match its checksum, or holds what no index does.
        """
        with open(os.path.join(self.path, INDEX), "rb") as file:
            data = file.read()
        noted = os.path.join(self.path, INDEX_CHECKSUM)
        if os.path.exists(noted):
            with open(noted) as file:
                if file.read().strip() != f"{zlib.crc32(data):08x}":
                    raise ValueError("the index does not match its checksum")
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"the index is a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a rank wants of the rows, piece by piece.

        Raises:
            ValueError: A piece is not what the index says.
            zipfile.BadZipFile: It does not match its checksum.
        """
        for item in plan.items:
            where = self.storage_data[item.storage_index]
            name = os.path.basename(where.relative_path)  # never outside the folder
            with open(os.path.join(self.path, name), "rb") as file:
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
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which no index of ours does")
        return super().find_class(module, name)
