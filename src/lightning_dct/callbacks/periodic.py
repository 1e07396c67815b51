"""What happens every so many optimizer steps, on the same step on every rank: new thresholds, averaged residuals."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_dct.activations import CompressedModule
from lightning_dct.callbacks.requirements import gradient_synchronizer_of, require_dct, synchronizer_of
from lightning_dct.config import check_integer


class ThresholdRefresh(pl.Callback):
    """Refresh the thresholds periodically (Gupta et al., KDD 2021, section 3).

    Steps are counted as completed synchronisations: one for each optimizer step, whatever ``accumulate_grad_batches``
    is and however many optimizers there are. The count is saved with the checkpoint, so a resumed run refreshes on the
    same steps as an uninterrupted one.

    ``DCTStrategy`` adds this callback with its own ``refresh_every`` if the Trainer has none. A callback of the user
    takes precedence over that setting.

    Args:
        every_n_steps: Optimizer steps from one refresh to the next, at least 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        check_integer("ThresholdRefresh(every_n_steps)", every_n_steps, minimum=1)
        self.every_n_steps = every_n_steps

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies without thresholds.

        Raises:
            MisconfigurationException: The Trainer's strategy is not one of this package's.
        """
        require_dct(trainer, self)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Request a refresh when one is due; the next synchronisation performs it."""
        synchronizer = synchronizer_of(trainer)
        for module in pl_module.modules():
            if isinstance(module, CompressedModule):
                module.advance(synchronizer.synchronisations)
        if synchronizer.steps_since_refresh >= self.every_n_steps:
            synchronizer.request_refresh()


class ErrorAveraging(pl.Callback):
    """Average residuals over the ranks (Xu and Huang, *Step-Ahead Error Feedback*, AAAI 2021, section 4).

        e_r  =  (1/W) * sum over ranks of e        every ``every_n_steps`` optimizer steps

    Ranks whose residuals have grown apart send different entries. An entry that one rank alone sends moves the weights
    by only ``1 / W`` of its value. The model receives the same in the end, because residuals enter it as their mean.
    With ``exchange="by_node"`` the nodes, which send as one, average their residuals. With ``"sharded"`` the residuals
    of owned sums stay as they are, because each has one holder.

    The average is a dense all-reduce of the compressed tensors, counted as traffic: at 1% density, bf16 and two ranks,
    one in 1000 steps adds an eighth to the bytes.

    Args:
        every_n_steps: Optimizer steps from one average to the next, at least 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        check_integer("ErrorAveraging(every_n_steps)", every_n_steps, minimum=1)
        self.every_n_steps = every_n_steps
        self._synchronised_before = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that exchange no gradients."""
        require_dct(trainer, self, gradients=True)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the step."""
        self._synchronised_before = gradient_synchronizer_of(trainer).synchronisations

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average when it is due; a collective call."""
        synchronizer, every = gradient_synchronizer_of(trainer), self.every_n_steps
        if synchronizer.synchronisations // every > self._synchronised_before // every:
            synchronizer.average_residuals()
