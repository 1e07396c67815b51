"""Trainings in which one rank dies or fails, in all the ways it may."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed.training import trainer_for
from lightning_dct import DCTStrategy
from lightning_dct.failures import lifeline

BATCH = 3


class Model(pl.LightningModule):
    """A linear layer; ``fail`` is called in one training step of one rank."""

    def __init__(self, rank: int, fail: Callable[[], None], at_setup: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 40)
        self.rank = rank
        self.fail = fail
        self.at_setup = at_setup

    def setup(self, stage: str) -> None:
        if self.at_setup and self.global_rank == self.rank:
            self.fail()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if not self.at_setup and batch_idx == BATCH and self.global_rank == self.rank:
            print(f"failed at {time.time()}", flush=True)
            self.fail()
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Sleeps(pl.Callback):
    """Keeps a failing rank from ending, as an unfinished upload may."""

    def on_exception(self, *_: Any) -> None:
        time.sleep(60)


def raise_error() -> None:
    raise RuntimeError("I have had enough")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once() -> None:
    os._exit(3)


def fill_disk() -> None:
    """No file may become longer than a few bytes: what is written then fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


WAYS: dict[str, Callable[[], None]] = {
    "kill": kill,
    "kill, with a worker that lives on": kill,
    "exit": exit_at_once,
    "raise at setup": raise_error,
    "raise and stay": raise_error,
    "raise, with a checkpoint to save": raise_error,
    "disk full": fill_disk,
}


def train(way: str, rank: int, folder: str, grace_s: float) -> None:
    """Train on every rank until one of them fails in one of ``WAYS``; the others have ``grace_s``
    to end.
    """
    lifeline.GRACE_S = grace_s
    callbacks: list[pl.Callback] = []
    if way == "raise and stay":
        callbacks.append(Sleeps())
    if way == "raise, with a checkpoint to save":
        callbacks.append(ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=10))
    if way == "disk full":
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=1))
    data = TensorDataset(torch.randn(200, 32, generator=torch.Generator().manual_seed(1)))
    settings = {
        "max_epochs": 100,
        "enable_checkpointing": bool(callbacks),
        "use_distributed_sampler": True,
    }
    trainer = trainer_for(DCTStrategy(density=0.1), callbacks=callbacks, **settings)
    workers = {"num_workers": 1, "persistent_workers": True} if "worker" in way else {}
    with _deaf_workers(bool(workers) and os.environ["RANK"] == str(rank)):
        trainer.fit(Model(rank, WAYS[way], way == "raise at setup"), DataLoader(data, 4, **workers))


@contextmanager
def _deaf_workers(wanted: bool) -> Iterator[None]:
    """DataLoader workers that look after their parent once a minute only, as busy ones do."""
    from torch.utils.data._utils import worker

    before = worker.MP_STATUS_CHECK_INTERVAL
    if wanted:
        worker.MP_STATUS_CHECK_INTERVAL = 60.0
    yield
    worker.MP_STATUS_CHECK_INTERVAL = before
