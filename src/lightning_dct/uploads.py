"""Says, before a run is lost, that a logger uploads checkpoints without the folders that lie beside them."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_warn


def warn_of_uploads(loggers: Iterable[Logger]) -> None:
    """Warn of loggers that upload checkpoints, which take single files.

    The folder does not go along here either: with several nodes each has a part of it only, on a disk of its own.

    Args:
        loggers: The Trainer's. Lightning's for W&B, MLflow and Lightning AI note ``log_model`` under one name.
    """
    for logger in loggers:
        if getattr(logger, "_log_model", False):
            name = type(logger).__name__
            rank_zero_warn(
                f"`{name}(log_model=...)` uploads each checkpoint `x.ckpt` as one file, without the folder `x.ckpt.dct`"
                " beside it. Upload the folder as well before the machine is gone, for W&B with"
                " `artifact.add_dir('x.ckpt.dct', name='model.ckpt.dct')`, and put it beside the checkpoint to resume."
                " Without it a run goes on only with `missing_state='reset'`, which loses what the ranks held back, and"
                " the rows of sharded tables are lost."
            )
