"""What this package's strategies do alike around Lightning's: callbacks, lifelines, exchanges after steps, the end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dct.activations import SplitPoint
from lightning_dct.agreement import check_modules_agree
from lightning_dct.callbacks import (
    CompressionMonitor,
    EvaluationJoin,
    FailureNotice,
    RunAdvice,
    SharedWeightsView,
    SignalsAfterStep,
    ThresholdRefresh,
)
from lightning_dct.config import DCTConfig
from lightning_dct.embedding.hosting import install_clipping, remove_clipping
from lightning_dct.failures import Lifeline, check_lifelines, group_is_made
from lightning_dct.profiling import shown_by
from lightning_dct.saving import CheckpointedStrategy
from lightning_dct.synchronizing import check_optimizers
from lightning_dct.traffic import Traffic


class ThresholdedStrategy(CheckpointedStrategy):
    """The half of a strategy that stands in front of one of Lightning's, whatever it does with the model.

    Args:
        config: The settings.
        lifelines: False for none of what keeps ranks from waiting for one that has died, failed or been signalled; a
            number is the port at which rank 0 listens.
        **kwargs: As for the strategy behind.
    """

    registered_names: ClassVar[dict[str, dict[str, Any]]]
    # What the same replicas do without compression, in advice.
    dense_rival: ClassVar[str] = "DDP"
    _timeout: timedelta | None

    def __init__(self, config: DCTConfig, lifelines: bool | int, **kwargs: Any) -> None:
        check_lifelines(lifelines)
        self._lifelines = lifelines
        super().__init__(config, **kwargs)

    def __repr__(self) -> str:
        # Lightning quotes a strategy it does not recognise, as pytorch_lightning's Trainer does with this one.
        return f"{type(self).__name__}({self.config}) for lightning.pytorch.Trainer, not pytorch_lightning.Trainer"

    def connect(self, model: pl.LightningModule) -> None:
        """Add the callbacks this strategy works with, where the user gave none of their own."""
        super().connect(model)
        # Any: Lightning sets `callbacks` where type checkers do not see it. Stand-ins for a module may have no Trainer.
        trainer: Any = getattr(model, "_trainer", None)
        if trainer is None:
            return

        def lacks(kind: type[pl.Callback]) -> bool:
            return not any(isinstance(callback, kind) for callback in trainer.callbacks)

        missing: list[pl.Callback] = []
        if lacks(ThresholdRefresh):
            missing.append(ThresholdRefresh(self.config.refresh_every))
        if lacks(CompressionMonitor) and not trainer.barebones:
            missing.append(CompressionMonitor())
        if lacks(RunAdvice) and not trainer.barebones:
            missing.append(RunAdvice())
        if lacks(SignalsAfterStep) and self._lifelines:
            missing.append(SignalsAfterStep())
        # Lightning keeps checkpoint callbacks last.
        end = next(
            (i for i, old in enumerate(trainer.callbacks) if isinstance(old, Checkpoint)), len(trainer.callbacks)
        )
        trainer.callbacks[end:end] = missing
        # Before all others: they may want all ranks together when evaluation ends, or when there is an exception.
        if lacks(EvaluationJoin):
            trainer.callbacks.insert(0, EvaluationJoin())
        if lacks(FailureNotice) and self._lifelines:
            trainer.callbacks.insert(0, FailureNotice())
        if lacks(SharedWeightsView) and self.config.compress == "updates":
            trainer.callbacks.insert(0, SharedWeightsView(opens=True))
            trainer.callbacks.append(SharedWeightsView(opens=False))

    def setup_environment(self) -> None:
        """Bring the processes up, then make the rows of embedding tables that each of them owns."""
        with group_is_made(self._lifelines, self._timeout):
            super().setup_environment()
        self.lifeline = Lifeline.open(self._lifelines)
        if self.lightning_module is not None:
            self._check_modules()
            self.sharded_tables()

    def setup(self, trainer: pl.Trainer) -> None:
        """Begin counting, and let everything that compresses within a rank know where."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.traffic, self.split_traffic = Traffic(shown_by(trainer)), Traffic()
            self.synchronizer = None
        self._check_modules()
        modules = self.compressed_modules()
        for name, module in modules.items():
            module.name, module.traffic = name, self.split_traffic
        self._splits = any(isinstance(module, SplitPoint) for module in modules.values())
        tables = self.sharded_tables()
        if tables and getattr(self.precision_plugin, "scaler", None) is not None:
            raise MisconfigurationException(
                "Sharded embedding tables do not work with a loss scaler: their residuals would be scaled anew in every"
                " step. Use `precision='bf16-mixed'` instead of `'16-mixed'`."
            )
        install_clipping(self.precision_plugin, tables)
        # Callbacks of the module have come in since `connect`.
        trainer.callbacks.sort(key=_place_of)  # type: ignore[attr-defined]
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_optimizers(self.config, self.optimizers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; where activations are compressed within a rank, they cross once in it."""
        output = super().training_step(*args, **kwargs)
        if self._splits:
            self.split_traffic.add(steps=1)
        return output

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, and exchange what the weights have moved when it is time."""
        if self.updates is not None:
            self.updates.before_step(optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._accumulating = False
        if self.updates is not None:
            self.updates.after_step(optimizer)
        return output

    def on_validation_end(self) -> None:
        """Go on with this rank's own weights, where a validation was a part of training."""
        super().on_validation_end()
        if self.updates is not None and self.is_fitting:
            self.updates.weights.hide()

    def on_train_end(self) -> None:
        """Wait for what GPUs have still to tell of the last steps."""
        super().on_train_end()
        if self.updates is not None:
            # Callbacks that average weights have put buffers in of which each rank knew its own.
            self.updates.average_buffers()
        if self.synchronizer is not None:
            self.synchronizer.flush()

    def teardown(self) -> None:
        """Undo the wrapping."""
        if self.synchronizer is not None:
            self.synchronizer.exchange.close()
        if self.updates is not None:
            # A fit that was cut short ends with this rank's own weights in the model.
            self.updates.weights.show()
        remove_clipping(self.precision_plugin)
        super().teardown()
        self.is_fitting = False
        if self.updates is not None:
            self.updates.weights.follow_parameters()
        self._finish_saving()
        if self.lifeline is not None:
            self.lifeline.close()
            self.lifeline = None
        # DistributedDataParallel is part of a reference cycle. Still alive when the process ends, it makes gloo's
        # threads abort it now and then (seen with plain DDP under torch 2.13 too).
        gc.collect()

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register this strategy's names with a Lightning registry."""
        for name, settings in cls.registered_names.items():
            described = ", ".join(f"`{setting}={value!r}`" for setting, value in settings.items())
            strategy_registry.register(
                name, cls, description=f"{cls.__name__} with {described}", override=True, **settings
            )

    def _check_modules(self) -> None:
        # Where tables differ, making them would hang. What `configure_model` makes is there later than the rest.
        assert self.lightning_module is not None
        check_modules_agree(self.lightning_module)


def _place_of(callback: pl.Callback) -> int:
    """The view of the shared weights opens before all other callbacks and closes behind them."""
    return 0 if not isinstance(callback, SharedWeightsView) else -1 if callback.opens else 1
