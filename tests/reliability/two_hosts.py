"""Trainings on two hosts, as users write them.

Ranks soon say for whom they wait, and soon give up a host, unless the environment has ``PATIENT``.
With ``VERSION`` the package pretends to be of that version.
"""

import json
import os
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dct
import lightning_dct.fabric
from lightning_dct import DCTFSDPStrategy, DCTStrategy, ShardedEmbeddingBags, Updates
from lightning_dct.checksums import checksums_of
from lightning_dct.commands import main
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.failures import lifeline, meeting, sockets, waiting

PORT = 29500
# A host that does not answer for 4 seconds is lost; kernels answer, however busy a machine is.
LOST_SOON = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4_000}


class Model(pl.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


class Recommender(Model):
    """The same beside a sharded table, whose rows are on both hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ShardedEmbeddingBags([40], 64)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids = (batch[0][:, :1].abs() * 10).long() % 40
        return (self.model(batch[0]) + self.rows(ids)[:, 0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.01)


class DiesInSecondEpoch(pl.Callback):
    """Ends this rank without a word, as its host does when it loses power; before, it saves as on a
    signal.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/hpc_ckpt_1.ckpt", weights_only=False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.barrier()
            print("dies", flush=True)
            os._exit(0)


def trainer_on_two_hosts(folder: Path, strategy: Any = "dct", **settings: Any) -> pl.Trainer:
    """A rank on each of two hosts, on CPUs, without bars and loggers."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def train_and_die(folder: Path, kind: str, dies: bool, checkpoint: str | None) -> None:
    """Two epochs, or one of them; print a checksum of all weights."""
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(save_last=True, save_top_k=-1, every_n_epochs=1)
    ]
    trainer = trainer_on_two_hosts(
        folder,
        "dct_fsdp" if kind == "shards" else "dct",
        max_epochs=2,
        callbacks=[*callbacks, *([DiesInSecondEpoch()] if dies else [])],
    )
    model = Recommender() if kind == "tables" else Model()
    trainer.fit(model, batches(0), ckpt_path=checkpoint)
    weights = {name: local_of(one) for name, one in model.named_parameters()}
    print(f"ends with {sorted(checksums_of(weights).items())}.", flush=True)


def check(*words: str) -> None:
    """The command, whose exit status is the process's."""
    torch.set_num_threads(1)
    raise SystemExit(main(["check", *words, "--port", str(PORT), "--parameters", "100k"]))


def batches(rank: int) -> Any:
    """16 batches, others on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(TensorDataset(torch.randn(256, 64, generator=generator)), batch_size=16)


def as_environment_says() -> None:
    """Take what the environment says of the package."""
    if "PATIENT" not in os.environ:
        waiting.FIRST_S = 2.0
        lifeline.GRACE_S = 2.0
        sockets.KEEP_ALIVE.update(LOST_SOON)
    meeting.__version__ = os.environ.get("VERSION", meeting.__version__)


def tell_port(own: lifeline.Lifeline | None) -> None:
    """Rank 0 prints at which port it listens."""
    if own is not None and own._hub is not None:
        print(f"listens at {own._hub.port}.", flush=True)


class TellsPort(pl.Callback):
    """The same in a Trainer, while there is a lifeline."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tell_port(trainer.strategy.lifeline)


def train(folder: Path, lifelines: bool | int = True) -> None:
    """A few steps on two hosts."""
    as_environment_says()
    strategy = DCTStrategy(lifelines=lifelines)
    trainer = trainer_on_two_hosts(folder, strategy, max_steps=4, callbacks=[TellsPort()])
    trainer.fit(Model(), batches(0))
    print("trained", flush=True)


def train_one_replica(folder: Path) -> None:
    """A few steps of a single replica, whose shards are on both hosts, and a save."""
    trainer = trainer_on_two_hosts(folder, DCTFSDPStrategy(replicas=1, unit=64), max_steps=4)
    trainer.fit(Model(), batches(0))
    print("trained", flush=True)


def train_in_loop(
    kind: str,
    lifelines: bool | int = True,
    steps: int = 16,
    seconds: float = 0.0,
    folder: Path | str = "",
    resumes: bool = False,
) -> None:
    """The same without a Trainer: in Fabric's loop, which saves into a folder, or in a plain
    one.
    """
    as_environment_says()
    model: Any = nn.Linear(64, 64)
    optimizer: Any = torch.optim.Adam(model.parameters(), 1e-3)
    if kind == "fabric":
        strategy = lightning_dct.fabric.DCTStrategy(lifelines=lifelines)
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1, num_nodes=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        tell_port(strategy.lifeline)
    else:
        lightning_dct.init_process_group("gloo", lifelines=lifelines)
        updates = Updates(model, optimizer, steps=steps)
        tell_port(updates.lifeline)
    state = {"model": model, "optimizer": optimizer}
    checkpoint = Path(folder) / "x.ckpt"
    if folder and resumes:
        fabric.load(checkpoint, state)
    for step, (batch,) in zip(range(steps), cycle(batches(dist.get_rank())), strict=False):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if seconds:
            time.sleep(seconds)
            print(f"step {step}", flush=True)
        if folder and step % 8 == 7:
            fabric.save(checkpoint, state)
    if kind != "fabric":
        updates.close()
    print("trained", flush=True)
    dist.destroy_process_group()


class Slow(pl.Callback):
    """A step takes a while, and the host tells each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.seconds)
        print(f"step {trainer.global_step}", flush=True)


def train_for_long(folder: Path, steps: int, seconds: float = 0.1) -> None:
    """Steps that take a while, saved often and continued from the last save."""
    as_environment_says()
    trainer = trainer_on_two_hosts(
        folder,
        max_steps=steps,
        callbacks=[Slow(seconds), ModelCheckpoint(save_last=True, every_n_train_steps=8)],
    )
    trainer.fit(Model(), batches(0), ckpt_path="last")
    print("trained", flush=True)


if __name__ == "__main__":
    # Under torchrun: a function of this module, and its arguments as words.
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
