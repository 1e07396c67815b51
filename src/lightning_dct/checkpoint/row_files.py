"""Writes and reads tensors piece by piece: plain bytes, and an index that is no pickle and has every checksum.

rank-0.rows    the pieces that rank 0 has written, one after the other
rank-1.rows
index          a checksum of what follows; then, as JSON, this folder's name and where the pieces of each tensor are
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class SavedPiece(NamedTuple):
    """Where some rows of a tensor are: in the file of a rank, from a byte on."""

    start: int
    rows: int
    rank: int
    offset: int
    checksum: int


class SavedTensor(NamedTuple):
    """The dtype and the shape of a tensor, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


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
        _write(f"{folder}/{INDEX}", lambda file: file.write(with_checksum(text)))


def _write_pieces(folder: str, tensors: Mapping[str, Pieces], rank: int) -> dict[str, Any]:
    """Write one rank's file, and return its part of the index."""
    index: dict[str, Any] = {}

    def write_all(file: Any) -> None:
        offset = 0
        for name, (num_rows, pieces) in tensors.items():
            for start, rows in pieces.items():
                whole = rows if isinstance(rows, Tensor) else rows()
                data = bytes_of(whole)
                shape, dtype = [num_rows, *whole.shape[1:]], str(whole.dtype).removeprefix("torch.")
                tensor = index.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
                tensor["pieces"].append([start, len(whole), rank, offset, zlib.crc32(data)])
                file.write(data)
                offset += data.nbytes

    _write(f"{folder}/{_file_of(rank)}", write_all)
    return index


def _write(path: str, write: Callable[[Any], Any]) -> None:
    files, place = url_to_fs(path)
    files.makedirs(os.path.dirname(place), exist_ok=True)
    with files.open(place, "wb") as file:
        write(file)
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
        # Shape, dtype and pieces of each tensor, by name.
        self.index = {
            name: SavedTensor(
                getattr(torch, tensor["dtype"]),
                tuple(map(int, tensor["shape"])),
                tuple(SavedPiece(*map(int, piece)) for piece in tensor["pieces"]),
            )
            for name, tensor in index["tensors"].items()
        }

    def num_rows(self, name: str) -> int:
        """The number of rows of a tensor; 0 if there is none of this name."""
        return self.index[name].shape[0] if name in self.index else 0

    def read(self, name: str, start: int, rows: Tensor) -> None:
        """Overwrite ``rows``, shape ``[n, ...]``, with the rows of a tensor from ``start`` on.

        Raises:
            KeyError: There is no tensor of this name.
            FileNotFoundError: A rank's file is missing.
            ValueError: A piece does not match its checksum, rows are missing, or they have another shape.
        """
        missing = len(rows)
        saved = self.index[name]
        if saved.shape[1:] != rows.shape[1:]:
            raise ValueError(f"{name} in {self._folder!r} has shape {list(saved.shape)}")
        for piece in saved.pieces:
            low, high = max(start, piece.start), min(start + len(rows), piece.start + piece.rows)
            if low < high:
                values = self._read_piece(name, saved, piece)
                rows[low - start : high - start] = values[low - piece.start : high - piece.start].to(rows)
                missing -= high - low
        if missing:
            raise ValueError(f"{missing} rows of {name} are missing in {self._folder!r}")

    def _read_piece(self, name: str, saved: SavedTensor, piece: SavedPiece) -> Tensor:
        with self._files.open(f"{self._folder}/{_file_of(piece.rank)}", "rb") as file:
            file.seek(piece.offset)
            data = bytearray(file.read(piece.rows * math.prod(saved.shape[1:]) * saved.dtype.itemsize))
        if zlib.crc32(data) != piece.checksum:
            raise ValueError(f"a piece of {name} in {self._folder!r} does not match its checksum")
        return torch.frombuffer(data, dtype=saved.dtype).view(piece.rows, *saved.shape[1:])
