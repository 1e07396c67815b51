"""What the ranks train in the tests that kill them: small models of every kind, a checkpoint after
every step.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from distributed.harness import begin_rank
from distributed.training import Module, Noise, perceptron, trainer_for
from embedding.growing import Growing
from embedding.hybrid import Batches, Hybrid
from embedding.pruned import Pruned
from fsdp.training import Plain
from lightning_dct import DCTFSDPStrategy, DCTPipelineStrategy, DCTStrategy, EmbeddingPruning
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.failures.lifeline import Lifeline
from pipeline.split_models import SplitModule, replica

# In one epoch. Plain Lightning 2.6 trains an epoch too many when it resumes twice, the first time
# from a checkpoint saved after an epoch's last batch.
BATCHES = 24


class Resumable:
    """Batches that say how far they have been read, so that Lightning goes on there."""

    def __init__(self, batch: Callable[[int], Any], batches: int = BATCHES) -> None:
        self._batch = batch
        self._batches = batches
        self._position = 0
        self._first = 0

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        first = self._first
        self._first = 0
        for index in range(first, self._batches):
            self._position = index + 1
            yield self._batch(index)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position % self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = state["position"]


def signal_itself(number: int, lifeline: Lifeline) -> None:
    """Send this process a signal that no rank has received yet, and wait until all ranks will act
    on it.

    They train for a few milliseconds: on a busy machine the lifelines' threads might wake up when
    all is over.
    """
    os.kill(os.getpid(), number)
    order = lifeline._order
    while number not in order._signals and not any(
        number in due for due in list(order._due.values())
    ):
        time.sleep(0.001)


def replicas(**settings: Any) -> tuple[DCTStrategy, LightningModule, Any, dict[str, Any]]:
    rank = int(os.environ["RANK"])
    noise = Noise(BATCHES, 40, 8, rank=rank)
    module = Module(perceptron(hidden=200), torch.optim.Adam, lr=0.01)
    # Most saves, and so most kills, fall between two exchanges, or while one travels.
    rounds = {"local_steps": 4, "warmup_steps": 6, "overlap_steps": 2}
    strategy = DCTStrategy(**{"density": 0.05, "refresh_every": 4, **rounds, **settings})
    return strategy, module, noise.__getitem__, {}


def all_gather() -> Any:
    strategy, module, batch, _ = replicas(
        exchange="all_gather", value_format="2bit", overlap_steps=0
    )
    return strategy, module, batch, {"accumulate_grad_batches": 2}


def sharded() -> Any:
    return replicas(exchange="two_phase", value_format="1bit", density=0.2)


def in_background() -> Any:
    strategy, module, batch, _ = replicas(exchange="all_gather")
    return strategy, module, batch, {"plugins": [AsyncCheckpointIO()]}


def tables() -> Any:
    module = Hybrid(
        {"density": 0.1, "value_format": "2bit", "refresh_every": 5, "cache_rows": 40}, "adagrad"
    )
    return DCTStrategy(density=0.2, min_tensor_size=1, refresh_every=4), module, Batches.batch, {}


def growing() -> Any:
    exchange = {
        "density": 0.1,
        "value_format": "2bit",
        "refresh_every": 5,
        "cache_rows": 20,
        "max_rows": 24,
    }
    module = Growing({**exchange, "admit_after": 2}, "adagrad")
    return DCTStrategy(density=0.2, min_tensor_size=1, refresh_every=4), module, Batches.batch, {}


def pruned() -> Any:
    module = Pruned(
        {"density": 0.1, "value_format": "2bit", "refresh_every": 5, "cache_rows": 40}, "adagrad"
    )
    strategy = DCTStrategy(density=0.2, min_tensor_size=1, refresh_every=4)
    # Some kills fall before the pruning, some after it.
    return strategy, module, Batches.batch, {"callbacks": [EmbeddingPruning(0.5, BATCHES // 2)]}


def pipeline() -> Any:
    split = {"density": 0.2, "forward_format": "int8", "refresh_every": 3}
    strategy = DCTPipelineStrategy(
        stages=2, micro_batches=4, density=0.2, min_tensor_size=1, refresh_every=4
    )
    noise = Noise(BATCHES, 40, 8, 8, replica(2))
    return strategy, SplitModule(2, split, torch.optim.Adam, lr=0.01), noise.__getitem__, {}


def fsdp() -> Any:
    settings = {
        "replicas": 2,
        "unit": 1000,
        "local_steps": 2,
        "warmup_steps": 0,
        "refresh_every": 4,
    }
    strategy = DCTFSDPStrategy(**settings)
    noise = Noise(BATCHES, 40, 8, rank=int(os.environ["RANK"]))
    return strategy, Plain(torch.optim.Adam, lr=0.01), noise.__getitem__, {}


KINDS: dict[str, Callable[[], Any]] = {
    "all_gather": all_gather,
    "sharded": sharded,
    "in_background": in_background,
    "tables": tables,
    "growing": growing,
    "pruned": pruned,
    "pipeline": pipeline,
    "fsdp": fsdp,
}
# Two ranks, but for two replicas of two shards.
WORLD_SIZES = {**dict.fromkeys(KINDS, 2), "fsdp": 4}


class Reporting(Callback):
    """Tells whoever may want to kill this rank how far it is."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        save = trainer.strategy.save_checkpoint

        def save_and_tell(*arguments: Any, **settings: Any) -> None:
            self.tell(trainer, "saving")
            save(*arguments, **settings)
            self.tell(trainer, "saved")

        trainer.strategy.save_checkpoint = save_and_tell

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.tell(trainer, "training")

    def tell(self, trainer: Trainer, event: str) -> None:
        self.pipe.send((event, trainer.fit_loop.total_batch_idx))


def plain(value: Any) -> Any:
    """A tree of dicts and lists with a CPU copy of the local part of every tensor."""
    return apply_to_collection(
        value, torch.Tensor, lambda tensor: local_of(tensor).detach().to("cpu", copy=True)
    )


def train(
    rank: int, world_size: int, port: int, kind: str, folder: Path, batches: int, pipe: Connection
) -> None:
    """One rank: go on from the last checkpoint in the folder if there is one, and leave there what
    comes out.
    """
    log = begin_rank((folder / f"rank-{rank}.log").open("a"), rank, world_size, port)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy, module, batch, settings = KINDS[kind]()
    saver = ModelCheckpoint(folder / "checkpoints", "{step}", save_last=True, every_n_train_steps=1)
    callbacks = [saver, Reporting(pipe), *settings.pop("callbacks", [])]
    trainer = trainer_for(strategy, enable_checkpointing=True, callbacks=callbacks, **settings)
    trainer.fit(module, Resumable(batch, batches), ckpt_path="last")
    state = strategy.synchronizer.state_dict()
    del state["traffic"]  # it counts time
    result = {
        "weights": plain(dict(module.named_parameters())),
        "optimizers": [plain(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "state": state,
        "modules": [part.compression_state() for part in strategy.compressed_modules().values()],
    }
    torch.save(result, folder / f"final-{rank}.pt")
    log.flush()
    # Not by the usual way out: gloo's threads may abort a process that ends while a
    # DistributedDataParallel is alive.
    os._exit(0)
