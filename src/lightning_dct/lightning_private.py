"""All that this package uses of Lightning's private parts (2.6) from outside, where no public hook
lies.

A strategy also inherits private attributes and overrides private methods, which its own file shows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.model_parallel import _load_checkpoint

# How Fabric accumulates gradients; and the mark by which Lightning knows a folder of a distributed
# checkpoint.
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME

__all__ = ["METADATA_FILENAME", "BackwardSyncControl"]
SIGNAL_CHECKPOINT = "hpc_ckpt_"  # how Lightning's checkpoints on a signal begin
_AGREEMENT = "_broadcast_sigterm_tensor"


def load_shards(
    path: Path, model: Any, optimizers: Sequence[Any], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a sharded model and its optimizers, as ``ModelParallelStrategy`` does, from a path of
    this rank's own.

    The result is what the checkpoint holds beside them.
    """
    state = {"state_dict": model, **{f"optimizer_{n}": one for n, one in enumerate(optimizers)}}
    return _load_checkpoint(
        path=path,
        state=state,
        strict=strict,
        optimizer_states_from_list=True,
        weights_only=weights_only,
    )


def handle_signals(
    trainer: pl.Trainer, handler: Callable[[int, Any], None], are_carried: bool
) -> None:
    """Have Lightning register this handler, which records signals, instead of its own; it removes
    it when the run ends.

    Lightning's handlers start a broadcast or a save in the middle of a step. Before every batch
    Lightning agrees on SIGTERM by a broadcast, which is a round trip. Lifelines carry signals for
    nothing, so then there is no broadcast.
    """
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = handler
    if are_carried:
        setattr(trainer.fit_loop.epoch_loop, _AGREEMENT, lambda: None)


def restore_agreement_on_signals(trainer: pl.Trainer) -> None:
    """Have Lightning broadcast again."""
    trainer.fit_loop.epoch_loop.__dict__.pop(_AGREEMENT, None)


def act_on_slurm_signal(trainer: pl.Trainer, signal_number: int) -> None:
    """Save and requeue, as Lightning's own handler does."""
    connector: Any = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal_number, None)


def end_on_sigterm(trainer: pl.Trainer) -> None:
    """Note that SIGTERM has been received, and have the launcher leave the other ranks alone.

    It would take their ends for failures, and kill its own rank first.
    """
    trainer._signal_connector.received_sigterm = True
    getattr(trainer.strategy.launcher, "procs", []).clear()


def signal_checkpoint_path(trainer: pl.Trainer) -> str:
    """Where Lightning saves on a signal: ``hpc_ckpt_N.ckpt`` in ``default_root_dir``."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What Lightning would write as a checkpoint now."""
    return trainer._checkpoint_connector.dump_checkpoint(False)


def restore_from_agreed(trainer: pl.Trainer, agreed: Callable[[Any], Any]) -> None:
    """Have Lightning restore from the path that ``agreed`` makes of its own choice, None for no
    checkpoint.
    """
    connector: Any = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        type(connector).resume_start(connector, agreed(checkpoint_path), weights_only)

    connector.resume_start = resume_start


def restore_from(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Have Lightning restore from this as from a file: a rank that joins has none."""
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def is_logged(trainer: pl.Trainer) -> bool:
    """Whether this step is logged."""
    return bool(trainer._logger_connector.should_update_logs)


def logged_step(trainer: pl.Trainer) -> int:
    """The number by which Lightning logs this step."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_last_of_evaluation(trainer: pl.Trainer) -> bool:
    """Whether this batch is the last of an evaluation, also within fit; Lightning may not know."""
    loop: Any = trainer._active_loop
    return bool(loop.batch_progress.is_last_batch)
