"""The half of a strategy that saves and loads: Lightning's checkpoint, and beside it the state of
each rank.
"""

import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct import lightning_private as private
from lightning_dct.activations.module import CompressedModule, modules_of, plain_name
from lightning_dct.agreement import gather_objects
from lightning_dct.callbacks.run_advice import RunAdvice
from lightning_dct.checkpoint import files, reading
from lightning_dct.checkpoint import format as saved
from lightning_dct.checkpoint.handing_over import File, hand_over, places_of, received, spans_hosts
from lightning_dct.config import DCTConfig
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.embedding.table_files import (
    load_row_states,
    load_rows,
    row_files,
    save_rows,
    saved_in_shards,
    without_rows,
)
from lightning_dct.failures.lifeline import Lifeline
from lightning_dct.sync.setup import parameter_names
from lightning_dct.sync.synchronizer import Synchronizer
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.sync.views import View
from lightning_dct.traffic import Traffic

# In a checkpoint that was loaded: this rank's state, and the folder of the rows of sharded tables.
STATE_KEY = f"{saved.CHECKPOINT_KEY}_state"
ROWS_KEY = f"{saved.CHECKPOINT_KEY}_rows"


class CheckpointedStrategy(ParallelStrategy):
    """Saves and restores the state of each rank; see :mod:`lightning_dct.checkpoint.format` for the
    files.
    """

    # Number of ranks that together hold one replica of the parameters, and whether each has a shard
    # of all of them.
    stages = 1
    holds_shards: ClassVar[bool] = False
    # The advice to a user with sharded tables; empty if the strategy can hold them.
    without_tables: ClassVar[str] = ""
    num_nodes: int
    check_order: Callable[..., None]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Data parallelism, and traffic inside the model: activations, embedding rows and their
        # gradients.
        self.traffic = Traffic()
        self.split_traffic = Traffic()
        # Thresholds, residuals and counters of this rank; fit sets it.
        self.synchronizer: Synchronizer | None = None
        self.is_fitting = False
        # Ends this rank when another one dies; None for a single process.
        self.lifeline: Lifeline | None = None
        # Gradients of a checkpoint that wait for their step, by parameter.
        self._accumulated: dict[str, Tensor] = {}
        # Those that have made a step since the last backward: the gradients of others wait for
        # theirs.
        self._stepped: set[Optimizer] = set()
        # On rank 0, checkpoints that may be being written, with the files that they make outdated;
        # and the names of all saves. On a disk that rank 0 does not see, the files that are
        # outdated when the last save is complete.
        self._unfinished: dict[str, list[str]] = {}
        self._outdated: list[str] = []
        self._saves: set[str] = set()
        # The checkpoint that was loaded last, for errors in what follows its loading.
        self._loaded_from = ""
        # `default_root_dir` of rank 0, and of this rank if it is on another host.
        self._roots = ("", "")

    @property
    @abstractmethod
    def config(self) -> DCTConfig:
        """The settings now."""

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _attached_trainer(self) -> pl.Trainer | None:
        """The Trainer; None in a process that only starts the ranks, where the module is in none
        (`dct_spawn`).
        """
        # Type checkers do not know `_trainer`, and substitutes for a module may have none.
        trainer: pl.Trainer | None = getattr(self.lightning_module, "_trainer", None)
        return trainer

    @property
    def updates(self) -> UpdateSynchronizer | None:
        """The synchronizer, if updates are exchanged."""
        return self.synchronizer if isinstance(self.synchronizer, UpdateSynchronizer) else None

    def compressed_modules(self) -> dict[str, CompressedModule]:
        """The modules whose activations are compressed, by name."""
        return modules_of(self._module, CompressedModule)

    def sharded_tables(self) -> dict[str, ShardedEmbeddingBags]:
        """The embedding tables that are sharded over the ranks, by name, materialized."""
        model: Any = self.lightning_module
        tables = modules_of(model, ShardedEmbeddingBags)
        if tables and self.without_tables:
            raise ValueError(
                f"`{type(self).__name__}` cannot hold `ShardedEmbeddingBags`"
                f" ({', '.join(map(repr, tables))}), which are spread over all ranks."
                f" {self.without_tables}"
            )
        launched = getattr(self, "_start_method", "popen")
        trainer = self._attached_trainer
        if (
            tables
            and launched != "popen"
            and trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
        ):
            raise ValueError(
                f"The rows of sharded tables ({', '.join(map(repr, tables))}) would end with the"
                f" processes that `start_method={launched!r}` starts, which send back the weights"
                " of one rank. Train them in a script with `strategy='dct'`, which a notebook can"
                " write with `%%writefile` and run."
            )
        for module in tables.values():
            module.materialize()
            module.evaluated_with = tuple(tables.values())
        # DistributedDataParallel, which sees compiled modules' names, would give every rank the
        # rows of rank 0.
        names = [
            name
            for name, one in model.named_parameters()
            if any(one is t.weight for t in tables.values())
        ]
        before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        model._ddp_params_and_buffers_to_ignore = sorted({*before, *names, *map(plain_name, names)})
        return tables

    def agree_on_folders(self) -> None:
        """Learn where rank 0 saves, if the ranks are on several hosts; a collective call."""
        trainer: Any = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None and spans_hosts(self):
            own = str(trainer.default_root_dir)
            first = gather_objects(own)[0]
            self._roots = (first, own) if self.node_rank > 0 else ("", "")
            private.restore_from_agreed(trainer, self._agreed_checkpoint)

    def own_place(self, path: str) -> str:
        """Where this host has what rank 0 has at a path: in its own ``default_root_dir``, if it is
        in rank 0's.
        """
        first, own = (root.rstrip("/") for root in self._roots)
        return (
            own + path.removeprefix(first)
            if first != own and path.startswith(f"{first}/")
            else path
        )

    def _agreed_checkpoint(self, chosen: Any) -> Any:
        """The checkpoint to resume from, which rank 0 has chosen: others may not even find the last
        or the best one.
        """
        everyone = gather_objects("" if chosen is None else str(chosen))
        if not everyone[0]:
            others = {rank: path for rank, path in enumerate(everyone) if path}
            if others:
                rank_zero_warn(
                    "Rank 0 finds no checkpoint, so the run starts anew, although other ranks find"
                    f" some: {others}. To continue from it, make its host the one with rank 0, or"
                    " give its path."
                )
            return None
        path = self.own_place(everyone[0])
        is_own = chosen is not None and os.path.basename(str(chosen)) == os.path.basename(path)
        return chosen if is_own else path

    def on_train_start(self) -> None:
        """Restore accumulated gradients of a checkpoint: Lightning has just set all gradients to
        zero.
        """
        super().on_train_start()
        warn_of_uploads(self._module.trainer.loggers)
        for parameter, name in self._parameter_names().items():
            if name in self._accumulated:
                self._take_up(parameter, self._accumulated[name])
        self._accumulated = {}

    def _take_up(self, parameter: Tensor, gradient: Tensor) -> None:
        """Give a parameter its accumulated gradient; a subclass takes this rank's part."""
        parameter.grad = gradient.to(parameter.device)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Note that gradients wait for another micro-batch or a step."""
        super().post_backward(closure_loss)
        self._stepped.clear()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state with the shared weights, which ``on_save_checkpoint`` sees, too, until
        the save ends.
        """
        if self.updates is not None:
            self.updates.views.open(View.SAVE)
        with saved_in_shards(self.sharded_tables()):
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state without that of sharded rows, which is saved with the rows."""
        return without_rows(super().optimizer_state(optimizer), optimizer, self.sharded_tables())

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads and writes files: an ``AtomicCheckpointIO`` unless the user has chosen another."""
        if self._checkpoint_io is None:
            self._checkpoint_io = files.AtomicCheckpointIO()
        elif getattr(self._checkpoint_io, "checkpoint_io", self) is None:
            # Lightning's wrapper without content.
            self._checkpoint_io.checkpoint_io = files.AtomicCheckpointIO()  # type: ignore[attr-defined]
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Save Lightning's checkpoint from rank 0, and beside it the compression state and the rows
        of every rank.

        Raises:
            RuntimeError: A rank has died or failed. Callbacks that save on an exception may see
                this.
        """
        try:
            self._save(checkpoint, filepath, storage_options)
        except BaseException:
            files.unlock(str(filepath))
            raise
        finally:
            if self.updates is not None:
                self.updates.views.close(View.SAVE)
            # A callback may save on an exception where no training was: in the process that starts
            # the ranks.
            callbacks: list[Any] = getattr(self._attached_trainer, "callbacks", [])
            for advice in (one for one in callbacks if isinstance(one, RunAdvice)):
                advice.pause()  # Lightning tells no callback of a save of weights alone

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        if self.lifeline is not None and self.lifeline.failure:
            raise RuntimeError(
                f"No checkpoint is saved, because a save needs all ranks. {self.lifeline.failure}."
            )
        if self.synchronizer is not None:
            # This raises if a corrupt payload has arrived: such a step is not saved.
            self.synchronizer.flush()
        self._finish_saving()
        # Under SLURM every rank looks for a free name, and they may find different ones.
        groups = reading.checksum_of_groups(checkpoint.get("optimizer_states", []))

        def begin() -> tuple[str, str, int]:
            return (
                str(filepath),
                self._begin_saving(str(filepath)) if self.is_global_zero else "",
                groups,
            )

        self.check_order("a checkpoint to save")
        path, save, groups = files.write_on_all_ranks(begin, str(filepath))[0]
        path = self.own_place(path)
        if self.updates is not None and self.is_fitting:
            self.updates.check_parameters_alike()
        if files.cleans_own_disk(self, path):
            # Rank 0 has finished all earlier saves.
            for file in self._outdated:
                self.checkpoint_io.remove_checkpoint(file)
            self._outdated = [
                file for file in saved.files_beside(path) if saved.save_of(file) != save
            ]
        tables = self.sharded_tables()
        # Checkpoints of weights alone have no optimizer states.
        has_state = self.synchronizer is not None and "optimizer_states" in checkpoint
        if has_state or tables:
            steps = (
                int(checkpoint["global_step"])
                if self.synchronizer is None
                else self.synchronizer.synchronisations
            )
            manifest = saved.make_manifest(
                self.world_size, steps, save, has_state, bool(tables), self.stages
            )
            written = [""] * self.world_size
            if has_state:
                io = files.write_at_once(self.checkpoint_io)
                state = {**self._state(), "groups": groups}
                write = partial(saved.write_state, io, path, manifest, self.global_rank, state)
                written = files.write_on_all_ranks(write, path)
            if tables:
                save_rows(
                    saved.rows_path(path, manifest), tables, self.optimizers if has_state else []
                )
            # Lightning's file comes last and points at files that all ranks have completed.
            checkpoint[saved.CHECKPOINT_KEY] = saved.with_checksum(
                manifest, written, places_of(self, path, manifest)
            )
        # Of averages Lightning saves a copy of the module, whose thresholds are those before
        # training.
        compressed = self.compressed_modules()
        for name, value in checkpoint.get("current_model_state", {}).items():
            if plain_name(name.removesuffix("._extra_state")) in compressed:
                checkpoint["state_dict"][name] = value
        write_lightnings = partial(super().save_checkpoint, checkpoint, path, storage_options)
        if self.holds_shards:
            write_lightnings()  # together
        else:
            files.write_on_all_ranks(write_lightnings, path)
        if os.path.basename(path).startswith(private.SIGNAL_CHECKPOINT) and files.cleans_own_disk(
            self, path
        ):
            files.leave_sign(path)
        if self.is_global_zero:
            self._unfinished[path] = self._outdated
        if not isinstance(self.checkpoint_io, AsyncCheckpointIO):
            self._finish_saving()

    def _begin_saving(self, path: str) -> str:
        """Keep other runs from saving the checkpoint, and return the name of this save; on rank
        0.
        """
        files.lock(path)
        save = secrets.token_hex(4)
        outdated = saved.files_beside(path)
        if path in self._saves and not all(saved.save_of(file) in self._saves for file in outdated):
            rank_zero_warn(
                f"Another run saves {path!r} too, and each run replaces the other's checkpoint."
                f" {files.OWN_FOLDERS}"
            )
        self._saves |= {path, save}
        # A save that fails removes nothing: the checkpoint still points at these files.
        self._unfinished[path] = []
        self._outdated = outdated
        return save

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and its folder, once the checkpoint that replaces it is written.

        Files on disks that rank 0 does not see go with the next save.
        """
        self._finish_saving()
        if files.cleans_own_disk(self, path := self.own_place(str(filepath))):
            self._outdated += saved.files_beside(path)
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(saved.state_folder(str(filepath)))

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load Lightning's checkpoint and, when fitting, this rank's compression state beside it.

        Raises:
            FileNotFoundError: A file is missing. Raised on every rank, like the following.
            CheckpointError: A file is damaged, was changed or belongs to another checkpoint.
            ValueError: It is a folder of shards.
        """
        # Also after an error on one rank in a search for a learning rate.
        self.check_order("a checkpoint to load")
        path = saved.resolve_symlink(str(checkpoint_path))
        self._loaded_from = path
        if not self.holds_shards and os.path.isdir(path):
            raise ValueError(
                f"The checkpoint {path!r} is a folder of shards, which only `strategy='dct_fsdp'`"
                " reads. For other strategies save with"
                " `DCTFSDPStrategy(save_distributed_checkpoint=False)`."
            )
        with received(self, path) as here:
            with (
                reading.compared(here) as fingerprints,
                nullcontext() if self.updates is None else self.updates.views.shared(View.LOAD),
            ):
                # ModelParallelStrategy loads into the model here.
                checkpoint = super().load_checkpoint(here, weights_only)
            found = [checkpoint[saved.CHECKPOINT_KEY]] if saved.CHECKPOINT_KEY in checkpoint else []
            manifest = next(iter(reading.agreed_manifests(found, path, fingerprints)), None)
        if manifest is not None and manifest["has_rows"]:
            checkpoint[ROWS_KEY] = saved.rows_path(path, manifest)
            ranks = reading.files_of_ranks(self, manifest)
            folder = os.path.basename(checkpoint[ROWS_KEY])
            wanted = [
                File(name, saved.written_as(manifest, rank, f"{folder}/{name}"))
                for rank, name in zip([0, *ranks], row_files(ranks), strict=True)
            ]
            hand_over(self, checkpoint[ROWS_KEY], wanted)
        trainer = self._attached_trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            if manifest is not None and manifest["has_state"]:
                checkpoint[STATE_KEY] = reading.restore_state(self, path, manifest, weights_only)
            else:
                rank_zero_info(
                    f"{checkpoint_path} holds no state of DCTStrategy: residuals start at zero."
                )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights; sharded rows come from the folder beside the checkpoint."""
        if isinstance(self.precision_plugin, DoublePrecision):
            # Lightning converts the module later, and weights loaded as fp32 would pass for edited
            # ones.
            self.precision_plugin.convert_module(self._module)
        if self.updates is not None and self.updates.weights.parameters:
            # In mid-run, after a search for a rate, the view stays open: callbacks that average load
            # theirs next, and hooks look. At the start of a run this rank's own weights follow.
            self.updates.views.open(View.LOAD)
        tables = self.sharded_tables()
        with saved_in_shards(tables):
            super().load_model_state_dict(checkpoint, strict)
        if tables and ROWS_KEY in checkpoint:
            load_rows(checkpoint[ROWS_KEY], tables)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states and this rank's compression state; a collective call.

        This rank's own states, and those of sharded rows, come from the folder.

        Raises:
            ValueError: The checkpoint is of another model. Raised on every rank, like the
                following.
            CheckpointError: The checkpoint is corrupt, or the ranks have read different ones.
        """
        state = checkpoint.get(STATE_KEY)
        own = [] if state is None else state.get("optimizers", [])

        def load() -> dict[str, Any]:
            self._load_optimizer_states(checkpoint, own)
            if state is None or self.synchronizer is None:
                return {}
            self._restore(self.synchronizer, state)
            return reading.digest_of(self.synchronizer)

        path = self._loaded_from
        reading.check_replicas(reading.read_on_all_ranks(load, path), path)
        if ROWS_KEY in checkpoint:
            load_row_states(checkpoint[ROWS_KEY], self.sharded_tables(), self.optimizers)

    def _load_optimizer_states(
        self, checkpoint: Mapping[str, Any], own: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load this rank's own states of the optimizers if there are any, and otherwise those of
        the checkpoint.
        """
        if own and {} not in checkpoint["optimizer_states"]:  # of a folder, which nobody edits
            own = reading.with_edited_groups(
                own, checkpoint["optimizer_states"], checkpoint[STATE_KEY].get("groups")
            )
        super().load_optimizer_state_dict(
            {**checkpoint, "optimizer_states": list(own)} if own else checkpoint
        )

    def _state(self) -> dict[str, Any]:
        assert self.synchronizer is not None
        # With updates every rank's optimizer has its own state, and its loss scaler, too.
        own = (
            []
            if self.updates is None
            else [self._own_state_of(optimizer) for optimizer in self.optimizers]
        )
        scaler = {} if self.updates is None else self.precision_plugin.state_dict()
        return {
            **self.synchronizer.state_dict(),
            "optimizers": own,
            "scaler": scaler,
            "split_traffic": self.split_traffic.state_dict(),
            "accumulated": self._accumulated_gradients(),
            "modules": {
                name: module.compression_state()
                for name, module in self.compressed_modules().items()
            },
        }

    def _own_state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        return without_rows(
            Strategy.optimizer_state(self, optimizer), optimizer, self.sharded_tables()
        )

    def _accumulated_gradients(self) -> dict[str, Tensor]:
        """Gradients of micro-batches whose optimizer step is still to come; Lightning does not save
        them.
        """
        groups = [
            group
            for one in self.optimizers
            if one not in self._stepped
            for group in one.param_groups
        ]
        waiting = {parameter for group in groups for parameter in group["params"]}
        return {
            name: parameter.grad.detach().to("cpu", copy=True)
            for parameter, name in self._parameter_names().items()
            if parameter in waiting and parameter.grad is not None
        }

    def _parameter_names(self) -> dict[Tensor, str]:
        return parameter_names(self._module)

    def _restore(self, synchronizer: Synchronizer, state: dict[str, Any]) -> None:
        """Continue from a state that has been read, without a collective call."""
        synchronizer.load_state_dict(state)
        self.split_traffic.load_state_dict(state.get("split_traffic", {}))
        self._accumulated = state.get("accumulated", {})
        if scaler := state.get("scaler"):
            self.precision_plugin.load_state_dict(scaler)
        modules = self.compressed_modules()
        for name, states in state["modules"].items():
            if name in modules and states[0]:
                modules[name].load_compression_state(states)

    def _finish_saving(self) -> None:
        """Wait for background writes, then remove files of earlier saves."""
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            self.checkpoint_io.teardown()  # its only way to wait; it starts anew with the next save
        while self._unfinished:
            path, outdated = self._unfinished.popitem()
            saved.remove_outdated(self.checkpoint_io, path, outdated)
            files.unlock(path)


def warn_of_uploads(loggers: Iterable[Logger]) -> None:
    """Warn of loggers that upload checkpoints as single files; those of W&B, MLflow and Lightning
    AI can.
    """
    for logger in loggers:
        if getattr(logger, "_log_model", False) in (True, "all"):
            # The folder cannot be uploaded here either: with several nodes each disk has a part of
            # it.
            rank_zero_warn(
                f"`{type(logger).__name__}(log_model=...)` uploads each checkpoint `x.ckpt` as one"
                " file, without the folder `x.ckpt.dct` beside it. Upload the folder as well"
                " before the machine is gone, for W&B with `artifact.add_dir('x.ckpt.dct',"
                " name='model.ckpt.dct')`, and put it beside the checkpoint to resume. Without the"
                " folder, a run continues only with `missing_state='reset'`, which loses the"
                " ranks' residuals. The rows of sharded tables are lost too."
            )
