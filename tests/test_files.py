"""A file is there whole or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from distributed.harness import CONTEXT, started
from lightning_dct.checkpoint import files
from lightning_dct.checkpoint.files import AtomicCheckpointIO, lock, unlock, write_at_once


class Killed(BaseException):
    pass


class KillsWhoWritesIt:
    def __reduce__(self) -> Any:
        raise Killed


def test_saves_what_lightning_saves(tmp_path: Path) -> None:
    """Oracle: torch.load, and nothing else in the folder."""
    path = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.arange(3)}, str(path))
    assert torch.load(path, weights_only=True)["a"].tolist() == [0, 1, 2]
    assert os.listdir(path.parent) == ["a.ckpt"]


@pytest.mark.parametrize("address", ["{}/a.ckpt", "file://{}/a.ckpt"])
def test_failed_write_leaves_the_old_file(tmp_path: Path, address: str) -> None:
    """Oracle: the old contents, and nothing else in the folder."""
    path = address.format(tmp_path)
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)
    with pytest.raises(Killed):
        AtomicCheckpointIO().save_checkpoint(
            {"a": torch.zeros(10_000), "b": KillsWhoWritesIt()}, path
        )
    assert torch.load(tmp_path / "a.ckpt", weights_only=True) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_what_is_being_written_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what Lightning takes for checkpoints: names that end in .ckpt, or have hpc_ckpt_ in
    them.
    """
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(os.listdir(tmp_path)))
    for name in ("last.ckpt", "hpc_ckpt_3.ckpt"):
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / name)
        (tmp_path / name).unlink()
    assert seen == [[".last.ckpt.part"], [".hpc-ckpt-3.ckpt.part"]]


def test_other_file_systems_are_left_to_lightning() -> None:
    """Oracle: what fsspec keeps in memory."""
    AtomicCheckpointIO().save_checkpoint({"a": 1}, "memory://folder/a.ckpt")
    assert TorchCheckpointIO().load_checkpoint("memory://folder/a.ckpt") == {"a": 1}


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", {"some": "option"})


def test_background_writing_is_told_apart() -> None:
    plain = AtomicCheckpointIO()
    assert write_at_once(plain) is plain
    assert write_at_once(AsyncCheckpointIO(plain)) is plain


def hold(path: str, pipe: Any) -> None:
    lock(path)
    pipe.send(os.getpid())
    pipe.recv()


def test_another_process_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: an error after the longest wait, and none once the other process has been killed."""
    path = str(tmp_path / "last.ckpt")
    ours, theirs = CONTEXT.Pipe()
    process = started(hold, path, theirs, daemon=True)
    owner = f"Process {ours.recv()} on "
    monkeypatch.setattr(files, "LONGEST_WAIT_S", 0.0)
    with (
        pytest.warns(UserWarning, match=f"{owner}.* is saving .*last.ckpt"),
        pytest.raises(RuntimeError, match=owner),
    ):
        lock(path)
    process.kill()
    process.join()
    lock(path)
    lock(path)
    unlock(path)
    assert os.listdir(tmp_path) == []
