"""One rank's rows as pieces of a tensor in a checkpoint of ``torch.distributed.checkpoint``, and how they are read."""

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

from lightning_dct.embedding.row_files import RowReader
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


def load_shards(folder: str, shards: dict[str, Any], alone: bool = False) -> None:
    """Read rows into the pieces of ``shards``; a collective call unless ``alone``."""
    with naming(folder):
        reader = RowReader(folder)
        # torch.distributed.checkpoint would only warn about an index that it cannot read.
        reader.read_metadata()
        if shards:  # those of all ranks are empty, or none
            load(shards, storage_reader=reader, no_dist=alone or not dist.is_initialized())


@contextmanager
def naming(folder: str) -> Iterator[None]:
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


def check_folder(folder: str) -> None:
    """Refuse a folder that is not there (FileNotFoundError)."""
    files, path = url_to_fs(folder)
    if not files.isdir(path):
        raise FileNotFoundError(
            f"The checkpoint's embedding rows should be in {folder!r}, which is not there. Put the folder that was"
            " saved with the checkpoint beside it."
        )
