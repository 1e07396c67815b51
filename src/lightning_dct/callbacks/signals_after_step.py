"""Lets what a signal asks for, to stop or to be requeued, wait until a step is over on all ranks."""

from __future__ import annotations

import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dct.callbacks.requirements import InternalCallback


class SignalsAfterStep(InternalCallback):
    """Act on SIGTERM, and on SLURM's signal to requeue, at the end of the step in which one has arrived on any rank.

    Lightning acts inside the signal's handler, that is wherever each rank happens to be: one with its gradients half
    sent, the next one ahead of it by a step or not signalled at all. What they save then does not belong together, and
    a rank that waits in one collective for one that has begun another waits for ever. Here the handler only takes note,
    lifelines carry the word, and all ranks act together:

    * on SIGTERM they save and end with exit status 143, or 0 when the job has been requeued. Callbacks that save on an
      exception do so; without any, but with another that saves checkpoints, it is Lightning's ``hpc_ckpt_N.ckpt`` in
      ``default_root_dir``, from which ``fit(ckpt_path="hpc")`` goes on.
    * on SLURM's signal they do what Lightning would, once.

    In ``validate``, ``test`` and ``predict`` it is the end of a batch, and nothing is saved. ``DCTStrategy`` adds this
    callback. A job must be given the time for one more step, and validation where it is due.
    """

    def __init__(self) -> None:
        self._lifeline: Any = None
        self._noted: list[int] = []
        self._requeued = False
        self._step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have Lightning register a handler that takes note; it takes it away when the run ends."""
        strategy: Any = trainer.strategy
        self._lifeline, self._noted = strategy.lifeline, []
        if self._lifeline is None and trainer.world_size > 1:
            return  # ranks that cannot agree leave it to Lightning
        # A hack: there is no hook between Lightning's handlers, which broadcast, and data loaders, which take long.
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = self._take_note

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Know where the run begins."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on what is due, unless gradients are being accumulated."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._act(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on what is due, unless this is within fit."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._act(trainer)

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on what is due."""
        self._act(trainer)

    def on_predict_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on what is due."""
        self._act(trainer)

    def _take_note(self, signal_number: int, frame: Any) -> None:
        if self._lifeline is None:
            self._noted.append(signal_number)
        else:
            self._lifeline.signalled(signal_number)

    def _act(self, trainer: pl.Trainer) -> None:
        due, self._noted = self._noted if self._lifeline is None else self._lifeline.passed(), []
        # SIGTERM comes last: nothing is done after it, and what is requeued need not be saved twice.
        for signal_number in sorted(due, key=lambda number: number == signal.SIGTERM):
            if signal_number == signal.SIGTERM:
                self._stop(trainer)
            elif not self._requeued:
                self._requeued = True
                connector: Any = trainer._signal_connector
                type(connector)._slurm_sigusr_handler_fn(connector, signal_number, None)

    def _stop(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not self._requeued:
            _save(trainer)
        trainer._signal_connector.received_sigterm = True
        # Lightning's launcher would take the ends of the other ranks for failures, and kill this one before its own.
        getattr(trainer.strategy.launcher, "procs", []).clear()
        raise SIGTERMException(0 if self._requeued else 128 + signal.SIGTERM)


def _save(trainer: pl.Trainer) -> None:
    savers: list[Any] = trainer.checkpoint_callbacks
    if any(isinstance(saver, OnExceptionCheckpoint) or getattr(saver, "save_on_exception", False) for saver in savers):
        return  # they do it when they hear of the exception
    if savers:
        path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
        trainer.save_checkpoint(path)
        rank_zero_info(f'SIGTERM: {path} is saved. `fit(ckpt_path="hpc")` goes on from there.')
