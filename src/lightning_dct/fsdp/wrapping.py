"""Shards a plain LightningModule with ``fully_shard``, by size or by class, and refuses other sharding."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

Unit = int | type | tuple[type, ...]
UNIT = 1_000_000
"""The default size of a unit, in entries."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# These use the weights of their children without calling them.
OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Nothing calls these.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def wrap(model: pl.LightningModule, mesh: DeviceMesh, unit: Unit, **settings: Any) -> None:
    """Shard all parameters of a module that has not sharded itself.

    Args:
        model: The module. Its steps gather the parameters outside units. With manual optimisation backward runs in a
            step, so each child is a unit.
        mesh: The ranks, one-dimensional.
        unit: Modules to gather and free together: those of these classes, or the smallest ones with at least this many
            entries. Parameters that several modules share are not in units.
        **settings: As for ``fully_shard``.
    """
    if isinstance(model, FSDPModule) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
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

    def add(module: nn.Module) -> None:
        units.append(module)
        taken.update(module.parameters())

    shared = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for module in _inside_out(model):
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        is_unit = sum(p.numel() for p in own) >= unit if isinstance(unit, int) else isinstance(module, unit)
        here = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
        if own and is_unit and all(here[parameter] == shared[parameter] for parameter in own):
            add(module)
    if model.automatic_optimization:
        add(model)
        return units
    for child in _callable_children(model):
        if not taken.issuperset(child.parameters()):
            add(child)
    return units


def check_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse trained parameters that are not sharded within a replica, and sparse gradients (ValueError)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"`{name}` is an embedding with `sparse=True`, and FSDP2 shards dense gradients only. Leave that out,"
                " or use `strategy='dct'`."
            )
    remedy = (
        "Call `fully_shard(module, mesh=self.device_mesh['data_parallel'])` for all modules in `configure_model`, or"
        " leave `configure_model` out and let `DCTFSDPStrategy` do it."
    )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise ValueError(f"Parameter {name!r} is trained but is not sharded. {remedy}")
        elif parameter.device_mesh != mesh:
            raise ValueError(
                f"Parameter {name!r} is spread over the mesh {parameter.device_mesh}. FSDP would synchronise the"
                f" replicas in it itself, uncompressed, and tensor parallelism is not supported. {remedy}"
            )


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP gathers, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard, along dimension 0, of a whole tensor for the parameter ``like``; flat if the whole is flat."""
    if not isinstance(like, DTensor):
        return whole
    rows = -(-like.shape[0] // like.device_mesh.size())
    first = rows * like.device_mesh.get_local_rank()
    part = whole.reshape(like.shape)[first : first + rows]
    return part if whole.shape == like.shape else part.reshape(-1)


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
