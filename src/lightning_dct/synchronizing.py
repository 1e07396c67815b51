"""What both strategies, the Trainer's and Fabric's, do around a model whose ranks are synchronised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.collectives import Link
from lightning_dct.gradients.exchanges import Exchange, make_exchange
from lightning_dct.gradients.hook import GradientSynchronizer
from lightning_dct.gradients.plan import local_of
from lightning_dct.kernels import check_kernel
from lightning_dct.traffic import Traffic
from lightning_dct.updates import SharedWeights, UpdateSynchronizer
from lightning_dct.updates.shared_weights import as_real


def parameter_names(module: Module) -> dict[Tensor, str]:
    """The name of each parameter, the same with and without ``torch.compile``: saved state must fit either."""
    return {parameter: _plain(name) for name, parameter in module.named_parameters()}


def resolve_process_group(ddp_settings: dict[str, Any]) -> dist.ProcessGroup | None:
    """The process group DDP shall use; a function that makes it is called and replaced by what it returns.

    Strategies are built, and pickled, before any process group can exist; hence the function.
    """
    group = ddp_settings.get("process_group")
    if callable(group) and not isinstance(group, dist.ProcessGroup):
        ddp_settings["process_group"] = group = group()
    return group


def make_gradient_synchronizer(
    wrapped: DistributedDataParallel,
    precision: object,
    config: DCTConfig,
    traffic: Traffic,
    place: tuple[int, int],
    timeout: timedelta | None,
) -> GradientSynchronizer:
    """The synchronizer of a wrapped model; its hook has still to be registered. All ranks call this together.

    ``precision`` is Lightning's plugin, with a ``scaler`` when it scales the loss. ``place`` is the number of this
    rank's node and its own number on that node. ``timeout`` is that of process groups that the exchange makes.

    Raises:
        ValueError: The ranks cannot do the exchange that the settings ask for, or this one cannot run the kernel.
    """
    scaler = getattr(precision, "scaler", None)
    names = _synchronised_names(wrapped.module, wrapped.parameters_to_ignore)
    exchange = exchange_of(
        config, names, wrapped.process_group, traffic, place, timeout, wrapped.find_unused_parameters
    )
    return GradientSynchronizer(
        config,
        names,
        exchange,
        defer_unused=wrapped.find_unused_parameters,
        loss_scale=None if scaler is None else scaler.get_scale,
    )


def make_update_synchronizer(
    module: Module,
    group: dist.ProcessGroup | None,
    config: DCTConfig,
    traffic: Traffic,
    place: tuple[int, int],
    timeout: timedelta | None,
    optimizers: Callable[[], Sequence[Optimizer]],
    average_buffers: bool,
    weights: SharedWeights | None = None,
    inside: Link | None = None,
    are_alike: bool = False,
) -> UpdateSynchronizer:
    """The synchronizer of a model that is not wrapped. All ranks call this together; all get the first one's weights.

    The arguments are those of :func:`make_gradient_synchronizer` and of
    :class:`~lightning_dct.updates.UpdateSynchronizer`. ``optimizers`` gives all that step, in the same order on every
    rank. ``average_buffers`` averages floating-point buffers. ``are_alike`` says that all ranks have the same
    weights already.

    Raises:
        ValueError: The ranks cannot do the exchange that the settings ask for, or this one cannot run the kernel.
    """
    group = group or dist.distributed_c10d._get_default_group()
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = _synchronised_names(module, ignored)
    exchange = exchange_of(config, names, group, traffic, place, timeout, defer_unused=False)
    if not are_alike:
        start_alike(module, group, ignored)

    def buffers() -> dict[str, Tensor]:
        found = module.named_buffers() if average_buffers else ()
        return {_plain(name): b for name, b in found if name not in ignored and b.is_floating_point() and b.numel()}

    return UpdateSynchronizer(
        config, names, exchange, buffers, optimizers, lambda: list(module.parameters()), weights, inside
    )


def start_alike(module: Module, group: dist.ProcessGroup, ignored: Collection[str] = ()) -> None:
    """Give all ranks the first one's weights and buffers, except those that are ignored; a collective call."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in ignored:
            own = as_real(local_of(tensor.detach()))
            same = own.contiguous()
            dist.broadcast(same, group=group, group_src=0)
            own.copy_(same)


def check_optimizers(config: DCTConfig, optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that write one rank's weights into the others', which train weights of their own.

    Raises:
        ValueError: With the setting and the remedy.
    """
    for optimizer in optimizers:
        if config.compress == "updates" and isinstance(optimizer, ZeroRedundancyOptimizer):
            raise ValueError(
                "`ZeroRedundancyOptimizer` needs the same weights on every rank in every step, and with"
                " `compress='updates'` each rank trains its own. Use `compress='gradients'`, or another optimizer."
            )


def _synchronised_names(module: Module, ignored: Iterable[str]) -> dict[Tensor, str]:
    # What DistributedDataParallel is told to leave alone differs between ranks.
    left_alone = {_plain(name) for name in ignored}
    return {parameter: name for parameter, name in parameter_names(module).items() if name not in left_alone}


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def exchange_of(
    config: DCTConfig,
    names: dict[Tensor, str],
    group: dist.ProcessGroup,
    traffic: Traffic,
    place: tuple[int, int],
    timeout: timedelta | None,
    defer_unused: bool,
) -> Exchange:
    """The exchange that the settings ask for; all ranks call this together."""
    for device in {parameter.device.type for parameter in names}:
        check_kernel(config.kernel, device)
    parameters = {name: parameter for parameter, name in names.items()}
    return make_exchange(config, parameters, group, place, traffic, defer_unused, timeout)
