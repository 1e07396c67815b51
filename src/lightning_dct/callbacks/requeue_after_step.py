"""Lets the checkpoint of a job that SLURM is about to requeue wait until a step is over on all ranks."""

from __future__ import annotations

import signal
import threading
from typing import Any

import lightning.pytorch as pl


class RequeueAfterStep(pl.Callback):
    """Save and requeue at the end of the step in which SLURM's signal has arrived.

    Lightning does it inside the signal's handler, that is wherever each rank happens to be: one with its gradients
    half sent, the next one ahead of it by a step or not signalled at all. What they save then does not belong together,
    and a rank that waits in a collective for one that saves waits for ever. Here the handler only takes note. At the
    end of each step the ranks agree whether any of them has been signalled, and all of them do what Lightning would.

    ``DCTStrategy`` adds this callback under a ``SLURMEnvironment`` with ``auto_requeue``. SLURM must give a job the
    time for one more step, and validation where it is due: ``--signal=USR1@SECONDS``.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._steps_before = 0
        self._save_and_requeue: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of Lightning's handler, which Lightning itself takes away when training ends."""
        strategy: Any = trainer.strategy
        self._signalled = False
        self._steps_before = strategy.traffic.totals.steps
        self._signal = strategy.cluster_environment.requeue_signal
        if threading.current_thread() is threading.main_thread():
            self._save_and_requeue = signal.signal(self._signal, self._take_note)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and requeue if it is due."""
        strategy: Any = trainer.strategy
        steps = strategy.traffic.totals.steps
        if steps == self._steps_before:  # gradients are being accumulated, and Lightning does not save them
            return
        self._steps_before = steps
        if strategy.reduce_boolean_decision(self._signalled, all=False):
            self._signalled = False
            self._save_and_requeue(self._signal, None)

    def _take_note(self, signal_number: int, frame: Any) -> None:
        self._signalled = True
