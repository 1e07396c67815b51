"""Shares the entries that are sent out over the tensors, by where they are needed, every so many optimizer steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_dct.callbacks.requirements import require_dct, synchronizer_of
from lightning_dct.config import check_integer
from lightning_dct.gradients.between_steps import count_tails, share_out_by_tails, tails_are_counted


class DensityByNeed(pl.Callback):
    """Gives more to tensors of which more entries are far above their root mean square, for the same bytes.

    The number of entries is that which the densities of the settings give; see :mod:`lightning_dct.gradients.tails` for
    how they are shared out. It takes a refresh of all thresholds and an all-reduce of 257 counts a tensor, which is
    counted as traffic. Between two such refreshes, and while warm-up lasts, nothing changes. The shares are saved with
    checkpoints.

    Args:
        every_n_steps: Optimizer steps from one sharing out to the next, at least 1.
        bound: No tensor gets more than so many times its own share, or less than one part in so many of it.
    """

    def __init__(self, every_n_steps: int = 1000, bound: int = 4) -> None:
        check_integer("DensityByNeed(every_n_steps)", every_n_steps, minimum=1)
        check_integer("DensityByNeed(bound)", bound, minimum=1)
        self.every_n_steps, self.bound = every_n_steps, bound
        self._factors: dict[str, float] = {}
        # How many synchronisations there had been before the one that was counted last.
        self._last = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies without densities, and pipelines, whose ranks have different tensors."""
        require_dct(trainer, self, replicas=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take up the shares of a checkpoint."""
        synchronizer = synchronizer_of(trainer)
        self._last = min(self._last, synchronizer.synchronisations)
        synchronizer.scale_densities(self._factors)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Have the next synchronisation counted when it is time."""
        synchronizer = synchronizer_of(trainer)
        if synchronizer.synchronisations - self._last >= self.every_n_steps and not synchronizer.warming_up:
            count_tails(synchronizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Share entries out by what has been counted; a collective call."""
        synchronizer = synchronizer_of(trainer)
        if tails_are_counted(synchronizer):
            self._factors = share_out_by_tails(synchronizer, self.bound)
            self._last = synchronizer.synchronisations - 1

    def state_dict(self) -> dict[str, Any]:
        """The shares, the same on every rank."""
        return {"factors": dict(self._factors), "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with saved shares."""
        self._factors, self._last = dict(state_dict["factors"]), state_dict["last"]
