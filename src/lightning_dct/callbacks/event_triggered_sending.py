"""Steps that send nothing, until what is held back has grown large enough to be worth sending."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dct.callbacks.requirements import gradient_synchronizer_of, require_dct
from lightning_dct.config import check_integer, check_positive
from lightning_dct.gradients.between_steps import decide_to_hold_back
from lightning_dct.gradients.holding import Holding


class EventTriggeredSending(pl.Callback):
    """Sends when the residual's norm has passed a bound (after SPARQ-SGD; Singh et al., CDC 2020, algorithm 1, line 7).

        send in step t + 1    if    sum over ranks of |e_t|^2  >=  bound^2 * sum over ranks of |g_t|^2

    ``e`` is what a rank holds back, ``g`` its gradient of the step. In a step that does not send, the gradient joins
    the residual, and the weights stay as they are: the optimizer does not step, nothing is clipped, and
    ``on_before_optimizer_step`` is not called. Learning-rate schedules and ``trainer.global_step`` go on. SPARQ-SGD's
    ranks step on their own between two exchanges; here replicas stay equal, as checkpoints, validation and BatchNorm
    expect, so a step without sending is a part of a larger batch.

    Deciding takes an all-reduce of 16 bytes a step, which is counted as traffic, and one pass over the gradients and
    what is held back.

    Args:
        bound: Norm of what is held back, in norms of a gradient, from which on it is sent. Where every step
            sends 3%, residuals of the language model in ``experiments/`` are about 2 gradients large.
        at_most: Steps in a row that may send nothing, at least 1.
    """

    def __init__(self, bound: float, at_most: int = 8) -> None:
        check_positive("EventTriggeredSending(bound)", bound)
        check_integer("EventTriggeredSending(at_most)", at_most, minimum=1)
        self.bound, self.at_most = bound, at_most
        self._holding = Holding()
        self._steps_before = 0
        self._decided, self._held_back = 0, 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what does not go through residuals, or has to be undone."""
        require_dct(trainer, self, replicas=True, gradients=True)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise MisconfigurationException(
                "`EventTriggeredSending` does not work with a loss scaler, whose skipped steps it could not undo. Use"
                " `precision='bf16-mixed'` instead of `'16-mixed'`."
            )
        if trainer.strategy.sharded_tables():  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "`EventTriggeredSending` does not work with `ShardedEmbeddingBags`, whose gradients travel in every"
                " step and would not be stepped with. Remove the callback."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have gradients measured, and take up the decision of a checkpoint."""
        gradient_synchronizer_of(trainer).holding = self._holding

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember how many steps there have been."""
        self._steps_before = gradient_synchronizer_of(trainer).traffic.totals.steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide about the next step; a collective call."""
        synchronizer = gradient_synchronizer_of(trainer)
        if synchronizer.traffic.totals.steps > self._steps_before:
            self._decided += 1
            self._held_back += decide_to_hold_back(synchronizer, self.bound, self.at_most)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say how often nothing was sent."""
        rank_zero_info(f"EventTriggeredSending: nothing was sent after {self._held_back} of {self._decided} steps.")

    def state_dict(self) -> dict[str, Any]:
        """What was decided, the same on every rank."""
        return {"back": self._holding.back, "in_a_row": self._holding.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with what was decided."""
        self._holding.back, self._holding.in_a_row = state_dict["back"], state_dict["in_a_row"]
