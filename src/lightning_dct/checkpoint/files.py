"""Writes the files of a checkpoint so that each is complete or absent, whenever the process is
killed.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dct.agreement import Result, like, on_all_ranks
from lightning_dct.checkpoint.format import no_checkpoint_name
from lightning_dct.lightning_private import METADATA_FILENAME
from lightning_dct.strategy_protocols import RankedStrategy

LONGEST_WAIT_S = 60.0
OWN_FOLDERS = (
    "Give each run a folder of its own: `default_root_dir`, or `dirpath` of `ModelCheckpoint`."
)
_locks: dict[str, IO[str]] = {}  # those that this process holds, by checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO``, which on local disks writes beside the checkpoint and
    renames.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, and replace an existing file atomically; an OSError leaves the old
        file unchanged.
        """
        filesystem, local_path = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(local_path), exist_ok=True)
        unfinished = beside(local_path, "part")
        try:
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            replace(Path(unfinished), Path(local_path))
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
            raise
        finally:
            unlock(local_path)


def write_on_all_ranks(write: Callable[[], Result], path: str) -> list[Result]:
    """The results of all ranks, or the error of one rank, raised on every rank; a collective call.

    ``write`` writes this rank's part of the checkpoint ``path``, without a collective call. An
    OSError names the checkpoint; its kind and number stay. Other errors stay as they are, and are a
    RuntimeError on the other ranks.
    """
    return on_all_ranks(write, lambda error: _of_writing(path, error))


def _of_writing(path: str, error: Exception) -> Exception:
    failure: BaseException | None = error
    # `torch.save` ends its file where the disk has failed, and reports that the end does not fit.
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        failure = error.__context__
    if not isinstance(failure, OSError):
        return error
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = f"rank {rank} on {socket.gethostname()}"
    return like(
        failure,
        f"The checkpoint {path!r} is not saved, because {place} cannot write its part"
        f" ({type(failure).__name__}: {failure}). What was saved there before is whole. Look at the"
        " disk and the folder, or choose others: `default_root_dir` of the Trainer, `dirpath` of"
        " `ModelCheckpoint`.",
    )


def lock(path: str) -> None:
    """Keep other processes from saving the same checkpoint until :func:`unlock`; wait for one that
    is saving it.

    The wait ends with a RuntimeError after a minute, and the lock with this process, however it
    ends. There is none in storage services, and on disks without locks.
    """
    filesystem, place = url_to_fs(path)
    if not isinstance(filesystem, LocalFileSystem) or place in _locks:
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    name = beside(place, "lock")
    start = time.monotonic()
    last = ""
    while True:
        file = open(name, "a+")  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                break
        except FileNotFoundError:
            pass  # its owner has removed it
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read() or "Another process"
            if owner != last:
                rank_zero_warn(f"{owner} is saving {path!r} too. {OWN_FOLDERS}")
            last = owner
        except OSError:
            file.close()
            return
        file.close()
        if time.monotonic() > start + LONGEST_WAIT_S:
            raise RuntimeError(
                f"{last} has been saving {path!r} for {LONGEST_WAIT_S:.0f} seconds. {OWN_FOLDERS}"
                f" If that run is gone, remove {name!r}."
            )
        time.sleep(0.02)
    file.truncate(0)
    file.write(f"Process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locks[place] = file


def unlock(path: str) -> None:
    """Let other processes save a checkpoint again."""
    _, place = url_to_fs(path)
    if (file := _locks.pop(place, None)) is not None:
        with contextlib.suppress(OSError):
            os.remove(file.name)
        file.close()


def cleans_own_disk(strategy: RankedStrategy, path: str) -> bool:
    """Whether this is the first rank of a node that has a disk of its own: without the checkpoint
    that rank 0 wrote.
    """
    files, place = url_to_fs(path)
    return strategy.local_rank == 0 and strategy.node_rank > 0 and not files.exists(place)


def leave_sign(path: str) -> None:
    """Leave a placeholder on this host for a checkpoint that rank 0 has saved on another one:
    Lightning looks for it on every host.

    Rank 0 replaces it if the disk is shared after all, and hands its checkpoint over to a rank that
    resumes from it.
    """
    with contextlib.suppress(OSError), open(path, "x") as file:
        file.write("Rank 0 has this checkpoint on its host.\n")


def beside(path: str, suffix: str) -> str:
    """A hidden file beside a checkpoint."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{no_checkpoint_name(name)}.{suffix}")


def replace(new: Path, path: Path) -> None:
    """Move a folder or a file to a path, in place of a checkpoint, which may be either."""
    if new.is_file() and not (path / METADATA_FILENAME).is_file():
        new.replace(path)  # atomic; it refuses a folder of something else
        return
    old = Path(beside(str(path), "old"))
    _remove(old)  # a killed save may have left it
    if path.exists():
        path.rename(old)
    new.rename(path)
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a folder or a file, if there is one."""
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def write_at_once(checkpoint_io: CheckpointIO) -> CheckpointIO:
    """The ``CheckpointIO`` that writes before it returns; Lightning's ``AsyncCheckpointIO`` wraps
    it.
    """
    inner = checkpoint_io.checkpoint_io if isinstance(checkpoint_io, AsyncCheckpointIO) else None
    return checkpoint_io if inner is None else inner
