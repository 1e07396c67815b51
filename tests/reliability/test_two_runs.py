"""Two runs that save one checkpoint: each replaces that of the other, and it is whole whoever comes
last.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from distributed.harness import elastic_environment, free_port, started
from distributed.training import Module, loader, rank, trainer_for, warnings_of
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint.format import files_beside, state_path
from lightning_dct.checkpoint.reading import read_state

SAVES = 40


def save_often(number: int, port: int, folder: Path) -> None:
    """A run of one rank; it begins when the other one is ready, too."""
    os.environ.update(elastic_environment(0, 1, port))
    torch.set_num_threads(1)
    trainer = trainer_for(DCTStrategy(lifelines=False), default_root_dir=folder)
    trainer.fit(Module(), loader(2, 40, 8))
    (folder / f"ready-{number}").touch()
    while not all((folder / f"ready-{other}").exists() for other in range(2)):
        time.sleep(0.001)
    for _ in range(SAVES):
        trainer.save_checkpoint(folder / "last.ckpt")
    os._exit(0)


def test_both_save_at_once(tmp_path: Path) -> None:
    """Oracle: both end well, and the checkpoint points at a file that is there and whole; at no
    other.
    """
    processes = [
        started(save_often, number, free_port(), tmp_path, daemon=True) for number in range(2)
    ]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    path = str(tmp_path / "last.ckpt")
    manifest = torch.load(path, weights_only=True)["lightning_dct"]
    assert read_state(TorchCheckpointIO(), path, manifest, 0, 1)["synchronisations"] == 2
    assert files_beside(path) == [state_path(path, manifest, 0)]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "last.ckpt",
        "last.ckpt.dct",
        "ready-0",
        "ready-1",
    ]


def save_after_another(folder: Path) -> list[int]:
    """How often a save warns: the first one, over the files of an earlier run; the next; and one
    after another run.
    """
    path = folder / "last.ckpt"
    seen = []
    trainer = trainer_for(DCTStrategy(), default_root_dir=folder)
    trainer.fit(Module(), loader(2, 40, 8))
    for name in (
        "000000000009-5f0c93ab-rank-0-of-2.pt",
        None,
        "000000000009-5f0c93ac-rank-0-of-2.pt",
    ):
        if name is not None and rank() == 0:
            (folder / "last.ckpt.dct").mkdir(exist_ok=True)
            (folder / "last.ckpt.dct" / name).touch()
        seen.append(
            sum("Another run saves" in one for one in warnings_of(trainer.save_checkpoint, path))
        )
    return seen


def test_runs_that_save_in_turn_are_told(ranks: Any, tmp_path: Path) -> None:
    """Oracle: one warning, on rank 0."""
    assert ranks(2).run(save_after_another, tmp_path)[0] == [0, 0, 1]
