"""Writes and reads tensors piece by piece: plain bytes, and an index that is no pickle and has every checksum.

rank-0.rows    the pieces that rank 0 has written, one after the other
rank-1.rows
index          a checksum of what follows; then, as JSON, this folder's name, and of each tensor dtype, shape and pieces
               (first row, number of rows, rank, offset in that rank's file, checksum)
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_dct.checkpoint.reading import on_all_ranks
from lightning_dct.checksums import bytes_of, with_checksum, without_checksum

INDEX = "index"


# One rank's pieces of a tensor: the tensor's number of rows, and the pieces by their first row. A function makes its
# rows when they are written, so that not all of them exist at once.
Pieces = tuple[int, Mapping[int, Tensor | Callable[[], Tensor]]]


def write_rows(folder: str, tensors: Mapping[str, Pieces]) -> None:
    """Write every rank's pieces of tensors.

    A collective call. Rank 0 ends last, so other ranks can read the folder after a barrier only.

    Raises:
        OSError: Some rank cannot write, for example because its disk is full. Raised on every rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    everyone = on_all_ranks(lambda: _write_pieces(folder, tensors, rank), folder, (OSError, PermissionError))
    if rank == 0:
        merged: dict[str, dict[str, Any]] = {}
        for written in everyone:
            for name, tensor in written.items():
                merged.setdefault(name, {**tensor, "pieces": []})["pieces"] += tensor["pieces"]
        text = json.dumps({"folder": os.path.basename(folder), "tensors": merged}).encode()
        with _written(f"{folder}/{INDEX}") as file:
            file.write(with_checksum(text))


def _write_pieces(folder: str, tensors: Mapping[str, Pieces], rank: int) -> dict[str, Any]:
    """Write one rank's file, and return its part of the index."""
    index: dict[str, Any] = {}
    offset = 0
    with _written(f"{folder}/{_file_of(rank)}") as file:
        for name, (num_rows, pieces) in tensors.items():
            for start, rows in pieces.items():
                whole = rows if isinstance(rows, Tensor) else rows()
                data = bytes_of(whole)
                shape, dtype = [num_rows, *whole.shape[1:]], str(whole.dtype).removeprefix("torch.")
                tensor = index.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
                tensor["pieces"].append([start, len(whole), rank, offset, zlib.crc32(data)])
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


def _file_of(rank: int) -> str:
    return f"rank-{rank}.rows"


class RowFiles:
    """Reads what :func:`write_rows` has written, from wherever fsspec reads.

    Raises:
        FileNotFoundError: The folder is missing.
        ValueError: The index does not match its checksum, belongs to another folder, or is no index.
    """

    def __init__(self, folder: str) -> None:
        self._files, self._folder = url_to_fs(folder)
        if not self._files.isdir(self._folder):
            raise FileNotFoundError(
                f"The checkpoint's embedding rows should be in {folder!r}, which is not there. Put the folder that was"
                " saved with the checkpoint beside it."
            )
        index = json.loads(
            without_checksum(self._files.cat_file(f"{self._folder}/{INDEX}"), f"the index of {folder!r}")
        )
        if index["folder"] != os.path.basename(self._folder):
            raise ValueError(f"the index of {folder!r} belongs to {index['folder']!r}")
        # By name: the dtype, as torch calls it, the shape and the pieces of each tensor.
        self.index: dict[str, dict[str, Any]] = index["tensors"]

    def num_rows(self, name: str) -> int:
        """The number of rows of a tensor; 0 if there is none of this name."""
        return int(self.index[name]["shape"][0]) if name in self.index else 0

    def read(self, name: str, start: int, rows: Tensor) -> None:
        """Overwrite ``rows``, shape ``[n, ...]``, with the rows of a tensor from ``start`` on.

        Raises:
            KeyError: There is no tensor of this name.
            FileNotFoundError: A rank's file is missing.
            ValueError: A piece does not match its checksum, rows are missing, or they have another shape.
        """
        missing, saved = len(rows), self.index[name]
        dtype, shape = getattr(torch, saved["dtype"]), rows.shape[1:]
        if saved["shape"][1:] != list(shape):
            raise ValueError(f"{name} in {self._folder!r} has shape {saved['shape']}")
        for first, length, rank, offset, checksum in saved["pieces"]:
            low, high = max(start, first), min(start + len(rows), first + length)
            if low >= high:
                continue
            with self._files.open(f"{self._folder}/{_file_of(rank)}", "rb") as file:
                file.seek(offset)
                data = bytearray(file.read(length * math.prod(shape) * dtype.itemsize))
            if zlib.crc32(data) != checksum:
                raise ValueError(f"a piece of {name} in {self._folder!r} does not match its checksum")
            values = torch.frombuffer(data, dtype=dtype).view(length, *shape)
            rows[low - start : high - start] = values[low - first : high - first].to(rows)
            missing -= high - low
        if missing:
            raise ValueError(f"{missing} rows of {name} are missing in {self._folder!r}")
