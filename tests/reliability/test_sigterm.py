"""SIGTERM, to any of the ranks at any moment: all save and end after the same step, with the status
of SIGTERM.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from distributed.scripts import TIMEOUT_S, Script
from distributed.training import (
    Module,
    Watch,
    assert_weights_equal,
    loader,
    rank,
    summary,
    trainer_for,
)
from lightning_dct import DCTStrategy
from reliability.killed_training import BATCHES, Resumable, signal_itself

STATUS = 128 + signal.SIGTERM
TRIES = 3


class Signals(Callback):
    """Sends this process a signal as a batch begins, or some time after that."""

    def __init__(self, ranks: tuple[int, ...], at: int, delay_s: float | None = None) -> None:
        self.ranks = ranks
        self.at = at
        self.delay_s = delay_s
        self._sending: threading.Thread | None = None

    def _send(self) -> None:
        time.sleep(self.delay_s or 0.0)
        os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.at and rank() in self.ranks:
            if self.delay_s is None:
                signal_itself(signal.SIGTERM, trainer.strategy.lifeline)
            else:
                self._sending = threading.Thread(target=self._send)
                self._sending.start()

    on_validation_batch_start = on_train_batch_start

    def on_exception(self, *_: Any) -> None:
        if self._sending is not None:
            self._sending.join()  # a signal that comes when the run is over would end the process


class Terminated(NamedTuple):
    """How a run of one rank ended: what the process' status would be, and after how many steps."""

    status: Any
    steps: int


def run(trainer: Any, method: str, *arguments: Any, **settings: Any) -> Terminated:
    try:
        getattr(trainer, method)(*arguments, **settings)
    except SystemExit as end:
        return Terminated(end.code, trainer.global_step)
    return Terminated("no end", trainer.global_step)


def fits(folder: Path, seed: int) -> list[Terminated]:
    chance = random.Random(seed)
    ended = []
    for _ in range(TRIES):
        signalled = chance.choice([(0,), (1,), (0, 1)])
        at = chance.randrange(3)
        delay_s = chance.random() * 0.02
        signals = Signals(signalled, at, delay_s * (1 + rank()))
        trainer = trainer_for(
            DCTStrategy(density=0.1), callbacks=[signals], default_root_dir=folder
        )
        ended.append(run(trainer, "fit", Module(), loader(100_000, 40, 8)))
    return ended


def test_every_run_ends_on_all_ranks_alike(ranks: Any, tmp_path: Path) -> None:
    """Oracle: each other's steps, SIGTERM's status, and no file where the user wants no
    checkpoints.
    """
    first, second = ranks(2).run(fits, tmp_path, 1)
    assert first == second
    assert [end.status for end in first] == [STATUS] * TRIES
    assert not list(tmp_path.iterdir())


def train(
    folder: Path, signalled: tuple[int, ...], ckpt_path: str | None, on_exception: bool
) -> Any:
    strategy = DCTStrategy(density=0.05, refresh_every=4)
    watch = Watch()
    module = Module(None, torch.optim.Adam, lr=0.01)
    saver = ModelCheckpoint(folder, "kept", save_on_exception=on_exception, every_n_epochs=100)
    trainer = trainer_for(
        strategy,
        callbacks=[watch, saver, Signals(signalled, 3)],
        default_root_dir=folder,
        enable_checkpointing=True,
        accumulate_grad_batches=2,
    )
    data = Resumable(loader(BATCHES, 40, 8).dataset.__getitem__)
    return run(trainer, "fit", module, data, ckpt_path=ckpt_path), summary(strategy, module, watch)


@pytest.mark.parametrize(
    ("on_exception", "file", "ckpt_path"), [(False, "hpc_ckpt_1", "hpc"), (True, "kept", None)]
)
def test_the_run_goes_on(
    ranks: Any, tmp_path: Path, on_exception: bool, file: str, ckpt_path: str | None
) -> None:
    """Oracle: a run that was left in peace, to the last bit; it is saved once, where Lightning
    would save it.
    """
    whole = ranks(2).run(train, tmp_path / "whole", (), None, on_exception)
    folder = tmp_path / "terminated"
    ended = ranks(2).run(train, folder, (1,), None, on_exception)
    # Lightning would take a folder called `hpc_ckpt_1` for a checkpoint.
    assert {path.name for path in folder.iterdir()} == {
        f"{file}.ckpt",
        f"{file.replace('_', '-')}.ckpt.dct",
    }
    again = ranks(2).run(train, folder, (), ckpt_path or str(folder / "kept.ckpt"), on_exception)
    for (_, all_of_it), (end, before), (resumed_end, after) in zip(
        whole, ended, again, strict=True
    ):
        assert end.status == STATUS
        assert resumed_end == ("no end", BATCHES // 2)
        assert before.hashes + after.hashes == all_of_it.hashes
        assert_weights_equal(after.residuals, all_of_it.residuals)


def evaluate(folder: Path) -> Terminated:
    trainer = trainer_for(
        DCTStrategy(), callbacks=[Signals((1,), 2)], default_root_dir=folder, limit_val_batches=1.0
    )
    return run(trainer, "validate", Module(), loader(100_000, 40, 8), verbose=False)


def test_an_evaluation_ends(ranks: Any, tmp_path: Path) -> None:
    """Oracle: SIGTERM's status on both ranks, of which one is signalled."""
    assert [end.status for end in ranks(2).run(evaluate, tmp_path)] == [STATUS, STATUS]


SCRIPT = """
    import sys
    from pathlib import Path
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning_dct import DCTStrategy

    class Model(BoringModel):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 5:
                Path("training").touch()

    settings = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0, "logger": False}
    Trainer(strategy=DCTStrategy(density=0.1), accelerator="cpu", devices=2, max_epochs=-1, **settings).fit(Model())
    """


@pytest.mark.usefixtures("quick_python")
def test_processes_of_lightnings_launcher(tmp_path: Path) -> None:
    """The signal goes to rank 0 alone, as Docker sends it.

    Oracle: its status, the checkpoint, and both end.
    """
    script = Script(tmp_path, SCRIPT)
    deadline = time.monotonic() + TIMEOUT_S
    while (
        not (tmp_path / "training").exists() and time.monotonic() < deadline and script.is_running()
    ):
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    status, output = script.end()
    assert status == STATUS, output
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists(), output
