"""Prepares evaluations: they see the shared weights, and ranks without further batches answer the others."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dct.activations.module import modules_of
from lightning_dct.callbacks.requirements import AVERAGING, InternalCallback
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.lightning_private import is_last_of_evaluation

_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class SharedWeightsView(InternalCallback):
    """Show the shared weights to validation, weight averaging, the user's hooks and everything after fit.

    A strategy adds it before all other callbacks if updates are exchanged. It opens the view when a batch, an epoch or training ends and
    when an epoch or a batch starts, for the hooks of callbacks and of the LightningModule. The strategy closes the view
    just before ``training_step``. The model holds the rank's own weights from there to the end of the optimizer step.
    Around a validation the view opens before Lightning's first hook, which puts the model into eval mode, and closes
    after the last: modules merge or swap weights there.
    A callback sets ``reads_weights = False`` in its class if its hooks of a batch leave weights alone.
    """

    reads_weights = False

    def __init__(self) -> None:
        # Set only if a hook may read weights then, because a view copies and compares all weights.
        self.on_train_batch_start: Any = None
        self.on_train_batch_end: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out whether a hook reads weights when a batch starts or ends."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        reads = any(is_overridden(hook, pl_module) for hook in _BATCH_HOOKS) or any(map(_reads_weights, callbacks))
        self.on_train_batch_start = self.on_train_batch_end = self._open if reads else None

    def _open(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        trainer.strategy.updates.weights.show()  # type: ignore[attr-defined]

    on_train_epoch_start = on_train_epoch_end = _open

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have validations begin and end in the view."""
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        # The instance's attributes hide the methods of the class. No callback is called as early, or as late.
        loop.on_run_start, loop.on_run_end = partial(_begin, loop), partial(_end, loop)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply updates in flight, so that the final weights have them, and open the view."""
        strategy: Any = trainer.strategy
        strategy.updates.apply_all()
        strategy.updates.begin_evaluation()


def _begin(loop: Any) -> None:
    strategy = loop.trainer.strategy
    strategy.come_to("a validation")
    strategy.updates.begin_evaluation()
    type(loop).on_run_start(loop)
    strategy.updates.check_alike()


def _end(loop: Any) -> Any:
    results = type(loop).on_run_end(loop)
    loop.trainer.strategy.updates.end_evaluation()
    return results


def _reads_weights(callback: Callback) -> bool:
    if isinstance(callback, AVERAGING):
        return True
    if not getattr(callback, "reads_weights", True):
        return False
    if any(callable(vars(callback).get(hook)) for hook in _BATCH_HOOKS):  # as `LambdaCallback` sets them
        return True
    known = type(callback).__module__.startswith(("lightning.pytorch.", "lightning_dct."))
    return not known and any(getattr(type(callback), hook) is not getattr(Callback, hook) for hook in _BATCH_HOOKS)


class EvaluationJoin(InternalCallback):
    """Let ranks with unequal numbers of batches validate, test and predict with sharded embedding tables.

    After its last batch a rank answers the others until all are done. This comes before Lightning reduces logged
    values, which takes all ranks. A rank without any batch, on which Lightning runs no loop, answers when the stage is
    torn down. ``DCTStrategy`` adds this callback, before all others.
    """

    def __init__(self) -> None:
        self._is_due = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """An evaluation outside fit ends in one round of answers."""
        self._is_due = stage != "fit"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """So does a validation within fit."""
        self._is_due = True

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        """Answer after the last batch."""
        if is_last_of_evaluation(trainer):
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
