"""Callbacks that change a run while it goes on: its thresholds, its density, or the rows of its
tables.
"""

import math
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, float64, int32, zeros, zeros_like
from torch.optim import Optimizer

from lightning_dct.activations.module import modules_of
from lightning_dct.config import check_density, check_integer
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.pruning import INDEX_BYTES_A_ROW, PIECES, prune
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.strategy_protocols import TrainerStrategy, strategy_of, synchronizer_of
from lightning_dct.sync.setup import parameter_names
from lightning_dct.sync.shared_weights import as_real


class DCTCallback(Callback):
    """A callback that works with the strategies of this package only."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other strategies, with a MisconfigurationException."""
        strategy = trainer.strategy
        if not hasattr(strategy, "synchronizer"):
            raise MisconfigurationException(
                f"`{type(self).__name__}` needs `Trainer(strategy='dct')` or a `DCTStrategy`; this"
                f" Trainer's strategy is {type(strategy).__name__}. Change the strategy or remove"
                " the callback."
            )


class ThresholdRefresh(DCTCallback):
    """Refresh the thresholds periodically (Gupta et al., KDD 2021, section 3).

    Steps are counted as completed synchronisations: one for each optimizer step, whatever
    ``accumulate_grad_batches`` is and however many optimizers there are. The count is saved with
    the checkpoint, so a resumed run refreshes on the same steps as an uninterrupted one.

    ``DCTStrategy`` adds this callback with its own ``refresh_every`` if the Trainer has none. A
    callback of the user takes precedence over that setting.

    Args:
        every_n_steps: Optimizer steps from one refresh to the next, at least 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        check_integer("ThresholdRefresh(every_n_steps)", every_n_steps, minimum=1)
        self.every_n_steps = every_n_steps

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Request a refresh when one is due; the next synchronisation performs it."""
        synchronizer = synchronizer_of(trainer)
        for module in strategy_of(trainer).activation_modules:
            module.advance(synchronizer.synchronisations)
        if synchronizer.steps_since_refresh >= self.every_n_steps:
            synchronizer.request_refresh()


class AccordionSchedule(DCTCallback):
    """Choose between two densities by critical learning regimes.

    Agarwal et al., *Adaptive Gradient Communication via Critical Learning Regime Identification*,
    MLSys 2021, algorithm 1. ``D`` is the sum of the synchronised gradients over an interval. With
    updates, whose gradients are each rank's own, it is what the shared weights have moved by. The
    next interval is critical, and sends at the density ``high``, when

        | |D_previous| - |D| |  >=  threshold * |D_previous|        or the learning rate drops

    and sends at ``low`` otherwise. The first two are critical. The paper decides for each layer,
    this callback for the whole model. A drop of the learning rate is at least the share
    ``threshold`` between the beginnings of two intervals, so that a slowly falling rate does not
    keep every interval critical.

    All ranks have the same gradients and shared weights, so they decide alike without
    communication. An interval should be many times ``1 / low`` exchanges long, because a residual
    arrives in a later interval. The callback keeps a copy of the model's size, and so do
    checkpoints.

    Args:
        low: Density outside critical intervals, in (0, 1].
        high: Density in critical intervals, at least ``low``.
        threshold: Smallest relative change of the norm that makes an interval critical, in (0, 1).
        every_n_steps: Optimizer steps in an interval; None for an epoch.
    """

    reads_weights = False

    def __init__(
        self, low: float, high: float, threshold: float = 0.5, every_n_steps: int | None = None
    ) -> None:
        check_density("AccordionSchedule(low)", low)
        check_density("AccordionSchedule(high)", high)
        if low > high:
            raise ValueError(
                f"`AccordionSchedule` has low={low}, high={high}. `low` must not be above `high`."
            )
        if not 0.0 < threshold < 1.0:
            raise ValueError(
                f"`AccordionSchedule(threshold)` must be in (0, 1), such as 0.5; got {threshold!r}."
            )
        if every_n_steps is not None:
            check_integer("AccordionSchedule(every_n_steps)", every_n_steps, minimum=1)
        self.low = low
        self.high = high
        self.threshold = threshold
        self.every_n_steps = every_n_steps
        self.density = high
        # The beginning of this interval, in steps or epochs (-1 before the first), and the learning
        # rates there.
        self._begun = -1
        self._rates: list[float] = []
        self._previous_norm: float | None = None
        # Of this interval, by name: the sum of the gradients, or the shared weights at its
        # beginning.
        self._kept: dict[str, Tensor] = {}
        self._synchronised_before = 0

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Refuse strategies that do not exchange the whole model between all ranks."""
        super().setup(trainer, module, stage)
        if getattr(trainer.strategy, "stages", 1) > 1:
            raise MisconfigurationException(
                "`AccordionSchedule` decides by the whole model, and each rank of a pipeline or of"
                " a sharded replica has a part of it. Use a `DCTStrategy`, or remove the callback."
            )

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin with the density of this interval."""
        strategy_of(trainer).set_density(self.density)
        self._begun = self._begun if self._begun <= self._now(trainer) else -1  # in an earlier fit

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int
    ) -> None:
        """Begin the next interval when one is over."""
        strategy = strategy_of(trainer)
        self._synchronised_before = synchronizer_of(trainer).synchronisations
        now = self._now(trainer)
        if self._begun >= 0 and now - self._begun < (self.every_n_steps or 1):
            return
        rates = [
            float(group["lr"])
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]
        moved = dict(self._kept)
        shared = _shared_weights(strategy)
        if self._begun >= 0:
            for name in moved.keys() & shared.keys():
                moved[name] = shared[name] - moved[name].to(shared[name].device)
            before = self._previous_norm
            self._previous_norm = math.hypot(
                *(float(as_real(one).norm(dtype=float64)) for one in moved.values())
            )
            settled = (
                before is not None and abs(before - self._previous_norm) < self.threshold * before
            )
            least = 1.0 - self.threshold
            dropped = any(
                now <= least * then for now, then in zip(rates, self._rates, strict=False) if then
            )
            self.density = self.low if settled and not dropped else self.high
            if strategy.config.density != self.density:
                strategy.set_density(self.density)
        self._begun = now
        self._rates = rates
        self._kept = {name: weights.clone() for name, weights in shared.items()}

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the synchronised gradients to the interval's sum, unless a loss scaler skips the
        step.
        """
        if (
            strategy_of(trainer).updates is not None
            or synchronizer_of(trainer).synchronisations == self._synchronised_before
        ):
            return
        names = parameter_names(module)
        for parameter in (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ):
            # Sparse gradients are not compressed, and those of sharded tables differ between ranks.
            if (gradient := parameter.grad) is not None and not gradient.is_sparse:
                name = names[parameter]
                before = self._kept.get(name, zeros_like(gradient).float())
                self._kept[name] = before.to(gradient.device).add_(gradient)

    def state_dict(self) -> dict[str, Any]:
        """The density, and what this and the next decision are based on; the same on every rank."""
        return {
            "density": self.density,
            "begun": self._begun,
            "rates": self._rates,
            "previous_norm": self._previous_norm,
            "kept": {name: tensor.cpu() for name, tensor in self._kept.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a saved state."""
        self.density = state_dict["density"]
        self._begun = state_dict["begun"]
        self._rates = list(state_dict["rates"])
        self._previous_norm = state_dict["previous_norm"]
        self._kept = dict(state_dict["kept"])

    def _now(self, trainer: Trainer) -> int:
        return trainer.current_epoch if self.every_n_steps is None else _completed_steps(trainer)


def _shared_weights(strategy: TrainerStrategy) -> dict[str, Tensor]:
    """The weights that all ranks share, by name; none with gradients."""
    weights = None if strategy.updates is None else strategy.updates.weights
    return {} if weights is None else {name: weights.shared(name) for name in weights.parameters}


class EmbeddingPruning(DCTCallback):
    """Prune the rows of all :class:`~lightning_dct.ShardedEmbeddingBags` once, in the middle of
    training.

    Each rank keeps those quarters of its rows that matter most. The score of a quarter is how often
    its row was requested, times the squared distance from its initial value (after Luo et al.,
    arXiv 2401.04408). All others go back to their initial values, which take no memory, and are not
    trained any more. The optimizer's state shrinks with the rows: ``weight`` then has the shape
    ``[kept quarters, embedding_dim / 4]``, and ``RowWiseAdagrad`` has one number for each. Until
    then each row takes four more bytes, for the count of its requests.

    Tables in which most rows are rare can lose most of their bytes. Compare your model's metric
    with and without: docs/recommender.md has figures.

    Args:
        keep: Share of the rows' bytes that each rank keeps, in (0, 1], with 1.5 bytes a row to find
            what is kept.
        at_step: The optimizer step after which rows are pruned: best about half of the run.

    Raises:
        MisconfigurationException: There is nothing to prune, rows cannot be cut into quarters, or
            the step has passed.
    """

    def __init__(self, keep: float = 0.35, at_step: int = 1000) -> None:
        check_density(
            "EmbeddingPruning(keep)",
            keep,
            "the share of the rows' bytes that is kept",
            "To keep all that has changed",
        )
        check_integer("EmbeddingPruning(at_step)", at_step, minimum=1)
        self.keep = keep
        self.at_step = at_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count requests, unless a checkpoint has brought counts or pruned rows."""
        tables = _tables_of(pl_module)
        if not tables:
            raise MisconfigurationException(
                "`EmbeddingPruning` needs `ShardedEmbeddingBags` in the model, and there are none."
                " Growing tables are not pruned: set their `max_rows` instead."
            )
        for name, module in tables.items():
            if module.embedding_dim % PIECES:
                raise MisconfigurationException(
                    f"`EmbeddingPruning` cuts rows into {PIECES} pieces, and {name!r} has rows of"
                    f" {module.embedding_dim} entries: choose an `embedding_dim` that {PIECES}"
                    " divides."
                )
            row_bytes = module.embedding_dim * module.weight.element_size()
            if self.keep * row_bytes <= INDEX_BYTES_A_ROW:
                raise MisconfigurationException(
                    f"`EmbeddingPruning(keep={self.keep})` leaves {self.keep * row_bytes:.1f} bytes"
                    f" for each row of {name!r}, and the index of what is kept takes"
                    f" {INDEX_BYTES_A_ROW} of them: raise `keep`."
                )
            if module.kept is not None or module.row_requests is not None:
                continue
            if _completed_steps(trainer) >= self.at_step:
                raise MisconfigurationException(
                    f"`EmbeddingPruning(at_step={self.at_step})` cannot choose what to keep,"
                    f" because this run is at step {_completed_steps(trainer)} already and has"
                    " counted no requests. Raise `at_step`."
                )
            module.row_requests = zeros(module.capacity(), dtype=int32)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Prune if it is time."""
        if _completed_steps(trainer) < self.at_step:
            return
        for name, module in _tables_of(pl_module).items():
            if module.kept is None:
                left = prune(module, self.keep, trainer.optimizers)
                rank_zero_info(
                    f"Step {_completed_steps(trainer)}: rank 0 keeps {left:.1%} of the bytes of"
                    f" {name!r}."
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if it was not time in the whole run."""
        if _completed_steps(trainer) < self.at_step:
            rank_zero_warn(
                f"`EmbeddingPruning(at_step={self.at_step})` has pruned nothing: the run has ended"
                f" at step {_completed_steps(trainer)}. Lower `at_step`."
            )


def _tables_of(model: LightningModule) -> dict[str, ShardedEmbeddingBags]:
    found = modules_of(model, ShardedEmbeddingBags)
    return {
        name: module
        for name, module in found.items()
        if not isinstance(module, GrowingEmbeddingBags)
    }


def _completed_steps(trainer: Trainer) -> int:
    return synchronizer_of(trainer).synchronisations
