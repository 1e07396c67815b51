"""Runs that are saved half way and go on, and the comparison of what comes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import ConcatDataset, DataLoader

from distributed.training import Module, Noise, Watch, fit, rank
from lightning_dct import DCTStrategy


class SaveAndStop(Callback):
    """Saves after so many batches and ends the run there, unless it is not to stop."""

    def __init__(self, path: Path, after: int, stop: bool = True) -> None:
        self.path = path
        self.after = after
        self.stop = stop

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stop


class AtStart(Callback):
    """Keeps what ``look`` sees when training starts: what a rank begins with."""

    def __init__(self, look: Callable[[Trainer], Any]) -> None:
        self.look = look

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.seen = self.look(trainer)


def state_of(trainer: Trainer) -> dict[str, Any]:
    return trainer.strategy.synchronizer.state_dict()


def twice_ten_batches() -> DataLoader:
    """Lightning begins a plain loader anew where it resumes: here the second ten batches are the
    first ten again.
    """
    batches = Noise(10, 40, 8, rank=rank())
    return DataLoader(ConcatDataset([batches, batches]), batch_size=None)


def fit_half(
    save: Path | None,
    load: Path | None,
    strategy: DCTStrategy,
    module: LightningModule | None = None,
    look: Any = None,
    callbacks: tuple[Callback, ...] = (),
    **settings: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Twenty batches, or the first ten if it saves, or the second ten if it loads.

    Returns:
        What each batch has shown, and all that a checkpoint would hold now, with what has been
        sent.
    """
    watch = Watch(look=look)
    run = fit(
        strategy,
        Module(None, torch.optim.Adam, lr=0.01) if module is None else module,
        twice_ten_batches(),
        watch=watch,
        ckpt_path=None if load is None else str(load),
        callbacks=[*callbacks, *([] if save is None else [SaveAndStop(save, 10)])],
        **settings,
    )
    shown = list(zip(run.hashes, run.seen, strict=True)) if look else run.hashes
    # DistributedDataParallel begins with other buckets after each start.
    sent = None if strategy._ddp_kwargs.get("bucket_cap_mb") else run.totals.bytes_sent
    return shown, {
        **without_times(run.state),
        "bytes sent": sent,
        "refreshes": run.totals.refreshes,
    }


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds, less its record of traffic."""
    return {name: value for name, value in state.items() if name != "traffic"}
