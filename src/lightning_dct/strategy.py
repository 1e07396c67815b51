"""``Trainer(strategy="dct")``: wires thresholded gradients into Lightning's DDPStrategy. Holds no maths."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct import checkpoint as saved
from lightning_dct.activations import CompressedModule
from lightning_dct.agreement import check_agreement, check_modules_agree
from lightning_dct.callbacks import CompressionMonitor, EvaluationJoin, FailureNotice, ThresholdRefresh
from lightning_dct.config import DCTConfig, ExchangeName, ValueFormat
from lightning_dct.embedding import ShardedEmbeddingBags
from lightning_dct.embedding.hosting import find_tables, install_clipping
from lightning_dct.embedding.shards import load_row_states, load_rows, save_rows, without_rows
from lightning_dct.failures import Lifeline
from lightning_dct.gradients import GradientSynchronizer, make_synchronizer, parameter_names, resolve_process_group
from lightning_dct.kernels import KernelName
from lightning_dct.traffic import Traffic
from lightning_dct.warmup import WarmupSchedule


class DCTStrategy(DDPStrategy):
    """Data-parallel training that sends only gradient entries above a threshold and remembers the rest.

    The method is the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021). Everything
    else, from launchers to checkpoints, is :class:`~lightning.pytorch.strategies.DDPStrategy`'s.

    Example::

        trainer = Trainer(strategy=DCTStrategy(density=0.01, value_format="int8"), devices=2)

    Args:
        accelerator: As for DDPStrategy.
        density: Share of each tensor's entries that is sent a step, in (0, 1].
        density_per_parameter: Densities for some parameters, by name pattern.
        refresh_every: Optimizer steps between two exact selections of the thresholds.
        warmup_steps: Optimizer steps over which the density falls from 1.0 to its target.
        warmup_schedule: ``"exponential"`` or ``"linear"``.
        value_format: ``"fp32"``, ``"bf16"``, ``"int8"``, ``"int4"`` or ``"1bit"``.
        min_tensor_size: Tensors with fewer entries are sent whole.
        guard: Nudge the thresholds between refreshes to hold the number of entries near its target.
        exchange: ``"all_gather"``, ``"sharded"``, ``"by_node"``, or ``"auto"`` to choose by counted bytes.
        kernel: ``"torch"``, ``"numba"``, ``"triton"``, or ``"auto"`` for the fastest that is installed.
        **kwargs: Everything DDPStrategy and DistributedDataParallel take, by keyword. ``process_group`` may also be a
            function without arguments that returns the group; it is called once the processes are up.

    See :class:`~lightning_dct.DCTConfig` for the settings' meanings.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or a communication hook was given as well.
    """

    strategy_name = "dct"
    registered_names: ClassVar[dict[str, dict[str, Any]]] = {
        "dct": {"start_method": "popen"},
        "dct_spawn": {"start_method": "spawn"},
        "dct_fork": {"start_method": "fork"},
        "dct_notebook": {"start_method": "fork"},
        "dct_find_unused_parameters_true": {"start_method": "popen", "find_unused_parameters": True},
    }
    # Over how many ranks the parameters are spread: here every rank has all of them.
    stages = 1

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *,
        density: float = 0.01,
        density_per_parameter: Mapping[str, float] | None = None,
        refresh_every: int = 1000,
        warmup_steps: int = 0,
        warmup_schedule: WarmupSchedule = "exponential",
        value_format: ValueFormat = "bf16",
        min_tensor_size: int = 128,
        guard: bool = True,
        exchange: ExchangeName = "auto",
        kernel: KernelName = "auto",
        **kwargs: Any,
    ) -> None:
        for setting in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"):
            if kwargs.get(setting) is not None:
                raise ValueError(
                    f"`DCTStrategy` registers its own communication hook and cannot take `{setting}`. Use"
                    " `DDPStrategy` for another hook, or leave the setting out."
                )
        self.config = DCTConfig(
            density=density,
            density_per_parameter=density_per_parameter or {},
            refresh_every=refresh_every,
            warmup_steps=warmup_steps,
            warmup_schedule=warmup_schedule,
            value_format=value_format,
            min_tensor_size=min_tensor_size,
            guard=guard,
            exchange=exchange,
            kernel=kernel,
        )
        # Gradients live in the buckets that are exchanged: no copy of each in every step.
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(accelerator=accelerator, **kwargs)
        # Gradients, and what crosses inside the model: activations, embedding rows and their gradients.
        self.traffic = Traffic()
        self.split_traffic = Traffic()
        # Thresholds, residuals and counters of this rank, from the set-up of fit on.
        self.synchronizer: GradientSynchronizer | None = None
        # Tells this rank when another one dies; from the start of the processes on, None for a single one.
        self.lifeline: Lifeline | None = None
        self._saved_state: dict[str, Any] | None = None
        self._saved_notes: dict[str, dict[str, int]] = {}
        self._rows_folder: str | None = None

    def __repr__(self) -> str:
        # Lightning quotes a strategy it does not recognise, as pytorch_lightning's Trainer does with this one.
        return f"{type(self).__name__}({self.config}) for lightning.pytorch.Trainer, not pytorch_lightning.Trainer"

    def connect(self, model: pl.LightningModule) -> None:
        """Add the callbacks this strategy works with, where the user gave none of their own."""
        super().connect(model)
        trainer: Any = model._trainer  # Any: Lightning sets `callbacks` where type checkers do not see it
        if trainer is None:
            return
        missing: list[pl.Callback] = []
        if not any(isinstance(callback, ThresholdRefresh) for callback in trainer.callbacks):
            missing.append(ThresholdRefresh(self.config.refresh_every))
        if (
            not any(isinstance(callback, CompressionMonitor) for callback in trainer.callbacks)
            and not trainer.barebones
        ):
            missing.append(CompressionMonitor())
        # Lightning keeps checkpoint callbacks last.
        end = next(
            (i for i, old in enumerate(trainer.callbacks) if isinstance(old, Checkpoint)), len(trainer.callbacks)
        )
        trainer.callbacks[end:end] = missing
        # Before all others: they may want all ranks together when evaluation ends, or when there is an exception.
        if not any(isinstance(callback, EvaluationJoin) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, EvaluationJoin())
        if not any(isinstance(callback, FailureNotice) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, FailureNotice())

    def setup_environment(self) -> None:
        """Bring the processes up, then make the rows of embedding tables that each of them owns."""
        super().setup_environment()
        self.lifeline = Lifeline.open()
        self._check_modules()
        self.sharded_tables()

    def compressed_modules(self) -> dict[str, CompressedModule]:
        """The modules whose activations are compressed, by name."""
        assert self.lightning_module is not None
        return {
            name.replace("_orig_mod.", ""): module
            for name, module in self.lightning_module.named_modules()
            if isinstance(module, CompressedModule)
        }

    def sharded_tables(self) -> dict[str, ShardedEmbeddingBags]:
        """The embedding tables that are spread over the ranks, by name; made where they are not there yet."""
        model: Any = self.lightning_module  # Any: it takes an attribute that it does not declare
        tables = find_tables(model)
        for module in tables.values():
            module.materialize()
            module.saved_in_shards = True
            module.evaluated_with = tuple(tables.values())
        # DistributedDataParallel would make every rank's rows those of rank 0.
        model._ddp_params_and_buffers_to_ignore = [f"{name}.weight" for name in tables]
        return tables

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model, register the hook and take over the state of a checkpoint."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.traffic, self.split_traffic = Traffic(), Traffic()
            self.synchronizer = None
            # Lightning flushes the first backward of a static graph once for each strategy; a second fit needs it too.
            self._pl_static_graph_delay_done = False
        self._check_modules()
        for name, module in self.compressed_modules().items():
            module.name, module.traffic = name, self.split_traffic
        tables = self.sharded_tables()
        if tables and getattr(self.precision_plugin, "scaler", None) is not None:
            raise MisconfigurationException(
                "Sharded embedding tables do not work with a loss scaler: what they hold back would be scaled anew in"
                " every step. Use `precision='bf16-mixed'` instead of `'16-mixed'`."
            )
        install_clipping(self.precision_plugin, tables)
        super().setup(trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Bring parameters that a callback has unfrozen into the synchronisation.

        DistributedDataParallel synchronises the parameters that were trainable when it was built, and no others.
        """
        super().on_train_batch_start(batch, batch_idx)
        if isinstance(self.model, DistributedDataParallel) and not self._trainable() <= self._synchronised:
            assert self.lightning_module is not None
            rank_zero_info("Parameters have become trainable: DCTStrategy wraps the model anew to synchronise them.")
            self.model._remove_autograd_hooks()
            self.model = self._setup_model(self.lightning_module)
            self._register_ddp_hooks()

    def on_train_end(self) -> None:
        """Wait for what GPUs have still to tell of the last steps."""
        super().on_train_end()
        if self.synchronizer is not None:
            self.synchronizer.flush()

    def teardown(self) -> None:
        """Undo the wrapping."""
        if self.synchronizer is not None:
            self.synchronizer.exchange.close()
        super().teardown()
        if self.lifeline is not None:
            self.lifeline.close()
            self.lifeline = None
        # DistributedDataParallel is part of a reference cycle. Still alive when the process ends, it makes gloo's
        # threads abort it now and then (seen with plain DDP under torch 2.13 too).
        gc.collect()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, less that of sharded rows, which is saved with them."""
        return without_rows(super().optimizer_state(optimizer), optimizer, self.sharded_tables())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save Lightning's checkpoint from rank 0, and beside it the compression state and the rows of every rank.

        Raises:
            RuntimeError: A rank has died or failed, as callbacks that save on an exception may find.
        """
        if self.lifeline is not None and self.lifeline.verdict:
            raise RuntimeError(f"No checkpoint is saved, because it takes all ranks. {self.lifeline.verdict}.")
        if self.synchronizer is not None:
            # Nothing is saved of a step in which something harmed has arrived.
            self.synchronizer.flush()
        path, tables = str(filepath), self.sharded_tables()
        has_state = self.synchronizer is not None and "optimizer_states" in checkpoint  # fitting, not weights only
        if not has_state and not tables:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        steps = int(checkpoint["global_step"]) if self.synchronizer is None else self.synchronizer.synchronisations
        note = saved.make_note(self.world_size, steps, has_state, bool(tables), self.stages)
        if has_state:
            saved.write_state(self.checkpoint_io, path, note, self.global_rank, self._state())
        if tables:
            save_rows(saved.rows_path(path, note), tables, self.optimizers if has_state else [])
        # Lightning's file comes last and points at complete files only.
        self.barrier()
        checkpoint[saved.CHECKPOINT_KEY] = note
        super().save_checkpoint(checkpoint, filepath, storage_options)
        outdated = self._saved_notes.get(path, note)
        self._saved_notes[path] = note
        if outdated != note:
            self.barrier()
            self.checkpoint_io.remove_checkpoint(saved.state_path(path, outdated, self.global_rank))
            if self.is_global_zero and saved.rows_path(path, outdated) != saved.rows_path(path, note):
                self.checkpoint_io.remove_checkpoint(saved.rows_path(path, outdated))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and the compression state beside it."""
        super().remove_checkpoint(filepath)
        self._saved_notes.pop(str(filepath), None)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(saved.state_folder(str(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's checkpoint and, when fitting, this rank's compression state beside it."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        note = checkpoint.get(saved.CHECKPOINT_KEY, {})
        self._saved_state = None
        self._rows_folder = saved.rows_path(str(checkpoint_path), note) if note.get("has_rows") else None
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            if not note.get("has_state", bool(note)):
                rank_zero_info(f"{checkpoint_path} holds no state of DCTStrategy: residuals start at zero.")
                return checkpoint
            self._saved_state = saved.read_state(
                self.checkpoint_io, str(checkpoint_path), note, self.global_rank, self.world_size, self.stages
            )
            # Restored in the middle of fit, as the learning-rate finder does; at its beginning, set-up restores.
            if self.synchronizer is not None and isinstance(self.model, DistributedDataParallel):
                self._restore(self.synchronizer)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, those of sharded rows from the folder beside the checkpoint."""
        tables = self.sharded_tables()
        super().load_model_state_dict(checkpoint, strict)
        if tables and self._rows_folder is not None:
            load_rows(self._rows_folder, tables)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, those of sharded rows from the folder beside the checkpoint."""
        super().load_optimizer_state_dict(checkpoint)
        if self._rows_folder is not None:
            load_row_states(self._rows_folder, self.sharded_tables(), self.optimizers)

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

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        group = resolve_process_group(self._ddp_kwargs)
        self.config.check_patterns(list(parameter_names(model).values()))
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        refresh = [callback.every_n_steps for callback in trainer.callbacks if isinstance(callback, ThresholdRefresh)]
        # Before DistributedDataParallel's own collectives, which may hang when models differ.
        plain = {name: value for name, value in self._ddp_kwargs.items() if isinstance(value, bool | int | float | str)}
        settings = {**vars(self.config), **plain, "ThresholdRefresh(every_n_steps)": refresh}
        check_agreement(settings, model, group)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        # DDPStrategy skips hooks off CUDA; ours runs everywhere.
        assert isinstance(self.model, DistributedDataParallel)
        if self.synchronizer is None:
            place = (self.node_rank, self.local_rank)
            self.synchronizer = make_synchronizer(
                self.model, self.precision_plugin, self.config, self.traffic, place, self._timeout
            )
            self._restore(self.synchronizer)
        self._synchronised = self._trainable()
        self.model.register_comm_hook(None, self.synchronizer.hook)

    def _trainable(self) -> set[int]:
        assert self.lightning_module is not None
        return {id(parameter) for parameter in self.lightning_module.parameters() if parameter.requires_grad}

    def _state(self) -> dict[str, Any]:
        assert self.synchronizer is not None
        return {
            **self.synchronizer.state_dict(),
            "split_traffic": self.split_traffic.state_dict(),
            "modules": {name: module.compression_state() for name, module in self.compressed_modules().items()},
        }

    def _restore(self, synchronizer: GradientSynchronizer) -> None:
        if self._saved_state is None:
            return
        synchronizer.load_state_dict(self._saved_state)
        if "split_traffic" in self._saved_state:
            self.split_traffic.load_state_dict(self._saved_state["split_traffic"])
        modules = self.compressed_modules()
        for name, states in self._saved_state["modules"].items():
            if name in modules and states[0]:
                modules[name].load_compression_state(states)
        self._saved_state = None
