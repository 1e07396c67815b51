"""``Trainer(strategy="dct_fsdp")``: compressed exchange between replicas, and FSDP2 inside them."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dct.base_strategy import DCTStrategyBase, check_torch
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.config import DCTConfig, check_integer, check_keywords
from lightning_dct.exchange.collectives import Link
from lightning_dct.failures.collective_order import EXCHANGE, IN_FORWARD
from lightning_dct.fsdp.mesh_strategy import (
    UNIT,
    MeshStrategy,
    Unit,
    check_sharded,
    shard_of,
    sharded,
    sharded_modules,
)
from lightning_dct.law import UserSettings
from lightning_dct.sync.setup import check_settings, make_update_synchronizer
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.synchronizer import Synchronizer
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.traffic import all_gather_bytes


class DCTFSDPStrategy(DCTStrategyBase, MeshStrategy):
    """Replicas that FSDP2 shards over the ranks of a node, and that exchange compressed updates.

    Inside a replica FSDP gathers weights and reduces gradients as usual. Between replicas the ranks
    with the same shard exchange its update after every ``local_steps`` optimizer steps, as the
    ranks of :class:`~lightning_dct.DCTStrategy` do with whole weights. The state for that has the
    size of the shard.

    The strategy shards the module, unless its ``configure_model`` calls
    ``fully_shard(..., mesh=self.device_mesh["data_parallel"])``.

    Example::

        trainer = Trainer(strategy=DCTFSDPStrategy(), devices=8, num_nodes=4)

    Args:
        replicas: How many; by default one per node.
        unit: Modules to gather together: those of these classes, or the smallest ones with at least
            this many entries. Like ``mp_policy`` for a module that does not shard itself.
        mp_policy: FSDP's ``MixedPrecisionPolicy``.
        save_distributed_checkpoint: As for ModelParallelStrategy: a folder to which all ranks of a
            replica write, or one file, which plain strategies can load.
        process_group_backend: As for ModelParallelStrategy.
        timeout: As for ModelParallelStrategy.
        lifelines: As for DCTStrategy.
        **settings: Those of :class:`~lightning_dct.DCTConfig`, with ``compress="updates"``.

    Raises:
        TypeError: A setting has the wrong type, or its name is not known.
        ValueError: A setting is out of range.
        RuntimeError: This version of torch is too old.
    """

    strategy_name = "dct_fsdp"
    holds_shards = True
    dense_rival = "HSDP"
    when_alone = (
        "A single replica (`replicas=1`, the default on one node) exchanges nothing, so nothing is"
        " compressed. Give `replicas=2` or more."
    )
    not_copied_because = "which FSDP2 does not allow"
    without_tables = "Use `torch.nn.EmbeddingBag`, or `DCTStrategy`."

    def __init__(
        self,
        *,
        replicas: int | None = None,
        unit: Unit = UNIT,
        mp_policy: MixedPrecisionPolicy | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        lifelines: bool | int = True,
        **settings: Any,
    ) -> None:
        check_torch(type(self))
        if replicas is not None:
            check_integer("replicas", replicas, minimum=1)
        if not (
            isinstance(unit, type)
            or (isinstance(unit, tuple) and all(isinstance(one, type) for one in unit))
        ):
            check_integer("unit", unit, minimum=1)
        check_keywords(type(self), settings, DCTConfig)
        given = UserSettings.of(settings)
        if given.config.compress != "updates":
            raise ValueError(
                "`DCTFSDPStrategy` exchanges updates of weights; got compress='gradients'. Leave"
                " `compress` out, or use `DCTStrategy`, if each rank has room for the whole model."
            )
        super().__init__(
            given,
            lifelines,
            replicas=replicas,
            wrap_unit=unit,
            shard_settings={
                "reshard_after_forward": True,
                "mp_policy": mp_policy or MixedPrecisionPolicy(),
            },
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._hooks: list[RemovableHandle] = []

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the sharding, and set up the exchange between replicas.

        Raises:
            ValueError: A parameter is not sharded within the replica, or the ranks differ.
        """
        model: Any = self.lightning_module
        check_sharded(model, self.shard_mesh)
        check_settings(self.config, model, {}, {"replicas": self.replicas})
        for module in sharded_modules(model):
            # gloo has no mean.
            module.set_force_sum_reduction_for_comms(True)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.is_fitting = True
            self.synchronizer = self._make_updates(model)
            # Before FSDP's own hooks, which gather weights.
            self._hooks = [
                module.register_forward_pre_hook(
                    lambda *_: self.check_order(IN_FORWARD), prepend=True
                )
                for module in cast("list[nn.Module]", sharded_modules(model))
            ]
            entries = sum(local_of(p).numel() for p in self._parameter_names() if p.requires_grad)
            rank_zero_info(
                f"DCTFSDPStrategy: replicas={self.replicas}, each sharded over {self.stages} ranks;"
                f" shared weights take {4 * entries / 1e6:,.1f} MB per rank, 1 / {self.stages} of"
                " the model's."
            )

    def _takes_all_ranks(self) -> bool:
        return True  # FSDP gathers weights

    def _make_updates(self, model: pl.LightningModule) -> UpdateSynchronizer:
        modules = sharded_modules(model)
        group = self.device_mesh["replicate"].get_group()
        link = Link(self.shard_mesh.get_group(), self.traffic, self.num_processes)
        # Not public, but FSDP has no count of its own.
        for module, unit in (
            (one, unit) for one in modules for unit in one._get_fsdp_state()._fsdp_param_groups
        ):
            gather = getattr(unit._all_gather_comm, "collective", unit._all_gather_comm)
            scatter = getattr(unit._reduce_scatter_comm, "collective", unit._reduce_scatter_comm)
            module.set_custom_all_gather(_Counted(gather, link, all_gather_bytes))
            module.set_custom_reduce_scatter(
                _Counted(scatter, link, lambda size, ranks: size * (ranks - 1) // ranks)
            )
        # The ranks of a replica have buffers of their own.
        everyone = Link(dist.distributed_c10d._get_default_group(), self.traffic, self.stages)
        return make_update_synchronizer(
            self, model, group, True, lambda: self.optimizers, ShardWeights(modules), everyone
        )

    def teardown(self) -> None:
        """Detach the exchange from the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().teardown()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that all ranks come to backward, where FSDP gathers weights and reduces gradients."""
        self.check_order(f"{EXCHANGE} in backward")
        super().pre_backward(closure_loss)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, with the weights that all replicas share."""
        self.check_order("a checkpoint")
        state = super().lightning_module_state_dict()
        # Copies, because FSDP's tensors change with the weights.
        return state if self.updates is None else apply_to_collection(state, Tensor, Tensor.clone)

    def _own_state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        state = Strategy.optimizer_state(self, optimizer)
        return dict(
            apply_to_collection(
                state, Tensor, lambda tensor: local_of(tensor).detach().to("cpu", copy=True)
            )
        )

    def _accumulated_gradients(self) -> dict[str, Tensor]:
        return {
            name: local_of(gradient) for name, gradient in super()._accumulated_gradients().items()
        }

    def _take_up(self, parameter: Tensor, gradient: Tensor) -> None:
        super()._take_up(parameter, sharded(gradient, parameter))

    def _state(self) -> dict[str, Any]:
        shapes = {
            name: list(local_of(parameter).shape)
            for parameter, name in self._parameter_names().items()
        }
        return {**super()._state(), "shards": shapes}

    def _restore(self, synchronizer: Synchronizer, state: dict[str, Any]) -> None:
        if "shards" not in state:
            like = {name: parameter for parameter, name in self._parameter_names().items()}
            for part in ("weights", "residuals", "accumulated"):
                state[part] = {
                    name: shard_of(one, like.get(name)) for name, one in state.get(part, {}).items()
                }
        super()._restore(synchronizer, state)


class ShardWeights(SharedWeights):
    """The shared weights of this rank's shards.

    FSDP keeps pointers to its memory, so contents are exchanged.

    Args:
        modules: The modules that FSDP gathers, to free gathered weights of the other set.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        super().__init__()
        self._modules = modules

    def show(self) -> None:
        """Put the shared weights into the model."""
        if not self.shown:
            self._free_gathered()
        super().show()

    def hide(self) -> None:
        """Put this rank's own weights into the model again."""
        if self.shown:
            self._free_gathered()
        super().hide()

    def _is_seen_by_others(self, parameter: Tensor, ours: Mapping[int, int]) -> bool:
        return True

    def _free_gathered(self) -> None:
        for module in self._modules:
            module.reshard()

    def follow_parameters(self) -> None:
        """Do nothing: the parameters stay where they are when training ends."""


class _Counted(AllGather, ReduceScatter):
    """A collective of FSDP that counts its bytes."""

    def __init__(self, collective: Any, link: Link, num_bytes: Any) -> None:
        self.collective = collective
        self._link = link
        self._num_bytes = num_bytes

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.collective.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        size = input_tensor.numel() * input_tensor.element_size()
        self._link.count(self._num_bytes(size, self._link.size))
        return self.collective(output_tensor, input_tensor, *args, **kwargs)
