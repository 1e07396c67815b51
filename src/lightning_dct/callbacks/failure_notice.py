"""Tells the other ranks that this one is failing, before anything else is done about the failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import lightning.pytorch as pl

from lightning_dct.callbacks.requirements import InternalCallback

if TYPE_CHECKING:
    from lightning_dct.strategy import DCTStrategy


class FailureNotice(InternalCallback):
    """Tells all ranks of an exception on one of them; ``DCTStrategy`` adds this callback, before all others.

    Other callbacks save a checkpoint when an exception is raised, which takes all ranks: one that fails alone would
    wait for the others, and they for it.
    """

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell them."""
        lifeline = cast("DCTStrategy", trainer.strategy).lifeline
        if lifeline is not None:
            lifeline.report(exception)
