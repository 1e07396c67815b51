"""Writes checkpoints so that a file is complete or absent, whenever the process is killed.

Lightning writes into the folder for temporary files and moves the result. Where that folder is on another disk, the
move is a copy, and a process killed meanwhile leaves half a checkpoint under the checkpoint's own name.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO``, which on local disks writes beside the checkpoint and renames.

    A process killed while it writes leaves a file whose name begins with a dot and ends in ``.part``. The next save of
    the same name overwrites it, and nothing reads it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint and replace an existing file in one step; Lightning refuses storage options.

        Raises:
            TypeError: There are storage options.
            OSError: It cannot be written, for instance because the disk is full. An existing file stays.
        """
        filesystem, local_path = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        folder, name = os.path.split(local_path)
        os.makedirs(folder, exist_ok=True)
        unfinished = os.path.join(folder, f".{no_checkpoint_name(name)}.part")
        try:
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, local_path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
            raise


def no_checkpoint_name(name: str) -> str:
    """The name of a file beside a checkpoint: Lightning resumes from anything called hpc_ckpt_N."""
    return name.replace("hpc_ckpt_", "hpc-ckpt-")


def write_at_once(checkpoint_io: CheckpointIO) -> CheckpointIO:
    """The part that writes before it returns: of Lightning's ``AsyncCheckpointIO`` the one it wraps."""
    inner = checkpoint_io.checkpoint_io if isinstance(checkpoint_io, AsyncCheckpointIO) else None
    return checkpoint_io if inner is None else inner


def finish_writing(checkpoint_io: CheckpointIO) -> None:
    """Wait for all writes in the background."""
    if isinstance(checkpoint_io, AsyncCheckpointIO):
        checkpoint_io.teardown()  # its only way to wait; the next save starts it again
