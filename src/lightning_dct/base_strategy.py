"""The common part of this package's strategies: callbacks, lifelines, exchanges after steps, and
teardown.
"""

import gc
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct.activations.module import module_settings
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.agreement import check_agreement, describe_run, gather_objects
from lightning_dct.callbacks import internal
from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.run_advice import (
    RunAdvice,
    dense_setting,
    notes_on_updates,
    percent,
    run_length,
    share_done,
)
from lightning_dct.callbacks.schedules import EmbeddingPruning, ThresholdRefresh
from lightning_dct.clipping import install_clipping, install_clipping_of_mean, remove_clipping
from lightning_dct.compress.awaited import SPAN, clock_of, recorded
from lightning_dct.config import DCTConfig, check_density
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.lookup import when_backward_ends
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.failures.collective_order import EXCHANGE, IN_FORWARD
from lightning_dct.failures.lifeline import Lifeline, check_lifelines
from lightning_dct.failures.process_group import group_is_made
from lightning_dct.law import (
    SAFETY_FACTOR,
    RunLength,
    RunSettings,
    UserSettings,
    expected_loss,
    steps_needed,
)
from lightning_dct.registration import TRAINER, USE_LIGHTNING, other_trainer_is_there
from lightning_dct.saving import CheckpointedStrategy
from lightning_dct.sync.entrance import StepEntrance, calls_step
from lightning_dct.sync.optimizer_trial import warn_of_late_gradients
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.sync.views import View
from lightning_dct.traffic import Traffic

OUTSIDE_FIT = [(fn, TrainerStatus.RUNNING) for fn in TrainerFn if fn != TrainerFn.FITTING]


class DCTStrategyBase(CheckpointedStrategy):
    """A mixin for one of Lightning's strategies.

    ``lifelines`` is False to disable everything that keeps ranks from waiting for one that has
    died, failed or been signalled. A number is the port at which rank 0 listens.
    """

    # Name of the uncompressed counterpart, for advice.
    dense_rival: ClassVar[str] = "DDP"
    # Message for a run with a single rank.
    when_alone: ClassVar[str] = (
        "A single process (`devices=1`) exchanges nothing. Give `devices=2` or more."
    )
    # Why a callback cannot copy the model; empty if it can.
    not_copied_because: ClassVar[str] = ""
    # Whether each rank has whole parameters, so that their norm is that of the gradient.
    clips_by_norm_of_mean: ClassVar[bool] = False
    # Brings weights back into their bounds.
    project: Callable[[Module], None] | None = None
    _timeout: timedelta | None
    _get_process_group_backend: Callable[[], str]

    def __init__(self, user_settings: UserSettings, lifelines: bool | int, **kwargs: Any) -> None:
        check_lifelines(lifelines)
        self._lifelines = lifelines
        self._in_step = False
        # Whether a step has left parameters without a gradient.
        self.has_unused = False
        self._tables: tuple[ShardedEmbeddingBags, ...] = ()
        # Where optimizer steps begin and end, if updates are exchanged.
        self._entrance: StepEntrance | None = None
        self.user_settings = user_settings
        self.length = RunLength(math.inf)
        super().__init__(**kwargs)

    @property
    def config(self) -> DCTConfig:
        """The settings now: a fit may change them as it goes on."""
        return self.user_settings.config if self.synchronizer is None else self.synchronizer.config

    @property
    def _scaler(self) -> Any:
        """The loss scaler, which may skip steps; None if there is none."""
        return getattr(self.precision_plugin, "scaler", None)

    def __repr__(self) -> str:
        name = type(self).__name__
        settings = f"({self.config})"
        # The Trainer of pytorch_lightning quotes this in an error.
        return (
            f"{name} for the Trainer of `{TRAINER}`. {USE_LIGHTNING}"
            if other_trainer_is_there()
            else name + settings
        )

    def connect(self, model: pl.LightningModule) -> None:
        """Add the callbacks that this strategy needs, unless the user has given them."""
        super().connect(model)
        # Type checkers do not know `callbacks`.
        trainer: Any = self._attached_trainer
        if trainer is None:
            return
        for callback in trainer.callbacks if self.not_copied_because else ():
            if isinstance(callback, internal.AVERAGING):
                raise ValueError(
                    f"`{type(callback).__name__}` does not work with `{type(self).__name__}`: it"
                    f" copies the model, {self.not_copied_because}. Average checkpoints after"
                    " training."
                )
        wanted: list[pl.Callback] = [
            internal.EvaluationJoin(),
            ThresholdRefresh(self.config.refresh_every),
        ]
        if not trainer.barebones:
            wanted += [CompressionMonitor(), RunAdvice()]
        if self._lifelines:
            wanted += [internal.FailureNotice(), internal.SignalsAfterStep()]
        if self.config.compress == "updates":
            wanted.append(internal.SharedWeightsView())
        missing = [
            one
            for one in wanted
            if not any(isinstance(given, type(one)) for given in trainer.callbacks)
        ]
        trainer.callbacks[:] = sorted([*trainer.callbacks, *missing], key=_place_of)

    def setup_environment(self) -> None:
        """Start the processes, then make the rows of embedding tables that each rank owns."""
        with group_is_made(self, self._lifelines, self._timeout):
            super().setup_environment()
        self.lifeline = Lifeline.open(self._lifelines)
        self.agree_on_folders()
        if self.lightning_module is not None:
            # If tables differ, making them would hang.
            check_agreement(module_settings(self.lightning_module), Module(), None)
            self.sharded_tables()

    def setup(self, trainer: pl.Trainer) -> None:
        """Start counting bytes, and give modules that compress activations their counter."""
        if trainer.state.fn == TrainerFn.FITTING:
            clock = clock_of(self.root_device)
            # Without a Trainer's profiler a callback may run torch's.
            profiler: Any = trainer.profiler  # type: ignore[attr-defined]
            of_torch = isinstance(profiler, PassThroughProfiler)
            span = recorded if of_torch else lambda work: profiler.profile(SPAN.format(work))
            self.traffic = Traffic(span, clock)
            self.split_traffic = Traffic(clock=clock)
            self.synchronizer = None
            self.has_unused = False
        # Again, because `configure_model` may have made modules.
        check_agreement(module_settings(self._module), Module(), None)
        modules = self.compressed_modules()
        self.activation_modules = list(modules.values())
        for name, module in modules.items():
            module.name = name
            module.traffic = self.split_traffic
        self._splits = any(isinstance(module, SplitPoint) for module in self.activation_modules)
        tables = self.sharded_tables()
        self._tables = tuple(tables.values())
        if tables and self._scaler is not None:
            raise MisconfigurationException(
                "Sharded embedding tables do not work with a loss scaler: their residuals would be"
                " rescaled in every step. Use `precision='bf16-mixed'` instead of `'16-mixed'`."
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        moves = any(
            isinstance(one, GrowingEmbeddingBags | EmbeddingPruning)
            for one in (*self._tables, *callbacks)
        )
        if moves and any(isinstance(one, internal.AVERAGING) for one in callbacks):
            raise MisconfigurationException(
                "Averages of weights do not work with `GrowingEmbeddingBags` and"
                " `EmbeddingPruning`, whose rows change places: rows of different ids would be"
                " mixed. Remove the callback that averages, or keep the rows in"
                " `ShardedEmbeddingBags` and do not prune them."
            )
        if tables:
            for name, table in tables.items():
                table.exchange_group.check_order = partial(self._check_order_of_rows, name)
            rows = {id(module.weight) for module in tables.values()}
            install_clipping(
                self.precision_plugin,
                self._tables[0].exchange_group.group,
                lambda one: id(one) in rows,
            )
        # The module's callbacks have been added since `connect`.
        callbacks.sort(key=_place_of)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_agreement(describe_run(trainer, self._parameter_names()), Module(), None)

    def on_train_start(self) -> None:
        """Tell updates the length of the run, which is known now and chooses the settings that were
        left out.
        """
        super().on_train_start()
        if self.synchronizer is not None and self.synchronizer.delays_gradients:
            for optimizer in self.optimizers:
                if self.synchronizer.is_stepped_by(optimizer):
                    warn_of_late_gradients(optimizer)
        if (updates := self.updates) is not None:
            self._expect_rest(updates)
            for optimizer in self.optimizers:
                # A forward's writes before the first step are sent, too.
                updates.register(optimizer)
            updates.check_parameters_alike()
            updates.may_skip |= self._scaler is not None
            # Tables and pipelines have put theirs there, over their ranks' parameters.
            if (
                "clip_grad_by_norm" not in vars(self.precision_plugin)
                and self.clips_by_norm_of_mean
            ):
                install_clipping_of_mean(self.precision_plugin, updates.norm_of_mean)
            self._stop_watching()  # a search for a learning rate has begun training before
            self._entrance = StepEntrance(updates)
            self._entrance.watch()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states; in mid-run, after a search for a learning rate, expect the rest of the
        run again.
        """
        super().load_optimizer_state_dict(checkpoint)
        if (updates := self.updates) is not None and updates.run_settings is not None:
            self._expect_rest(updates)

    def _expect_rest(self, updates: UpdateSynchronizer) -> None:
        self.length = self._agreed_length()
        updates.follow(
            RunSettings(self.user_settings, self._ranks_that_exchange(updates), *self.length[:2])
        )

    def _extrapolate_length(self, updates: UpdateSynchronizer, share: float) -> None:
        """Extrapolate the length of the run, and tell it if nothing was known: then a short run is
        told so now.
        """
        run = updates.run_settings
        was_unknown = run is not None and math.isinf(run.steps)
        if was_unknown and math.isfinite(self.length.batches):
            return
        updates.extrapolate_length(share)
        if run is not None and was_unknown and math.isfinite(run.steps) and run.ranks > 1:
            length = RunLength(run.steps, run.unknown)
            for note in notes_on_updates(
                self.user_settings, run.ranks, length, dense_setting(self)
            ):
                rank_zero_info(note)

    def _warn_if_shorter(self, updates: UpdateSynchronizer) -> None:
        """Warn of a run of unknown length that has ended before its settings pay."""
        run = updates.run_settings
        steps = updates.fewest_steps
        if run is None or run.ranks == 1 or not run.grows or math.isfinite(run.steps) or not steps:
            return
        if steps < steps_needed(updates.config, run.ranks):
            loss = SAFETY_FACTOR * expected_loss(updates.config, run.ranks, steps)
            rank_zero_warn(
                f"This run has ended after {steps:,} optimizer steps, and its length was not known,"
                f" so its settings (density={updates.config.density:g}) were those of a longer run:"
                f" the loss may be {percent(loss)} above that of plain DDP. Tell its length by"
                f" `Trainer(max_steps={steps})`."
            )

    def _ranks_that_exchange(self, updates: UpdateSynchronizer) -> int:
        """The number of ranks, or replicas, that exchange with each other: with `process_group`
        some of all.
        """
        return updates.exchange.everyone.size

    def set_density(self, density: float) -> None:
        """Send this share of each tensor's entries from the next exchange on; all ranks call this
        together.

        Callbacks may call it between two optimizer steps of a fit, from ``on_train_start`` on. The
        length of the run no longer chooses the density then. Densities of ``density_per_parameter``
        stay. A checkpoint keeps the density; the next fit begins with the strategy's own settings.
        All ranks must decide alike, so decide from what they share: the step, the learning rate,
        synchronised gradients, shared weights, or values reduced over all ranks.

        Args:
            density: The share, in (0, 1].

        Raises:
            TypeError: It is no number.
            ValueError: It is out of range, or the ranks differ. Raised on every rank.
            RuntimeError: Nothing is trained now, or not all ranks come here.
        """
        check_density("set_density(density)", density)
        if self.synchronizer is None or not self.is_fitting:
            raise RuntimeError(
                "`set_density` changes a fit: call it from `on_train_start` on, before the fit"
                f" ends. Earlier, give `density={density!r}` to the strategy."
            )
        self.check_order("a change of the density")
        check_agreement({"set_density(density)": float(density)}, Module(), None)
        self.synchronizer.set_density(float(density))

    def _agreed_length(self) -> RunLength:
        """The length of the run that the first rank expects.

        Warns if other ranks have more data or less.
        """
        lengths = gather_objects(run_length(self._module.trainer))
        if any(one != lengths[0] for one in lengths):
            each = "; ".join(
                f"rank {rank}: {length.steps:,.0f}" for rank, length in enumerate(lengths)
            )
            rank_zero_warn(
                f"The ranks expect runs of different lengths, in optimizer steps: {each}. Give"
                " every rank the same number of batches and the same callbacks. Otherwise all"
                " ranks end once they differ."
            )
        return lengths[0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Continue with this rank's own weights, or with what hooks have written into the shared
        ones.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self.synchronizer is not None:
            self.synchronizer.epoch = epoch = self._module.trainer.current_epoch
            number = 1 if self.synchronizer.batch is None else self.synchronizer.batch[0] + 1
            self.synchronizer.batch = number, f"batch {batch_idx} of epoch {epoch}"
        if self.updates is not None:
            self.updates.views.continue_training()
            if share := share_done(self._module.trainer, self.length.batches):
                self._extrapolate_length(self.updates, share)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step, and count it if activations are compressed."""
        if self._takes_all_ranks():
            self.check_order(IN_FORWARD)
        self._in_step = True
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._in_step = False
        if self._splits:
            self.split_traffic.add(steps=1)
        return output

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Have every backward exchange gradients of table rows, also if this rank's loss does not
        depend on them.
        """
        super().pre_backward(closure_loss)
        if self._tables and closure_loss.requires_grad:
            closure_loss.register_hook(lambda _: when_backward_ends(self._tables))

    def _takes_all_ranks(self) -> bool:
        """Whether DistributedDataParallel exchanges something in forward next: buffers, or its
        order of gradients.
        """
        model = self.model
        return isinstance(model, DistributedDataParallel) and (
            model.will_sync_module_buffers() or not getattr(model, "_has_rebuilt_buckets", True)
        )

    def check_order(
        self,
        name: str,
        patience_s: float | None = None,
        group: dist.ProcessGroup | None = None,
        detail: object = "",
    ) -> None:
        """Check that all ranks of a group do the same here, with the same ``detail``; see
        ``collective_order.py``.

        Raises:
            RuntimeError: They do not, which the message explains.
        """
        if self.lifeline is None or self.lightning_module is None:
            return
        trainer = self._module.trainer
        description = f"{name} in `{trainer.state.fn and trainer.state.fn.value}`"
        if self.synchronizer is not None and self.is_fitting:
            stops = ", because its `trainer.should_stop` is set" if trainer.should_stop else ""
            description = f"{name} after {self.synchronizer.synchronisations} steps{stops}"
        peers = range(self.world_size) if group is None else dist.get_process_group_ranks(group)
        self.lifeline.check_order(f"{name} {detail}".strip(), description, peers, patience_s)

    def _check_order_of_rows(self, name: str, rows: str) -> None:
        """Check the order of exchanges of rows in fit, outside evaluations, in which ranks may have
        more batches.
        """
        if self._module.trainer.training:
            self.check_order(f"{EXCHANGE} of {rows} of {name!r}")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.check_order("a barrier")
        super().barrier(name)  # type: ignore[safe-super]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        self.check_order("a broadcast")
        return super().broadcast(obj, src)  # type: ignore[safe-super]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor of all ranks."""
        # Do not cross-check inside a step: the round trip would slow it down.
        rare = "a reduction, of logged values or for a checkpoint,"
        often = f"{EXCHANGE} of logged values"
        self.check_order(often if self._in_step else rare, group=group)
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a tensor of all ranks, as ``LightningModule.all_gather`` does."""
        self.check_order(f"{EXCHANGE} of gathered values", group=group)
        return super().all_gather(tensor, group, sync_grads)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, which the entrance sees, too, if a loss scaler skips it."""
        updates = self.updates

        def forward_and_backward() -> Any:
            output = closure()
            if updates is not None:
                updates.register(optimizer)  # parameters may have been unfrozen within
            if not self.has_unused:
                stepped = (one for group in optimizer.param_groups for one in group["params"])
                self.has_unused = any(one.requires_grad and one.grad is None for one in stepped)
            return output

        with calls_step(optimizer, () if self._entrance is None else (self._entrance,)):
            output = super().optimizer_step(optimizer, forward_and_backward, model, **kwargs)
            self._stepped.add(optimizer)
        if updates is None and self.project is not None:
            self.project(self._module)
        return output

    def on_train_end(self) -> None:
        """Wait for the numbers of the last steps from GPUs, and for all ranks."""
        super().on_train_end()
        if self.updates is not None:
            # Callbacks that average weights have set each rank's own buffers.
            self.updates.exchange_buffers()
        if self.synchronizer is not None:
            self.synchronizer.flush()
        self.check_order("the end of fit")
        if self.updates is not None:
            self.updates.warn_if_unsent()
            self._warn_if_shorter(self.updates)
            self.updates.check_parameters_alike()

    def _stop_watching(self) -> None:
        if self._entrance is not None:
            self._entrance.stop()
            self._entrance = None

    def on_exception(self, exception: BaseException) -> None:
        """Say where the model is, if code that is written for ``ddp`` looks for it inside a
        wrapper.
        """
        super().on_exception(exception)
        if not isinstance(exception, AttributeError) or isinstance(
            self.model, DistributedDataParallel
        ):
            return
        if exception.name == "module" and exception.obj is self.model:
            exception.args = (
                (
                    f"{exception}. `{type(self).__name__}` wraps no model in"
                    " `DistributedDataParallel` where updates are exchanged: `trainer.model` is"
                    " the LightningModule. Write `trainer.lightning_module`, as it is under every"
                    " strategy, instead of `trainer.model.module`."
                ),
            )

    def teardown(self) -> None:
        """Close the exchange, and put the shared weights into the model; outside fit wait for the
        others before.
        """
        trainer = self._attached_trainer
        # A rank without batches answers the look-ups of the others after this.
        if (
            trainer is not None
            and not self._tables
            and (trainer.state.fn, trainer.state.status) in OUTSIDE_FIT
        ):
            self.check_order("the end")
        self._stop_watching()
        for table in self._tables:
            table.exchange_group.check_order = None
        if self.synchronizer is not None:
            self.synchronizer.exchange.close()
        if self.updates is not None:
            # An interrupted fit has this rank's own weights in the model, and exchanges no buffers.
            self.updates.views.open(View.END)
        remove_clipping(self.precision_plugin)
        super().teardown()
        self.is_fitting = False
        if self.updates is not None:
            self.updates.weights.follow_parameters()
        self._finish_saving()
        if self.lifeline is not None:
            self.lifeline.close()
            self.lifeline = None
        # DistributedDataParallel is part of a reference cycle. If it is alive when the process
        # ends, gloo's threads sometimes abort the process (also with plain DDP, torch 2.13).
        gc.collect()


def check_torch(kind: type) -> None:
    """Refuse a torch that is too old for pipelines and sharded models (RuntimeError)."""
    if torch.__version__ < "2.13":
        raise RuntimeError(
            f"`{kind.__name__}` needs torch 2.13 or later, and this is torch {torch.__version__}."
            " Install a later one, or use `DCTStrategy`."
        )


def _place_of(callback: pl.Callback) -> int:
    """Checkpoints come last, as in Lightning."""
    # First, because other callbacks may need all ranks after an exception or when evaluation ends,
    # or read weights.
    first = (internal.FailureNotice, internal.SharedWeightsView, internal.EvaluationJoin)
    others = len(first) + isinstance(callback, Checkpoint)
    return next((place for place, kind in enumerate(first) if isinstance(callback, kind)), others)
