"""``DCTStrategy`` for Lightning Fabric: ``import lightning_dct.fabric; Fabric(strategy="dct")``."""

import math
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct.activations.module import modules_of
from lightning_dct.agreement import check_agreement, describe_optimizers, gather_objects
from lightning_dct.checkpoint import format as saved
from lightning_dct.checkpoint import reading
from lightning_dct.checkpoint.files import (
    AtomicCheckpointIO,
    cleans_own_disk,
    lock,
    unlock,
    write_on_all_ranks,
)
from lightning_dct.checkpoint.handing_over import places_of, received
from lightning_dct.clipping import clip_by_norm_of_mean
from lightning_dct.compress.awaited import clock_of, recorded
from lightning_dct.config import DCTConfig, check_density, check_keywords
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.failures.collective_order import EXCHANGE
from lightning_dct.failures.lifeline import Lifeline, check_lifelines, lifeline_of_process
from lightning_dct.failures.process_group import group_is_made
from lightning_dct.law import RunSettings, UserSettings
from lightning_dct.lightning_private import BackwardSyncControl
from lightning_dct.registration import ENDINGS
from lightning_dct.sync import setup
from lightning_dct.sync.entrance import StepEntrance, calls_step
from lightning_dct.sync.optimizer_trial import refuse, warn_of_late_gradients
from lightning_dct.sync.synchronizer import Synchronizer
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.sync.views import View
from lightning_dct.traffic import Traffic


class DCTStrategy(DDPStrategy):
    """Fabric's DDPStrategy with compressed synchronisation.

    Fabric has no callbacks of its own, so the strategy itself refreshes the thresholds every
    ``refresh_every`` optimizer steps. Evaluate the shared weights in ``with
    strategy.shared_weights():``. ``strategy.traffic`` counts bytes. ``fabric.save`` and
    ``fabric.load`` with a dict that has the model also save and restore residuals and thresholds.

    Args:
        accelerator: As for DDPStrategy.
        **kwargs: The settings of :class:`~lightning_dct.DCTConfig`, and everything DDPStrategy and
            DistributedDataParallel take. ``lifelines`` and ``project`` are as for Lightning's
            Trainer.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range.
    """

    # Ranks that together hold one replica of the parameters.
    stages = 1
    holds_shards = False
    lifeline: Lifeline | None = None

    def __init__(self, accelerator: Accelerator | None = None, **kwargs: Any) -> None:
        self._lifelines = kwargs.pop("lifelines", True)
        self.project: Callable[[Module], None] | None = kwargs.pop("project", None)
        check_lifelines(self._lifelines)
        check_keywords(type(self), kwargs, DCTConfig, DDPStrategy, DistributedDataParallel)
        names = {field.name for field in fields(DCTConfig)} & kwargs.keys()
        self.user_settings = UserSettings.of({name: kwargs.pop(name) for name in names})
        self.config = self.user_settings.config
        kwargs.setdefault("gradient_as_bucket_view", True)  # as the Trainer's strategy does
        super().__init__(accelerator=accelerator, **kwargs)
        self.traffic = Traffic(recorded)
        self._has_told_of_flight = False
        if self.config.compress == "updates":
            self._backward_sync_control = _NoBackwardSync()

    def setup_environment(self) -> None:
        """Start the processes."""
        with group_is_made(self, self._lifelines, self._timeout):
            super().setup_environment()
        self.lifeline = lifeline_of_process(self._lifelines)
        self.traffic.clock = clock_of(self.root_device)
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        self._expect(self.world_size)
        # In the order of setup. Programs such as a cross-validation set up many, and drop them
        # again. Here, because the strategy is pickled before.
        self._synchronized: weakref.WeakKeyDictionary[Module, _Synchronized] = (
            weakref.WeakKeyDictionary()
        )
        # The synchronizer of a module must see the steps of every optimizer that trains its
        # parameters.
        self._trained: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        self._numbers = count()

    def _expect(self, ranks: int) -> None:
        """Take the settings of a run in which so many ranks exchange with each other.

        Fabric does not know how long a run is, so its settings follow the steps that it has made.
        """
        self._run_settings = RunSettings(self.user_settings, ranks, math.inf)
        self.config = self._run_settings.config_after(0)

    def setup_module(self, module: Module) -> Any:
        """Set up synchronisation, and wrap the module with DDP if gradients are exchanged."""
        if self.world_size > 1 and (tables := modules_of(module, ShardedEmbeddingBags)):
            raise ValueError(
                "Fabric's `DCTStrategy` cannot hold `ShardedEmbeddingBags`"
                f" ({', '.join(map(repr, tables))}), which are spread over the ranks. Use"
                " Lightning's Trainer."
            )
        if self.config.compress == "updates":
            self._refuse_shared(module)
        group = setup.check_settings(self.user_settings.config, module, self._ddp_kwargs, {})
        if (
            ranks := self.world_size if group is None else group.size()
        ) != self._run_settings.ranks:
            self._expect(ranks)
        synchronizer: Synchronizer
        entrance: StepEntrance | None = None
        if self.config.compress == "gradients":
            # The errors of DistributedDataParallel name neither the parameter nor a remedy.
            setup.refuse_shards(module, setup.parameter_names(module), group)
            module = super().setup_module(module)
            synchronizer = setup.make_gradient_synchronizer(
                self, module, getattr(self.precision, "scaler", None)
            )
            module.register_comm_hook(None, synchronizer.hook)
        else:
            # The module must not live as long as its synchronizer, which lives as long as the
            # module.
            proxy: Any = weakref.proxy(module)
            synchronizer = updates = setup.make_update_synchronizer(
                self, proxy, group, setup.exchanges_buffers(self._ddp_kwargs)
            )
            updates.run_settings = self._run_settings
            updates.may_skip = getattr(self.precision, "scaler", None) is not None
            entrance = StepEntrance(updates)
            entrance.watch()
        # The synchronizer itself requests refreshes: if a strategy overrides `backward`, Fabric
        # forbids `loss.backward()`.
        synchronizer.refresh_every = self.config.refresh_every
        self._synchronized[module] = _Synchronized(next(self._numbers), synchronizer, entrance)
        for optimizer in list(self._trained):
            self._trained_by(optimizer)
        return module

    def set_density(self, density: float) -> None:
        """As ``DCTStrategy.set_density`` for the Trainer, for all modules that are set up.

        ``fabric.save`` keeps it.

        Raises:
            RuntimeError: No module is set up.
        """
        check_density("set_density(density)", density)
        if not self._synchronized:
            raise RuntimeError(
                "`set_density` changes the density of modules that are set up, and there is none."
                f" Call it after `fabric.setup`, or give `density={density:g}` to the strategy."
            )
        self._check_order("a change of the density")
        check_agreement({"set_density(density)": float(density)}, Module(), None)
        for its in self._synchronized.values():
            its.synchronizer.set_density(float(density))

    def _refuse_shared(self, module: Module) -> None:
        """Refuse a module with parameters of another one that was set up (ValueError): both would
        exchange them.
        """
        names = setup.parameter_names(module)
        for other, its in self._synchronized.items():
            shared = [names[one] for one in its.synchronizer.parameter_names if one in names]
            if shared and other is not module and isinstance(its.synchronizer, UpdateSynchronizer):
                raise ValueError(
                    f"The parameter {shared[0]!r} is also in a module that was set up before, and"
                    " both would exchange its updates. Put both modules into one `torch.nn.Module`"
                    " and set that up. If the other one is no longer needed, delete it and its"
                    " optimizer first. Or use `compress='gradients'`."
                )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Register an optimizer."""
        if self.config.compress == "updates":
            refuse(optimizer)
        names = {
            one: name
            for its in self._synchronized.values()
            for one, name in its.synchronizer.parameter_names.items()
        }
        check_agreement(describe_optimizers([optimizer], names), Module(), None)
        self._trained_by(optimizer)
        if any(one.delays_gradients and one.is_stepped_by(optimizer) for one in self.synchronizers):
            warn_of_late_gradients(optimizer)
        return super().setup_optimizer(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, which the entrances of modules see, too, if a loss scaler skips it."""
        entrances = self._trained_by(optimizer)
        with calls_step(optimizer, entrances):
            output = super().optimizer_step(optimizer, **kwargs)
        if self.project is not None and not entrances:
            for module in self._trained[optimizer]:
                self.project(module.module)
        return output

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of the ranks' mean gradient: with updates each rank's own gradients are
        longer.
        """
        entrances = self._trained_by(optimizer)
        if len(entrances) != 1 or norm_type != 2.0:
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        self.precision.unscale_gradients(optimizer)
        norm = clip_by_norm_of_mean(
            self.precision.main_params(optimizer), max_norm, entrances[0].updates.norm_of_mean
        )
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                "The norm of the gradients is not finite, so they cannot be clipped. Look at the"
                " loss, or give `error_if_nonfinite=False`."
            )
        return norm

    def _check_order(self, name: str, group: Any = None) -> None:
        """Check that all ranks of a group do the same here (RuntimeError); see
        ``collective_order.py``.
        """
        if self.lifeline is not None:
            peers = range(self.world_size) if group is None else dist.get_process_group_ranks(group)
            self.lifeline.check_order(name, name, peers)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self._check_order("a barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        self._check_order("a broadcast")
        return super().broadcast(obj, src)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor of all ranks."""
        self._check_order(f"{EXCHANGE} of reduced values", group)
        return super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gather a tensor of all ranks."""
        self._check_order(f"{EXCHANGE} of gathered values", group)
        return super().all_gather(tensor, group, sync_grads)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Have the weights that all ranks share in the modules, to evaluate or save them; a
        collective call.

        Updates in flight, as with ``overlap_steps``, are applied before: Fabric has no end of a run
        that would do it.
        """
        # As where a function that evaluates calls another. Modules that have been trained since are
        # shown again.
        if self._updates and all(View.EVALUATION in one.views for one in self._updates):
            yield
            return
        # Keeps the modules alive meanwhile.
        self._check_order("an evaluation")
        own = {its.number: (module, its.synchronizer) for module, its in self._synchronized.items()}
        # Ranks delete a module that the user has dropped at different times, and its buffers need
        # all ranks.
        everywhere = set.intersection(*gather_objects(set(own)))
        with ExitStack() as stack:
            for number, (_, synchronizer) in own.items():
                if not isinstance(synchronizer, UpdateSynchronizer):
                    continue
                views = synchronizer.views
                if number in everywhere and View.EVALUATION not in views:
                    synchronizer.apply_all()
                    view = views.shared(View.EVALUATION, synchronizer.exchange_buffers)
                    stack.enter_context(view)
                    synchronizer.check_parameters_alike()
                else:
                    stack.enter_context(views.shared(View.EVALUATION))
            yield

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """The state of a module, with the weights that all ranks share."""
        with self._shared_weights(View.SAVE):
            # Copies, because the memory of some weights holds each rank's own again afterwards.
            return apply_to_collection(super().get_module_state_dict(module), Tensor, Tensor.clone)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save Fabric's checkpoint from rank 0, and beside it the state of each rank of the modules
        in ``state``.
        """
        path, save = self.broadcast((str(path), secrets.token_hex(4)))
        try:
            self._save(path, save, state, *args, **kwargs)
        finally:
            unlock(path)

    def _save(self, path: str, save: str, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        modules = self._modules_in(state)
        self._tell_of_flight([synchronizer for _, synchronizer in modules], path)
        parts = [_part(path, index) for index in range(len(modules))]
        # Left by a save of more modules.
        while saved.files_beside(earlier := _part(path, len(parts))):
            parts.append(earlier)

        def begin() -> None:
            if self.is_global_zero:
                lock(path)

        write_on_all_ranks(begin, path)
        # The first rank of a node may have to clean the node's disk.
        outdated = {part: saved.files_beside(part) for part in parts if self.local_rank == 0}
        # No rank writes before these are known.
        self.barrier()
        manifests = []
        for index, (key, synchronizer) in enumerate(modules):
            if isinstance(synchronizer, UpdateSynchronizer):
                synchronizer.check_parameters_alike()
            manifest = saved.make_manifest(
                self.world_size, synchronizer.synchronisations, f"{save}{index:02d}"
            )
            optimizers: list[list[Any]] = [
                [name, one.state_dict()] for name, one in _optimizers_of(synchronizer, state)
            ]
            groups = self.broadcast(
                {name: reading.checksum_of_groups([one]) for name, one in optimizers}
            )
            own = {
                **synchronizer.state_dict(),
                "optimizers": optimizers,
                "optimizer_groups": groups,
            }
            place = _part(path, index)
            write = partial(
                saved.write_state, self.checkpoint_io, place, manifest, self.global_rank, own
            )
            complete = saved.with_checksum(
                manifest, write_on_all_ranks(write, place), places_of(self, place, manifest)
            )
            manifests.append({**complete, "module": key})
        whole = {**state, saved.CHECKPOINT_KEY: manifests}
        write_lightnings = partial(super().save_checkpoint, path, whole, *args, **kwargs)
        self.barrier()
        write_on_all_ranks(write_lightnings, path)
        if self.is_global_zero or cleans_own_disk(self, path):
            for part in parts:
                saved.remove_outdated(self.checkpoint_io, part, outdated[part])
                saved.keep_older(part, path)

    def _tell_of_flight(self, saved_ones: list[Synchronizer], path: str) -> None:
        """Say once that a checkpoint's weights lack updates in flight: a resumed run needs them as
        they are.
        """
        lacks = any(isinstance(one, UpdateSynchronizer) and one.is_in_flight for one in saved_ones)
        if lacks and not self._has_told_of_flight:
            self._has_told_of_flight = True
            rank_zero_info(
                f"The weights in {path!r} lack the updates that are in flight (`overlap_steps`),"
                " which a run that resumes from it applies. Save the weights of a run that ends"
                " within `with fabric.strategy.shared_weights():`, which applies them before."
            )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load Fabric's checkpoint and, with a dict of objects to restore, this rank's own state.

        Raises:
            FileNotFoundError: A file is missing. Raised on every rank, like the following.
            CheckpointError: A file is damaged, was changed or belongs to another checkpoint.
        """
        file = saved.resolve_symlink(str(path))
        wanted = state if isinstance(state, dict) else {}
        with received(self, file) as here:
            with reading.compared(here) as fingerprints, self._shared_weights(View.LOAD):
                remainder = super().load_checkpoint(here, state, strict, weights_only)
            manifests = reading.agreed_manifests(
                remainder.pop(saved.CHECKPOINT_KEY, []) if wanted else [], file, fingerprints
            )
        by_key = {
            manifest.get("module"): (_part(file, index), manifest)
            for index, manifest in enumerate(manifests)
        }
        for key, synchronizer in self._modules_in(wanted):
            if key in by_key:
                load = partial(
                    _continue,
                    synchronizer,
                    reading.restore_state(self, *by_key[key], weights_only),
                    wanted,
                )
                reading.check_replicas(reading.read_on_all_ranks(load, file), file)
            else:
                rank_zero_info(
                    f"{path} holds no state of DCTStrategy for {key!r}: its residuals start at"
                    " zero."
                )
                traffic = synchronizer.traffic.state_dict()  # of all modules
                synchronizer.load_state_dict(
                    {**reading.state_of_nothing(synchronizer.synchronisations), "traffic": traffic}
                )
        return remainder

    def _modules_in(self, state: Mapping[str, Any]) -> list[tuple[str, Synchronizer]]:
        """The keys and synchronizers of the modules in Fabric's state."""
        found = self._synchronized.items()
        return [
            (key, its.synchronizer)
            for module, its in found
            for key, one in state.items()
            if one is module
        ]

    def _trained_by(self, optimizer: Optimizer) -> list[StepEntrance]:
        """The entrances of the modules that an optimizer steps; it gets a number there, and keeps
        the modules alive.
        """
        found = [
            (module, its)
            for module, its in self._synchronized.items()
            if its.synchronizer.is_stepped_by(optimizer)
        ]
        self._trained[optimizer] = [module for module, _ in found]
        entrances = [its.entrance for _, its in found if its.entrance is not None]
        for entrance in entrances:
            if not entrance.updates.known.has(optimizer):
                entrance.follow(optimizer)
        return entrances

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """Those of all modules that are alive, in the order of setup."""
        return [its.synchronizer for its in self._synchronized.values()]

    @property
    def _updates(self) -> list[UpdateSynchronizer]:
        return [
            synchronizer
            for synchronizer in self.synchronizers
            if isinstance(synchronizer, UpdateSynchronizer)
        ]

    @contextmanager
    def _shared_weights(self, view: View) -> Iterator[None]:
        """Have the shared weights in all modules within the context."""
        with ExitStack() as stack:
            for synchronizer in self._updates:
                stack.enter_context(synchronizer.views.shared(view))
            yield


class _Synchronized(NamedTuple):
    """A module's number, its synchronizer, and the entrance of steps if updates are exchanged."""

    number: int
    synchronizer: Synchronizer
    entrance: StepEntrance | None


class _NoBackwardSync(BackwardSyncControl):
    """Backward does not synchronise, so gradient accumulation has nothing to suspend."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _continue(
    synchronizer: Synchronizer, own: dict[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Continue from what has been read, without a collective call; what all ranks must have
    alike.
    """
    synchronizer.load_state_dict(own)
    states = dict(own.get("optimizers", []))
    groups = own.get("optimizer_groups", {})
    for key, optimizer in _optimizers_of(synchronizer, state):
        if key in states:
            theirs = optimizer.state_dict()  # Lightning's file has been loaded
            (mine,) = reading.with_edited_groups([states[key]], [theirs], groups.get(key))
            optimizer.load_state_dict(dict(mine))
    return reading.digest_of(synchronizer)


def _optimizers_of(
    synchronizer: Synchronizer, state: Mapping[str, Any]
) -> list[tuple[str, Optimizer]]:
    """The optimizers in Fabric's state that step parameters of a module of which ranks exchange
    updates.
    """
    found = [(key, one) for key, one in state.items() if isinstance(one, Optimizer)]
    has_updates = isinstance(synchronizer, UpdateSynchronizer)
    return [(key, one) for key, one in found if has_updates and synchronizer.is_stepped_by(one)]


def _part(path: Any, index: int) -> str:
    return f"{path}.module-{index}"


for _name, _ending in product(("dct", "ddp_dct"), ENDINGS):
    STRATEGY_REGISTRY.register(
        _name + _ending,
        DCTStrategy,
        description="DCT strategy for Fabric",
        override=True,
        **ENDINGS[_ending],
    )
