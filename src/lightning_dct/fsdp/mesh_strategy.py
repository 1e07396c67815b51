"""Replicas x shards: a mesh for Lightning's ModelParallelStrategy, with atomic checkpoints of one
replica.

A plain LightningModule is sharded with ``fully_shard``, by size or by class.
"""

import json
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_dct.activations.module import plain_name
from lightning_dct.checkpoint.files import beside, replace, write_on_all_ranks
from lightning_dct.checkpoint.reading import read_on_all_ranks
from lightning_dct.checksums import SUMS, check_sums, checksum_of_file, with_checksum
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.lightning_private import METADATA_FILENAME, load_shards

AXES = ("replicate", "data_parallel", "tensor_parallel")
Unit = int | type | tuple[type, ...]
UNIT = 1_000_000
"""The default size of a unit, in entries."""
INDEX = ".metadata"  # of a folder of torch.distributed.checkpoint
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# These use the weights of their children without calling them.
OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Nothing calls these.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class MeshStrategy(ModelParallelStrategy):
    """Replicas of a model, each sharded over neighbouring ranks, without an exchange between
    replicas.

    ``self.device_mesh`` has the dimensions ``replicate``, ``data_parallel`` and ``tensor_parallel``
    (of size 1), so a ``configure_model`` as in Lightning's documentation shards within a replica.

    Args:
        replicas: Their number; None for one per node.
        wrap_unit: The unit of :func:`wrap`.
        shard_settings: For ``fully_shard``.
        **kwargs: As for ModelParallelStrategy.
    """

    # After the model's, and none are an error in fit, as with plain strategies.
    lightning_restore_optimizer = True

    def __init__(
        self, replicas: int | None, wrap_unit: Unit, shard_settings: dict[str, Any], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._replicas = replicas
        self._wrap_unit = wrap_unit
        self._shard_settings = shard_settings

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks of this rank's replica."""
        return self.device_mesh["data_parallel"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads data of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Start the processes, make the mesh, and prepare ``configure_model`` to shard the module.

        Raises:
            ValueError: The replicas cannot have the same size.
        """
        self._setup_distributed()
        self.replicas = self._replicas or self.num_nodes
        self.stages = self.world_size // self.replicas
        if self.world_size % self.replicas:
            raise ValueError(
                f"`replicas={self.replicas}` does not divide the {self.world_size} ranks of this"
                f" run. Use a divisor, such as {self.num_nodes}, one replica per node."
            )
        shape = (self.replicas, self.stages, 1)
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=AXES)
        module: Any = self.lightning_module  # Any: an attribute takes the place of a method
        module._device_mesh = self._device_mesh
        configure_model = module.configure_model

        def configure_and_shard() -> None:
            configure_model()
            wrap(module, self.shard_mesh, self._wrap_unit, **self._shard_settings)

        module.configure_model = configure_and_shard

    def teardown(self) -> None:
        """Restore the module's own ``configure_model``."""
        super().teardown()
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("configure_model", None)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state for a folder; or for a file, on the first rank, as plain strategies save it."""
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        # Lightning would number parameters in the model's order, and plain strategies take the
        # optimizer's.
        state = Strategy.optimizer_state(self, optimizer)
        is_first = self.is_global_zero
        whole = apply_to_collection(
            state, DTensor, lambda one: (None, one.full_tensor().cpu())[is_first]
        )
        return dict(whole) if is_first else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Save the first replica, in a hidden folder that is renamed when it is complete."""
        path = Path(filepath)
        if storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # refuses them
        if not self._save_distributed_checkpoint:
            # Lightning would have every rank delete a folder at this path, before the file is
            # there.
            write_on_all_ranks(
                lambda: Strategy.save_checkpoint(self, checkpoint, filepath), str(path)
            )
            return
        part = Path(beside(str(path), "part"))

        def begin() -> None:
            if self.is_global_zero:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)

        write_on_all_ranks(begin, str(path))
        tensors = {
            f"optimizer_{number}": one
            for number, one in enumerate(checkpoint.pop("optimizer_states", []))
        }
        tensors["state_dict"] = checkpoint.pop("state_dict")

        def write() -> dict[str, int]:
            if self.global_rank >= self.stages:
                return {}
            # Of one replica, whose ranks all fail if one does.
            save(tensors, checkpoint_id=part, process_group=self.device_mesh[AXES[1]].get_group())
            files = sorted(file.name for file in part.iterdir())
            if missing := _missing_shards(part):
                raise RuntimeError(
                    f"The checkpoint {str(path)!r} is not saved: its shards {missing} are not on the"
                    f" disk of {socket.gethostname()!r}, because this replica spans hosts without a"
                    " shared disk. Use one replica or more for each host, a shared disk, or"
                    " `save_distributed_checkpoint=False`."
                )
            return {
                name: checksum_of_file(part / name)
                for name in files[self.global_rank :: self.stages]
            }

        gathered = write_on_all_ranks(write, str(path))

        def finish() -> None:
            if self.is_global_zero:
                of_all = {name: one for theirs in gathered for name, one in theirs.items()}
                (part / SUMS).write_bytes(with_checksum(json.dumps(of_all).encode()))
                # Given a name, `torch.save` does not tell how a disk has failed.
                with open(part / METADATA_FILENAME, "wb") as file:
                    torch.save(checkpoint, file)
                replace(part, path)

        write_on_all_ranks(finish, str(path))

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and, in fit, the optimizers of a folder.

        Those of a file are loaded later, as elsewhere.

        First the ranks of a node compare the folder's files with their checksums, each rank a part
        of them.

        Raises:
            FileNotFoundError: A file is missing. Raised on every rank, like the following.
            CheckpointError: A file is damaged or was changed.
        """
        path = Path(checkpoint_path)  # of this host's own disk, which may have a copy
        read_on_all_ranks(lambda: check_sums(path, self.local_rank, self.num_processes), str(path))
        module: Any = self.lightning_module
        keys = FileSystemReader(path).read_metadata().state_dict_metadata if path.is_dir() else {}
        saved = [key.partition(".state.") for key in keys if not key.startswith("state_dict.")]
        number = len({key.partition(".")[0] for key, _, _ in saved})
        # torch loads a state for every parameter that requires a gradient. Those that have had none
        # until the save have no state in the folder, so they are frozen meanwhile.
        known = {name.rpartition(".")[0] for _, _, name in saved}
        trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        unknown = nn.ParameterList(one for name, one in trained if plain_name(name) not in known)
        optimizers = self._optimizers
        try:
            self._optimizers = (
                optimizers[:number] if module.trainer.state.fn == TrainerFn.FITTING else []
            )
            unknown.requires_grad_(False)
            # Lightning's own method would read on every host at rank 0's path.
            checkpoint = load_shards(
                path, self.model, self.optimizers, module.strict_loading, weights_only
            )
        finally:
            self._optimizers = optimizers
            unknown.requires_grad_(True)
        return {**checkpoint, "optimizer_states": [{}] * number} if number else checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states of whole tensors or of this rank's shards; those of a folder are empty and
        loaded already.
        """
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if saved:
                numbers = [number for group in saved["param_groups"] for number in group["params"]]
                parameters = [one for group in optimizer.param_groups for one in group["params"]]
                like = dict(zip(numbers, parameters, strict=False))
                states = saved["state"]
                states = {
                    n: apply_to_collection(one, Tensor, sharded, like.get(n))
                    for n, one in states.items()
                }
                optimizer.load_state_dict({**saved, "state": states})


def _missing_shards(folder: Path) -> list[str]:
    """The files that a folder's index names and that are not in it; without an index, that one."""
    if not (folder / INDEX).exists():
        return [INDEX]
    places = FileSystemReader(folder).read_metadata().storage_data.values()
    names = {place.relative_path for place in places}
    return sorted(name for name in names if not (folder / name).exists())


def wrap(model: pl.LightningModule, mesh: DeviceMesh, unit: Unit, **settings: Any) -> None:
    """Shard all parameters of a module that has not sharded itself, over a one-dimensional mesh, by
    ``fully_shard``.

    Its steps gather the parameters outside units, such as those that several modules share. With
    manual optimisation backward runs in a step, so each child is a unit.
    """
    if isinstance(model, FSDPModule) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        return
    for module in _units_of(model, unit):
        fully_shard(module, mesh=mesh, **settings)
    for step in STEPS if model.automatic_optimization else ():
        if is_overridden(step, model):
            register_fsdp_forward_method(model, step)


def _units_of(model: pl.LightningModule, unit: Unit) -> list[nn.Module]:
    """The modules that :func:`wrap` shards, inner ones first."""
    units: list[nn.Module] = []
    taken: set[Tensor] = set()
    candidates = list(_inside_out(model))
    if not (
        isinstance(unit, int) or any(isinstance(module, unit) for module in [*candidates, model])
    ):
        raise ValueError(
            f"`{type(model).__name__}` has no module of the classes in `unit={unit!r}` that FSDP"
            " could gather. Name classes of modules that it calls, or a number of entries, such as"
            f" `unit={UNIT}`."
        )
    shared = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for module in candidates:
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        is_unit = (
            sum(p.numel() for p in own) >= unit
            if isinstance(unit, int)
            else isinstance(module, unit)
        )
        here = Counter(
            parameter for _, parameter in module.named_parameters(remove_duplicate=False)
        )
        if own and is_unit and all(here[parameter] == shared[parameter] for parameter in own):
            units.append(module)
            taken.update(own)
    for module in [model] if model.automatic_optimization else _callable_children(model):
        if module is model or not taken.issuperset(module.parameters()):
            units.append(module)
            taken.update(module.parameters())
    return units


def check_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse trained parameters that are not sharded within a replica, and sparse gradients
    (ValueError).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"`{name}` is an embedding with `sparse=True`, and FSDP2 shards dense gradients"
                " only. Leave that out, or use `strategy='dct'`."
            )
    remedy = (
        "Call `fully_shard(module, mesh=self.device_mesh['data_parallel'])` for all modules in"
        " `configure_model`, or leave `configure_model` out and let `DCTFSDPStrategy` do it."
    )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise ValueError(f"Parameter {name!r} is trained but is not sharded. {remedy}")
        elif parameter.device_mesh != mesh:
            raise ValueError(
                f"Parameter {name!r} is spread over the mesh {parameter.device_mesh}. FSDP would"
                " synchronise the replicas in it itself, uncompressed, and tensor parallelism is"
                f" not supported. {remedy}"
            )


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP gathers, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard_of(whole: Tensor, like: Tensor | None) -> Tensor:
    """This rank's shard of a whole tensor for the parameter ``like``; flat if the whole is flat."""
    if not isinstance(like, DTensor):
        return whole
    part = distribute_tensor(
        whole.reshape(like.shape), like.device_mesh, like.placements, src_data_rank=None
    )
    return part.to_local() if whole.shape == like.shape else part.to_local().reshape(-1)


def sharded(tensor: Tensor, like: Tensor | None) -> Tensor:
    """What belongs to the parameter ``like``, of which this is the whole or this rank's shard,
    sharded like it.
    """
    if not isinstance(like, DTensor) or not tensor.ndim:
        return tensor
    local = (tensor if tensor.shape == local_of(like).shape else shard_of(tensor, like)).to(
        like.device, copy=True
    )
    return DTensor.from_local(
        local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, OPAQUE):
            yield from _inside_out(child)
        if not isinstance(child, CONTAINERS):
            yield child


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _callable_children(child)
        else:
            yield child
