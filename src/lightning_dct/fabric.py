"""The same for Lightning Fabric: ``import lightning_dct.fabric; Fabric(strategy="dct")``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from typing import Any

from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct import checkpoint as saved
from lightning_dct.agreement import check_agreement
from lightning_dct.config import DCTConfig, check_keywords
from lightning_dct.failures import check_lifelines, group_is_made
from lightning_dct.files import AtomicCheckpointIO
from lightning_dct.gradients import Synchronizer
from lightning_dct.profiling import recorded
from lightning_dct.restoring import agreed_notes, restore_state
from lightning_dct.strategy import DCTStrategy as TrainerStrategy
from lightning_dct.synchronizing import (
    check_optimizers,
    make_gradient_synchronizer,
    make_update_synchronizer,
    parameter_names,
    resolve_process_group,
)
from lightning_dct.traffic import Traffic
from lightning_dct.updates import UpdateSynchronizer


class DCTStrategy(DDPStrategy):
    """Fabric's DDPStrategy with compressed synchronisation.

    Fabric has no callbacks of its own, so the strategy refreshes the thresholds itself, every ``refresh_every``
    optimizer steps, and an evaluation asks for the weights that all ranks share: ``with strategy.shared_weights():``.
    ``strategy.traffic`` counts bytes; ``fabric.save`` and ``fabric.load`` with a dict that holds the
    model save and restore residuals and thresholds too.

    Args:
        accelerator: As for DDPStrategy.
        **kwargs: The settings of :class:`~lightning_dct.DCTConfig`, and everything DDPStrategy and
            DistributedDataParallel take. ``lifelines=False`` leaves the process as it is: no store of its own under
            torchrun, no pause at its end. (Lifelines themselves are the Trainer's alone.)

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range.
    """

    def __init__(self, accelerator: Accelerator | None = None, **kwargs: Any) -> None:
        self._lifelines = kwargs.pop("lifelines", True)
        check_lifelines(self._lifelines)
        check_keywords(type(self), kwargs, DCTConfig, DistributedDataParallel)
        names = {field.name for field in fields(DCTConfig)} & kwargs.keys()
        self.config = DCTConfig(**{name: kwargs.pop(name) for name in names})
        kwargs.setdefault("gradient_as_bucket_view", True)  # as the Trainer's strategy does
        super().__init__(accelerator=accelerator, **kwargs)
        self.traffic = Traffic(recorded)
        # One for each module that was set up, in that order.
        self.synchronizers: list[Synchronizer] = []
        self._optimizers: list[Optimizer] = []
        if self.config.compress == "updates":
            self._backward_sync_control = _NothingToHoldBack()

    def setup_environment(self) -> None:
        """Bring the processes up."""
        with group_is_made(self._lifelines, self._timeout):
            super().setup_environment()

    def setup_module(self, module: Module) -> Any:
        """Set synchronisation up; where gradients are exchanged, the module is wrapped with DDP."""
        self.config.check_patterns(list(parameter_names(module).values()))
        group = resolve_process_group(self._ddp_kwargs)
        plain = {name: value for name, value in self._ddp_kwargs.items() if isinstance(value, bool | int | float | str)}
        check_agreement({**vars(self.config), **plain}, module, group)
        place = (self.node_rank, self.local_rank)
        if self.config.compress == "gradients":
            wrapped = super().setup_module(module)
            synchronizer = make_gradient_synchronizer(
                wrapped, self.precision, self.config, self.traffic, place, self._timeout
            )
            wrapped.register_comm_hook(None, synchronizer.hook)
            return self._add(synchronizer, wrapped)
        average_buffers = self._ddp_kwargs.get("broadcast_buffers", True)
        own = make_update_synchronizer(
            module, group, self.config, self.traffic, place, self._timeout, lambda: self._optimizers, average_buffers
        )
        return self._add(own, module)

    def _add(self, synchronizer: Synchronizer, module: Any) -> Any:
        # Not asked for in `backward`: where a strategy overrides that, Fabric forbids `loss.backward()`.
        synchronizer.refresh_every = self.config.refresh_every
        self.synchronizers.append(synchronizer)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Remember an optimizer: each has a clock of its own."""
        check_optimizers(self.config, [optimizer])
        self._optimizers.append(optimizer)
        return super().setup_optimizer(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, and exchange what the weights have moved when it is time."""
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        updates = [
            synchronizer for synchronizer in self._updates if not stepped.isdisjoint(synchronizer.parameter_names)
        ]
        for synchronizer in updates:
            synchronizer.before_step(optimizer)
        output = super().optimizer_step(optimizer, **kwargs)
        for synchronizer in updates:
            synchronizer.after_step(optimizer)
        return output

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Have the weights that all ranks share in the modules: to evaluate, or to look at them. A collective call."""
        for synchronizer in self._updates:
            synchronizer.average_buffers()
        with self._shared_weights():
            yield

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """The state of a module, with the weights that all ranks share."""
        with self._shared_weights():
            return super().get_module_state_dict(module)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes files: by default it writes whole files or none."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save Fabric's checkpoint from rank 0, and beside it the state of each rank."""
        path, save = self.broadcast((str(path), secrets.token_hex(4)))
        notes = []
        # Optimizers come to Fabric by any name or none: their states lie in the part of the first module.
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers] if self._updates else []
        for index, synchronizer in enumerate(self.synchronizers):
            note = saved.make_note(self.world_size, synchronizer.synchronisations, f"{save}{index:02d}")
            own = {**synchronizer.state_dict(), "optimizers": [] if index else optimizers}
            saved.write_state(self.checkpoint_io, _part(path, index), note, self.global_rank, own)
            notes.append(note)
        self.barrier()
        super().save_checkpoint(path, {**state, saved.CHECKPOINT_KEY: notes}, *args, **kwargs)
        if self.is_global_zero:
            for index, note in enumerate(notes):
                saved.remove_outdated(self.checkpoint_io, _part(path, index), note)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Fabric's checkpoint and, into a dict of objects to restore, what this rank has of its own."""
        with self._shared_weights():
            remainder = super().load_checkpoint(path, state, *args, **kwargs)
        notes = remainder.pop(saved.CHECKPOINT_KEY, []) if isinstance(state, dict) and state else []
        path = saved.resolve_symlink(str(path))
        notes = agreed_notes(notes, path)
        for index, (synchronizer, note) in enumerate(zip(self.synchronizers, notes, strict=False)):
            layout = (self.global_rank, self.world_size, 1)
            own = restore_state(self.checkpoint_io, _part(path, index), note, *layout, self.config)
            synchronizer.load_state_dict(own)
            for optimizer, optimizer_state in zip(self._optimizers, own.get("optimizers", []), strict=False):
                optimizer.load_state_dict(optimizer_state)
        return remainder

    @property
    def _updates(self) -> list[UpdateSynchronizer]:
        return [synchronizer for synchronizer in self.synchronizers if isinstance(synchronizer, UpdateSynchronizer)]

    @contextmanager
    def _shared_weights(self) -> Iterator[None]:
        with ExitStack() as stack:
            for synchronizer in self._updates:
                stack.enter_context(synchronizer.weights.in_model())
            yield

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register this strategy's names with Fabric's registry."""
        for name, settings in TrainerStrategy.registered_names.items():
            strategy_registry.register(name, cls, description="DCT strategy for Fabric", override=True, **settings)


class _NothingToHoldBack(_BackwardSyncControl):
    """Backward synchronises nothing, so accumulation has nothing to suspend."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()


def _part(path: Any, index: int) -> str:
    return f"{path}.module-{index}"


DCTStrategy.register_strategies(STRATEGY_REGISTRY)
