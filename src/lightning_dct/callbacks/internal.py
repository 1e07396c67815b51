"""Callbacks that a strategy adds itself: for failures and signals, the view of shared weights, and
evaluations.
"""

import signal
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dct import lightning_private as private
from lightning_dct.activations.module import modules_of
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.failures.lifeline import Lifeline
from lightning_dct.strategy_protocols import strategy_of, synchronizer_of, updates_of
from lightning_dct.sync.views import View

AVERAGING = (StochasticWeightAveraging, WeightAveraging)
PATIENCE_S = 10.0  # for the others to finish training
# Hooks that Lightning calls in every training step.
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_INNER_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class InternalCallback(pl.Callback):
    """A callback that a strategy adds. Hooks that it does not define take no time.

    Lightning enters a profiler for every hook of every callback, also an empty one, which takes a
    tenth of a small model's step. It skips hooks that are not callable.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in (*_BATCH_HOOKS, *_INNER_HOOKS):
            if getattr(cls, hook) is getattr(pl.Callback, hook):
                setattr(cls, hook, None)


class FailureNotice(InternalCallback):
    """Report an exception on one rank, and its end of training, to all others.

    Other callbacks save a checkpoint on an exception, which takes all ranks. Without the report, a
    rank that fails alone and the other ranks would wait for each other. So would ranks with uneven
    batches when the first of them has no more.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that all ranks begin an epoch after the same number of steps: a rank that lacks a
        batch would be ahead from now on.
        """
        strategy_of(trainer).check_order(
            f"epoch {trainer.current_epoch}", detail=synchronizer_of(trainer).synchronisations
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the others, which must come to the end too.

        This comes after updates in flight have arrived, because another rank may wait for them. It
        does not wait long: another rank may be in a collective of the user's, which ends when this
        rank does.
        """
        strategy = strategy_of(trainer)
        strategy.check_order("the end of training", patience_s=0.0)
        if strategy.updates is not None:
            strategy.updates.apply_all()
        strategy.check_order("the end of training with nothing in flight", patience_s=PATIENCE_S)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Report the exception."""
        if (lifeline := strategy_of(trainer).lifeline) is not None:
            lifeline.report(exception)


class SignalsAfterStep(InternalCallback):
    """Act on SIGTERM, and on SLURM's signal to requeue, at the end of the step in which any rank
    has received one.

    Lightning acts inside the signal's handler, at different points on different ranks. Their saved
    states then do not fit each other, and ranks in different collectives wait for each other
    forever. Here the handler only records the signal, lifelines send it to all ranks, and all ranks
    act together:

    * On SIGTERM they save and end with exit status 143, or 0 if the job has been requeued.
      Callbacks that save on an exception do so. Without any, but with another that saves
      checkpoints, all ranks save Lightning's ``hpc_ckpt_N.ckpt`` in ``default_root_dir``, from
      which ``fit(ckpt_path="hpc")`` continues.
    * On SLURM's signal they do what Lightning would, once.

    In ``validate``, ``test`` and ``predict`` they act at the end of a batch and save nothing. A job
    needs enough time for one more step, and for a validation that is due.
    """

    def __init__(self) -> None:
        self._lifeline: Lifeline | None = None
        self._received: list[int] = []
        self._requeued = False
        self._step = (0, 0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have Lightning register a handler that records signals; Lightning removes it when the run
        ends.
        """
        self._lifeline = lifeline = strategy_of(trainer).lifeline
        self._received = []
        if lifeline is not None:
            private.handle_signals(
                trainer, lambda number, _: lifeline.signalled(number), are_carried=True
            )
        elif trainer.world_size == 1:  # several ranks that cannot agree leave it to Lightning
            private.handle_signals(
                trainer, lambda number, _: self._received.append(number), are_carried=False
            )

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

    def _act(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        due = self._received if self._lifeline is None else self._lifeline.passed()
        self._received = []
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
    """Lightning's count of steps and the strategy's, which includes those of
    `optimizers(use_pl_optimizer=False)`.
    """
    return trainer.global_step, synchronizer_of(trainer).synchronisations


def _save(trainer: pl.Trainer) -> None:
    savers: list[Any] = trainer.checkpoint_callbacks
    if any(
        isinstance(saver, OnExceptionCheckpoint) or getattr(saver, "save_on_exception", False)
        for saver in savers
    ):
        return  # they save when they see the exception
    if savers:
        path = private.signal_checkpoint_path(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(f'SIGTERM: {path} is saved. `fit(ckpt_path="hpc")` continues from it.')


class SharedWeightsView(InternalCallback):
    """Show the shared weights to validation, weight averaging, the user's hooks and everything
    after fit.

    It is the first of all callbacks if updates are exchanged. It opens the view when a batch, an
    epoch or training ends and when an epoch or a batch starts, for the hooks of callbacks and of
    the LightningModule. The strategy closes the view just before ``training_step``. The model holds
    the rank's own weights from there to the end of the optimizer step. Around a validation the view
    opens before Lightning's first hook, which puts the model into eval mode, and closes after the
    last: modules merge or swap weights there. A callback sets ``reads_weights = False`` in its
    class if its hooks of a batch leave weights alone.
    """

    reads_weights = False

    def __init__(self) -> None:
        # Set only if a hook may read weights then, because a view copies and compares all weights.
        self.on_train_batch_start: Any = None
        self.on_train_batch_end: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out whether a hook reads weights when a batch starts or ends."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        reads = any(is_overridden(hook, pl_module) for hook in _BATCH_HOOKS) or any(
            map(_reads_weights, callbacks)
        )
        self.on_train_batch_start = self.on_train_batch_end = self._open if reads else None

    def _open(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        updates_of(trainer).views.open(View.HOOKS)

    on_train_epoch_start = on_train_epoch_end = _open

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the view before a validation, and close it after."""
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        # The instance's attributes hide the methods of the class. No callback is called as early,
        # or as late.
        loop.on_run_start = partial(_begin, loop)
        loop.on_run_end = partial(_end, loop)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply updates in flight, so that the final weights have them, and open the view."""
        updates = updates_of(trainer)
        updates.apply_all()
        updates.views.open(View.END, updates.exchange_buffers)


def _begin(loop: Any) -> None:
    strategy_of(loop.trainer).check_order("a validation")
    updates = updates_of(loop.trainer)
    updates.views.open(View.EVALUATION, updates.exchange_buffers)
    type(loop).on_run_start(loop)
    updates.check_parameters_alike()


def _end(loop: Any) -> Any:
    results = type(loop).on_run_end(loop)
    updates_of(loop.trainer).views.close(View.EVALUATION)
    return results


def _reads_weights(callback: Callback) -> bool:
    if isinstance(callback, AVERAGING):
        return True
    if not getattr(callback, "reads_weights", True):
        return False
    # As `LambdaCallback` sets them.
    if any(callable(vars(callback).get(hook)) for hook in _BATCH_HOOKS):
        return True
    known = type(callback).__module__.startswith(("lightning.pytorch.", "lightning_dct."))
    return not known and any(
        getattr(type(callback), hook) is not getattr(Callback, hook) for hook in _BATCH_HOOKS
    )


class EvaluationJoin(InternalCallback):
    """Let ranks with unequal numbers of batches validate, test and predict with sharded embedding
    tables.

    After its last batch a rank answers the others until all are done. This comes before Lightning
    reduces logged values, which takes all ranks. A rank without any batch, on which Lightning runs
    no loop, answers when the stage is torn down.
    """

    def __init__(self) -> None:
        self._is_due = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """An evaluation outside fit ends in one round of answers."""
        self._is_due = stage != "fit"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation within fit ends in one round of answers, too."""
        self._is_due = True

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Answer after the last batch."""
        if private.is_last_of_evaluation(trainer):
            self._finish(trainer, pl_module)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str = "") -> None:
        if self._is_due:
            self._is_due = False
            for module in modules_of(pl_module, ShardedEmbeddingBags).values():
                module.finish_evaluation()  # of all the model's tables together
                return

    # Lightning may not know which batch is the last, and a rank may have no batch at all.
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = teardown = _finish
