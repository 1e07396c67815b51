"""Sets up the synchronisation of a model, for the Trainer's and Fabric's strategies and for plain
loops alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_dct.activations.module import module_settings, plain_name
from lightning_dct.agreement import check_agreement
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.collectives import Link
from lightning_dct.exchange.factory import Host, make_exchange
from lightning_dct.sync.buffers import Buffers, buffers_of, statistics_of
from lightning_dct.sync.gradients import GradientSynchronizer
from lightning_dct.sync.masks import Masks
from lightning_dct.sync.projection import Projection
from lightning_dct.sync.row_gradients import weights_of_rows
from lightning_dct.sync.shared_weights import SharedWeights, start_alike
from lightning_dct.sync.updates import UpdateSynchronizer


def parameter_names(module: Module) -> dict[Tensor, str]:
    """The name of each parameter, the same with and without ``torch.compile``: saved state must fit
    either.
    """
    return {parameter: plain_name(name) for name, parameter in module.named_parameters()}


def check_settings(
    config: DCTConfig, module: Module, ddp_settings: dict[str, Any], more: Mapping[str, Any]
) -> dist.ProcessGroup | None:
    """Check patterns of parameter names, and compare all settings over the ranks; a collective
    call.

    Returns:
        DDP's setting ``process_group``. A function that makes the group is called and replaced by
        the group.

    Raises:
        ValueError: A pattern matches no parameter, a tensor cannot be written, this rank is not in
            the group, or the ranks differ.
    """
    config.check_patterns(list(parameter_names(module).values()))
    refuse_unwritable(module, exchanges_buffers(ddp_settings))
    group = ddp_settings.get("process_group")
    # Strategies are built, and pickled, before any process group can exist; hence the function.
    if callable(group) and not isinstance(group, dist.ProcessGroup):
        ddp_settings["process_group"] = group = group()
    refuse_group_of_others(group)
    plain = {
        name: value
        for name, value in ddp_settings.items()
        if isinstance(value, bool | int | float | str)
    }
    check_agreement({**vars(config), **plain, **more, **module_settings(module)}, module, group)
    return group


def make_gradient_synchronizer(
    host: Host, wrapped: DistributedDataParallel, scaler: Any
) -> GradientSynchronizer:
    """The synchronizer of a wrapped model, without its hook registered; all ranks call this
    together.

    ``scaler`` is the ``GradScaler`` that scales the loss, or None.

    Raises:
        ValueError: The exchange or the kernel does not work here.
    """
    names = _synchronised_names(wrapped.module, wrapped.parameters_to_ignore)
    refuse_shards(wrapped.module, names, wrapped.process_group)
    unused = wrapped.find_unused_parameters
    exchange = make_exchange(host, names, wrapped.process_group, defer_unused=unused)
    scale = None if scaler is None else scaler.get_scale
    made = GradientSynchronizer(host.config, names, exchange, defer_unused=unused, loss_scale=scale)
    made.compare_places(host.lifeline, wrapped.process_group)
    return made


def make_update_synchronizer(
    host: Host,
    module: Module,
    group: dist.ProcessGroup | None,
    exchanges_buffers: bool,
    optimizers: Callable[[], Sequence[Any]] = tuple,
    weights: SharedWeights | None = None,
    ranks_of_buffers: Link | None = None,
) -> UpdateSynchronizer:
    """The synchronizer of a model that is not wrapped; all ranks call this together, and get the
    first one's weights.

    ``ranks_of_buffers`` are those that have the same buffers, by default those of the group. The
    other arguments are as for :class:`~lightning_dct.sync.updates.UpdateSynchronizer`.

    Raises:
        ValueError: The exchange or the kernel does not work here.
    """
    if host.project is not None and not callable(host.project):
        raise TypeError(
            f"`project` must be a function of the module, or None; got {host.project!r}."
        )
    group = group or dist.distributed_c10d._get_default_group()
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = _synchronised_names(module, ignored)
    refuse_shards(module, names, group)
    if group.size() > 1:
        refuse_same_memory(names)
    exchange = make_exchange(host, names, group)
    start_alike(
        [tensor for name, tensor in module.named_parameters() if name not in ignored], group
    )
    # Not over the exchange's own group: training waits for buffers, and not for updates in flight.
    everyone = ranks_of_buffers or Link(group, host.traffic, exchange.everyone.ranks_per_node)
    buffers = Buffers()
    if exchanges_buffers:
        buffers = Buffers(
            partial(buffers_of, module, ignored), partial(statistics_of, module), everyone
        )
    buffers.exchange(averages=False)
    made = UpdateSynchronizer(
        host.config,
        names,
        exchange,
        buffers,
        optimizers,
        lambda: list(module.parameters()),
        weights,
    )
    made.project = None if host.project is None else Projection(host.project, module)
    made.masks = Masks(module)
    made.rows = weights_of_rows(module)
    made.compare_places(host.lifeline, group)
    return made


def refuse_group_of_others(group: Any) -> None:
    """Refuse what ``torch.distributed.new_group`` returns to a rank that is not in the group
    (ValueError).
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "This rank is not in `process_group`. Give each rank the group that it trains in: the"
            " one of those that `torch.distributed.new_group` has made which has this rank."
        )


def refuse_shards(
    module: Module, names: Mapping[Tensor, str], group: dist.ProcessGroup | None
) -> None:
    """Refuse parameters of which the ranks of a group hold a part each: an exchange takes them for
    replicas.

    Raises:
        ValueError: There are some; the message names the first, and the remedy.
    """
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for parameter, name in names.items():
        holders = (
            parameter.device_mesh.mesh.flatten().tolist() if isinstance(parameter, DTensor) else []
        )
        if len(ranks.intersection(holders)) > 1:
            raise ValueError(
                f"The parameter {name!r} is spread over the ranks {holders}, and these ranks"
                " exchange it as if each had the whole. For a model that `fully_shard` has sharded"
                " use Lightning's `Trainer(strategy='dct_fsdp')`, which exchanges between"
                " replicas. Or do not shard the model."
            )
    for name, one in module.named_modules():
        holders = (
            dist.get_process_group_ranks(one.process_group)
            if isinstance(one, FullyShardedDataParallel)
            else []
        )
        if len(ranks.intersection(holders)) > 1:
            raise ValueError(
                f"{f'The module {plain_name(name)!r}' if name else 'The model'} is in"
                " `FullyShardedDataParallel`, so each rank has a part of its parameters, which an"
                " exchange takes for the whole. Use Lightning's `Trainer(strategy='dct_fsdp')`,"
                " which shards by `fully_shard` and exchanges between replicas. Or do not shard"
                " the model."
            )


def refuse_unwritable(module: Module, with_buffers: bool) -> None:
    """Refuse tensors that no exchange can write: parameters that are sparse tensors, and what
    `expand` has made.

    Raises:
        ValueError: There are some; the message names the first, and the remedy.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    found: dict[str, Tensor] = {
        name: one
        for name, one in module.named_parameters()
        if name not in ignored and not is_lazy(one)
    }
    for name, one in found.items():
        if one.layout != torch.strided:
            raise ValueError(
                f"The parameter {plain_name(name)!r} is a sparse tensor ({one.layout}), and ranks"
                " exchange dense ones. If nothing trains it, make it a buffer by"
                " `register_buffer`, which stays as it is on each rank; with"
                " `compress='gradients'`, which takes no sparse buffers either, a plain attribute."
                " Or make it dense by `to_dense()`."
            )
    buffers = buffers_of(module, ignored) if with_buffers else {}
    for kind, tensors in (("parameter", found), ("buffer", buffers)):
        for name, one in tensors.items():
            if any(
                stride == 0 and size > 1
                for stride, size in zip(one.stride(), one.shape, strict=True)
            ):
                raise ValueError(
                    f"Several entries of the {kind} {plain_name(name)!r} are one number in memory,"
                    " as after `expand`, so neither an exchange nor a checkpoint can be written"
                    " into it. Register its `clone()` instead."
                )


def refuse_same_memory(names: Mapping[Tensor, str]) -> None:
    """Refuse trained parameters that are several objects over the same memory: an exchange would
    move it twice.

    Raises:
        ValueError: There are some; the message names both.
    """
    spans = [
        (one.device, one.data_ptr(), one.data_ptr() + one.nbytes, name)
        for one, name in names.items()
        if one.requires_grad
        and one.numel()
        and not (one.is_meta or isinstance(one, DTensor))
        and _fills_its_memory(one)
    ]
    spans.sort(key=lambda span: (str(span[0]), *span[1:]))
    for (device, _, end, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            raise ValueError(
                f"The parameters {name!r} and {other!r} are two objects over the same memory, as"
                " after `one.data = other.data`, so an exchange would move that memory twice. Make"
                " them one parameter, as by `decoder.weight = encoder.weight`, or give each its"
                " own memory by `one.data = one.data.clone()`."
            )


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether entries lie side by side, in any order of dimensions, as those of a transposed
    matrix do.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def exchanges_buffers(ddp_settings: Mapping[str, Any]) -> bool:
    """Whether DistributedDataParallel would give all ranks the same buffers, by its settings."""
    return not any(
        ddp_settings.get(name) is False for name in ("broadcast_buffers", "forward_sync_buffers")
    )


def _synchronised_names(module: Module, ignored: Iterable[str]) -> dict[Tensor, str]:
    # Parameters that DistributedDataParallel ignores differ between ranks.
    excluded = {plain_name(name) for name in ignored}
    return {
        parameter: name
        for parameter, name in parameter_names(module).items()
        if name not in excluded
    }
