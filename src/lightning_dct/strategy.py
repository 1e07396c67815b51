"""``Trainer(strategy="dct")``: connects compressed synchronisation to Lightning's DDPStrategy."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_dct.base_strategy import DCTStrategyBase
from lightning_dct.callbacks.schedules import ThresholdRefresh
from lightning_dct.config import (
    Compress,
    DCTConfig,
    ExchangeName,
    MissingState,
    ValueFormat,
    check_keywords,
)
from lightning_dct.failures.collective_order import EXCHANGE
from lightning_dct.kernels import KernelName
from lightning_dct.law import UserSettings
from lightning_dct.sync import setup
from lightning_dct.sync.gradients import GradientSynchronizer
from lightning_dct.sync.updates import UpdateSynchronizer


class DCTStrategy(DCTStrategyBase, DDPStrategy):
    """Data-parallel training that sends only entries above a threshold and keeps the rest in a
    residual.

    Every rank trains its own weights with the user's optimizer. After every ``local_steps``
    optimizer steps the ranks exchange the *updates* of their weights, compressed by Dynamic
    Communication Thresholding (Gupta et al., KDD 2021); see :mod:`lightning_dct.sync.updates` for
    the equations. Validation, checkpoints and the end of fit use the weights that all ranks share.
    With ``compress="gradients"`` the ranks exchange gradients in every backward instead, as the
    paper does. Everything else is as in :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Example::

        trainer = Trainer(strategy=DCTStrategy(density=0.1), devices=2)

    Args:
        accelerator: As for DDPStrategy.
        compress: ``"updates"`` of weights, or ``"gradients"``.
        local_steps: Optimizer steps from one exchange of updates to the next; by default as the
            length of the run allows, which is 1 in nearly all runs.
        warmup_steps: Optimizer steps in which updates are exchanged after every step, but fewer
            entries each time.
        residual_decay: Factor on an update's residual after each exchange of the warm-up, in (0,
            1]; None for 0.95 less half the density, and for 0.95 with SGD.
        share_second_moments: Average over the ranks what an optimizer has learnt about the size of
            gradients.
        overlap_steps: Optimizer steps for which an exchange may be in flight during training, at
            most ``local_steps``.
        density: Share of each tensor's entries that an exchange sends, in (0, 1]; by default as the
            length of the run allows.
        density_per_parameter: Densities for some parameters, by name pattern.
        project: Brings weights back into their bounds after each step, such as a clamp: a function
            of the module that changes its weights in place. It is called with a rank's own weights
            in the module, and with the shared ones, so it must be a projection: weights within the
            bounds stay as they are. A run warns if it moves weights in each call, as a soft
            threshold or a decay does. Processes that are started with ``"spawn"`` need a function
            that can be pickled.
        missing_state: ``"error"``, or ``"reset"`` to resume also without the folder that was saved
            with a checkpoint.
        lifelines: False to disable everything that keeps ranks from waiting for one that has died,
            failed or been signalled: see ``docs/failures.md``. A number is the port at which
            rank 0 listens, by default a free one; under torchrun it also listens at the next one.
        gradient_as_bucket_view: As for DistributedDataParallel: gradients are views of the buckets,
            without copies.
        **kwargs: Everything DDPStrategy and DistributedDataParallel take, by keyword.
            ``process_group`` may also be a function without arguments that returns the group; it is
            called once the processes are up.

    See :class:`~lightning_dct.DCTConfig` for all settings.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range, or a communication hook was given as well.
    """

    strategy_name = "dct"
    clips_by_norm_of_mean = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *,
        compress: Compress = "updates",
        local_steps: int | None = None,
        warmup_steps: int = 320,
        residual_decay: float | None = None,
        share_second_moments: bool = True,
        overlap_steps: int = 0,
        density: float | None = None,
        density_per_parameter: Mapping[str, float] | None = None,
        refresh_every: int = 1000,
        value_format: ValueFormat = "1bit",
        min_tensor_size: int = 16,
        adapt_threshold: bool = True,
        exchange: ExchangeName = "auto",
        kernel: KernelName = "auto",
        missing_state: MissingState = "error",
        project: Callable[[Module], None] | None = None,
        lifelines: bool | int = True,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        arguments = locals()
        check_keywords(type(self), kwargs, DCTConfig, DDPStrategy, DistributedDataParallel)
        for setting in (
            "ddp_comm_hook",
            "ddp_comm_state",
            "ddp_comm_wrapper",
            "model_averaging_period",
        ):
            if kwargs.get(setting) is not None:
                raise ValueError(
                    "`DCTStrategy` registers its own communication hook and cannot take"
                    f" `{setting}`. Use `DDPStrategy` for another hook, or leave the setting out."
                )
        self.project = project
        settings = {field.name: arguments[field.name] for field in fields(DCTConfig)}
        given = UserSettings.of({**settings, "density_per_parameter": density_per_parameter or {}})
        super().__init__(
            given,
            lifelines,
            accelerator=accelerator,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **kwargs,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Synchronise parameters that a callback has unfrozen: DDP ignores those that were frozen
        when it was made.
        """
        super().on_train_batch_start(batch, batch_idx)
        if (
            isinstance(self.model, DistributedDataParallel)
            and not self._trainable() <= self._synchronised
        ):
            names = sorted(name for p, name in self._parameter_names().items() if p.requires_grad)
            exchange = f"{EXCHANGE} of {zlib.crc32(repr(names).encode()):x}"
            assert self.synchronizer is not None
            self.synchronizer.check_order(
                exchange, f"{len(names)} trainable parameters, more than before"
            )
            rank_zero_info(
                "Parameters have become trainable: DCTStrategy wraps the model again to synchronise"
                " them."
            )
            self.model._remove_autograd_hooks()
            self.model = self._module
            self.configure_ddp()

    def configure_ddp(self) -> None:
        """Wrap the model and register the hook if gradients are exchanged; with updates it trains
        by itself.
        """
        trainer: Any = self._module.trainer
        refresh = [
            callback.every_n_steps
            for callback in trainer.callbacks
            if isinstance(callback, ThresholdRefresh)
        ]
        # Before DistributedDataParallel's own collectives, which may hang if models differ.
        group = setup.check_settings(
            self.config,
            self._module,
            self._ddp_kwargs,
            {"ThresholdRefresh(every_n_steps)": refresh},
        )
        self.is_fitting = True
        if self.config.compress == "updates":
            self.synchronizer = self._make_updates()
            return
        # The errors of DistributedDataParallel name neither the parameter nor a remedy.
        setup.refuse_shards(self._module, setup.parameter_names(self._module), group)
        # Lightning does this once for each strategy, and every wrapped model needs it.
        self._pl_static_graph_delay_done = False
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if not isinstance(self.synchronizer, GradientSynchronizer):
            self.synchronizer = setup.make_gradient_synchronizer(
                self, self.model, getattr(self.precision_plugin, "scaler", None)
            )
        self._synchronised = self._trainable()
        self.model.register_comm_hook(None, self.synchronizer.hook)

    def _make_updates(self) -> UpdateSynchronizer:
        assert self.model is not None
        group = self._ddp_kwargs.get("process_group")
        buffers = setup.exchanges_buffers(self._ddp_kwargs)
        return setup.make_update_synchronizer(
            self, self.model, group, buffers, lambda: self.optimizers
        )

    def on_exception(self, exception: BaseException) -> None:
        """Name this strategy where Lightning's message on unused parameters names DDP's."""
        super().on_exception(exception)
        if exception.args and "find_unused_parameters" in (message := str(exception.args[0])):
            message = message.replace("'ddp_find", "'dct_find").replace(
                "DDPStrategy(", "DCTStrategy("
            )
            exception.args = (message, *exception.args[1:])

    def _trainable(self) -> set[int]:
        return {id(parameter) for parameter in self._module.parameters() if parameter.requires_grad}
