"""Callbacks for a rank that fails or receives a signal: all ranks end, or act on the signal, together."""

import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dct import lightning_private as private
from lightning_dct.callbacks.requirements import InternalCallback

# How long a rank that has finished training waits for the others to finish.
PATIENCE_S = 10.0


class FailureNotice(InternalCallback):
    """Report an exception on one rank, and its end of training, to all others.

    Other callbacks save a checkpoint on an exception, which takes all ranks. Without the report, a rank that fails
    alone and the other ranks would wait for each other. So would ranks with uneven batches when the first of them has
    no more. ``DCTStrategy`` adds this callback, before all others.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin an epoch after as many steps as the others: a rank that lacks a batch would be ahead from now on."""
        strategy: Any = trainer.strategy
        strategy.come_to(f"epoch {trainer.current_epoch}", detail=strategy.synchronizer.synchronisations)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the others, which must come to the end too.

        This comes after updates in flight have arrived, because another rank may wait for them. It does not wait long:
        another rank may be in a collective of the user's, which ends when this rank does.
        """
        strategy: Any = trainer.strategy
        strategy.come_to("the end of training", patience_s=0.0)
        if strategy.updates is not None:
            strategy.updates.apply_all()
        strategy.come_to("the end of training with nothing in flight", patience_s=PATIENCE_S)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Report the exception."""
        strategy: Any = trainer.strategy
        if strategy.lifeline is not None:
            strategy.lifeline.report(exception)


class SignalsAfterStep(InternalCallback):
    """Act on SIGTERM, and on SLURM's signal to requeue, at the end of the step in which any rank has received one.

    Lightning acts inside the signal's handler, at different points on different ranks. Their saved states then do not
    fit each other, and ranks in different collectives wait for each other forever. Here the handler only records the
    signal, lifelines send it to all ranks, and all ranks act together:

    * On SIGTERM they save and end with exit status 143, or 0 if the job has been requeued. Callbacks that save on an
      exception do so. Without any, but with another that saves checkpoints, all ranks save Lightning's
      ``hpc_ckpt_N.ckpt`` in ``default_root_dir``, from which ``fit(ckpt_path="hpc")`` continues.
    * On SLURM's signal they do what Lightning would, once.

    In ``validate``, ``test`` and ``predict`` they act at the end of a batch and save nothing. ``DCTStrategy`` adds this
    callback. A job needs enough time for one more step, and for a validation that is due.
    """

    def __init__(self) -> None:
        self._lifeline: Any = None
        self._received: list[int] = []
        self._requeued = False
        self._step = (0, 0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have Lightning register a handler that records signals; Lightning removes it when the run ends."""
        strategy: Any = trainer.strategy
        self._lifeline, self._received = strategy.lifeline, []
        if self._lifeline is None and trainer.world_size > 1:
            return  # ranks that cannot agree leave it to Lightning
        private.handle_signals(trainer, self._record, are_carried=self._lifeline is not None)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give Lightning its own agreement back."""
        private.restore_agreement_on_signals(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the first step."""
        self._step = _steps_of(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on what is due, unless gradients are being accumulated."""
        if (step := _steps_of(trainer)) != self._step:
            self._step = step
            self._act(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on what is due, unless this is within fit."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._act(trainer)

    def _record(self, signal_number: int, frame: Any) -> None:
        if self._lifeline is None:
            self._received.append(signal_number)
        else:
            self._lifeline.signalled(signal_number)

    def _act(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        due, self._received = self._received if self._lifeline is None else self._lifeline.passed(), []
        # SIGTERM comes last: nothing follows it, and a requeued job need not be saved twice.
        for signal_number in sorted(due, key=lambda number: number == signal.SIGTERM):
            if signal_number == signal.SIGTERM:
                if trainer.state.fn == TrainerFn.FITTING and not self._requeued:
                    _save(trainer)
                private.end_on_sigterm(trainer)
                raise SIGTERMException(0 if self._requeued else 128 + signal.SIGTERM)
            if not self._requeued:
                self._requeued = True
                private.act_on_slurm_signal(trainer, signal_number)

    on_test_batch_end = on_predict_batch_end = _act


def _steps_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Lightning's count of steps, and the strategy's: it alone sees those of `optimizers(use_pl_optimizer=False)`."""
    return trainer.global_step, trainer.strategy.synchronizer.synchronisations  # type: ignore[attr-defined]


def _save(trainer: pl.Trainer) -> None:
    savers: list[Any] = trainer.checkpoint_callbacks
    if any(isinstance(saver, OnExceptionCheckpoint) or getattr(saver, "save_on_exception", False) for saver in savers):
        return  # they save when they see the exception
    if savers:
        path = private.signal_checkpoint_path(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(f'SIGTERM: {path} is saved. `fit(ckpt_path="hpc")` continues from it.')
