"""A disk or a service that fails is named as that, on every rank, and is no damage to a
checkpoint.
"""

import errno
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_dct.fabric
from distributed.training import launched, message_of, rank, trainer_for
from embedding.hybrid import Hybrid, batches
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint import files
from lightning_dct.checkpoint import format as saved
from lightning_dct.checkpoint.files import AtomicCheckpointIO
from lightning_dct.embedding import table_files

FAILURES: list[OSError] = [
    NotADirectoryError(errno.ENOTDIR, "Not a directory"),
    FileExistsError(errno.EEXIST, "File exists"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    TimeoutError("the storage does not answer"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    OSError(errno.ENOSPC, "No space left on device"),
]
# A file that is missing is told apart: `test_saving.py`.
FAILURES_TO_READ = [failure for failure in FAILURES if not isinstance(failure, FileNotFoundError)]
# Where a rank fails, of the rank and of what it does.
WRITES = {
    "its state": (1, saved, "write_state"),
    "rows": (1, table_files, "_write_pieces"),
    "lock": (0, files, "lock"),
}
READS = {"a state": (1, saved, "read_checked"), "rows": (1, table_files, "_load_values")}
Seen = tuple[type[Exception], int | None, str]


def seen(work: Callable[[], Any]) -> Seen:
    with pytest.raises(Exception) as caught:
        work()
    return type(caught.value), getattr(caught.value, "errno", None), str(caught.value)


def fails(failure: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise failure

    return raises


def trainer_of_tables(epochs: int = 1) -> Any:
    return trainer_for(DCTStrategy(density=0.5, min_tensor_size=1), max_epochs=epochs)


def save_where_one_rank_fails(path: Path) -> list[Seen]:
    trainer = trainer_of_tables()
    trainer.fit(Hybrid({"density": 0.2}), batches(2))
    trainer.save_checkpoint(path)
    answers = []
    for who, module, name in WRITES.values():
        for failure in FAILURES:
            with pytest.MonkeyPatch.context() as patch:
                if rank() == who:
                    patch.setattr(module, name, fails(failure))
                answers.append(seen(lambda: trainer.save_checkpoint(path)))
    return answers


def read_where_one_rank_fails(path: Path) -> list[Seen]:
    answers = []
    for who, module, name in READS.values():
        for failure in FAILURES_TO_READ:
            with pytest.MonkeyPatch.context() as patch:
                if rank() == who:
                    patch.setattr(module, name, fails(failure))
                trainer = trainer_of_tables(2)
                model = Hybrid({"density": 0.2})
                fit = partial(trainer.fit, model, batches(2), ckpt_path=str(path))
                answers.append(seen(fit))
    trainer_of_tables(2).fit(Hybrid({"density": 0.2}), batches(2), ckpt_path=str(path))
    return answers


def test_a_failed_disk_is_no_damage(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the kind of error that one rank has met, on both ranks; the checkpoint of before is
    whole after all.
    """
    path = tmp_path / "a.ckpt"
    for answers in ranks(2).run(save_where_one_rank_fails, path):
        expectations = [(who, failure) for who, _, _ in WRITES.values() for failure in FAILURES]
        for (kind, number, message), (who, expected) in zip(answers, expectations, strict=True):
            assert (kind, number) == (type(expected), expected.errno)
            assert f"The checkpoint {str(path)!r}" in message or "-rows' is not saved" in message
            assert f"is not saved, because rank {who} on " in message
            assert expected.args[-1] in message
            assert "damaged" not in message
    for answers in ranks(2).run(read_where_one_rank_fails, path):
        for (kind, number, message), expected in zip(
            answers, FAILURES_TO_READ * len(READS), strict=True
        ):
            assert (kind, number) == (type(expected), expected.errno)
            assert expected.args[-1] in message
            assert "damaged" not in message


def save_in_fabric(path: Path) -> Callable[[], Any]:
    fabric: Any = launched(lightning_dct.fabric.DCTStrategy(density=0.5))
    module = torch.nn.Linear(40, 8)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    return partial(fabric.save, path, {"module": module, "optimizer": optimizer})


def save_in_a_trainer(path: Path) -> Callable[[], Any]:
    trainer = trainer_of_tables()
    trainer.fit(Hybrid({"density": 0.2}), batches(2))
    return partial(trainer.save_checkpoint, path)


def save_where_files_must_be_small(folder: Path, in_fabric: bool) -> list[Seen]:
    """The kernel refuses more bytes in the middle of a file, as on a full disk; then there is no
    folder to write to.
    """
    answers = []
    for who in (0, 1):
        save = (save_in_fabric if in_fabric else save_in_a_trainer)(folder / "a.ckpt")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (800 if rank() == who else limits[0], limits[1]))
        try:
            answers.append(seen(save))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save()
    (folder / "file").touch()
    save = (save_in_fabric if in_fabric else save_in_a_trainer)(folder / "file" / "a.ckpt")
    answers.append(seen(save))
    return answers


@pytest.mark.parametrize("in_fabric", [True, False])
def test_a_disk_that_fails_in_the_middle_of_a_file_is_named(
    ranks: Any, tmp_path: Path, in_fabric: bool
) -> None:
    for first, second, third in ranks(2).run(save_where_files_must_be_small, tmp_path, in_fabric):
        for who, (kind, number, message) in enumerate((first, second)):
            assert (kind, number) == (OSError, errno.EFBIG)
            assert f"is not saved, because rank {who} on " in message
            assert "File too large" in message
        assert third[:2] == (FileExistsError, errno.EEXIST)
        assert "is not saved, because rank 0 on " in third[2]


class StoreError(Exception):
    """As those of storage services, which take other arguments than a message."""

    def __init__(self, code: int, *, answer: str) -> None:
        super().__init__(f"{code}: {answer}")


def save_in_a_store_that_fails(path: Path) -> Seen:
    trainer = trainer_of_tables()
    trainer.fit(Hybrid({"density": 0.2}), batches(2))
    if rank() == 1:
        trainer.strategy.checkpoint_io.save_checkpoint = fails(StoreError(503, answer="slow down"))
    return seen(lambda: trainer.save_checkpoint(path))


def test_an_error_of_a_class_that_other_ranks_do_not_know(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_in_a_store_that_fails, tmp_path / "a.ckpt")
    assert first == (RuntimeError, None, "503: slow down")
    assert second == (StoreError, None, "503: slow down")


def locks_after_a_failed_save(folder: Path, in_fabric: bool) -> list[str]:
    """What keeps other processes from saving the checkpoint while this process goes on."""
    save: Any = (save_in_fabric if in_fabric else save_in_a_trainer)(folder / "a.ckpt")
    strategy = save.func.__self__.strategy
    strategy.checkpoint_io = AtomicCheckpointIO()
    strategy.checkpoint_io.save_checkpoint = fails(OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left on device" in message_of(save)
    torch.distributed.barrier()
    return [name for name in os.listdir(folder) if name.endswith(".lock")]


@pytest.mark.parametrize("in_fabric", [True, False])
def test_a_save_that_fails_leaves_no_lock(ranks: Any, tmp_path: Path, in_fabric: bool) -> None:
    assert ranks(2).run(locks_after_a_failed_save, tmp_path, in_fabric) == [[], []]
