"""What both strategies, the Trainer's and Fabric's, do around the wrapping of a model with DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.correction import MomentumCorrection
from lightning_dct.gradients.exchanges import make_exchange
from lightning_dct.gradients.momentum import resting_momentum
from lightning_dct.gradients.synchronizer import GradientSynchronizer
from lightning_dct.kernels import check_kernel
from lightning_dct.traffic import Traffic


def parameter_names(module: Module) -> dict[Tensor, str]:
    """The name of each parameter, the same with and without ``torch.compile``: saved state must fit either."""
    return {parameter: name.replace("_orig_mod.", "") for name, parameter in module.named_parameters()}


def resolve_process_group(ddp_settings: dict[str, Any]) -> dist.ProcessGroup | None:
    """The process group DDP shall use; a function that makes it is called and replaced by what it returns.

    Strategies are built, and pickled, before any process group can exist; hence the function.
    """
    group = ddp_settings.get("process_group")
    if callable(group) and not isinstance(group, dist.ProcessGroup):
        ddp_settings["process_group"] = group = group()
    return group


def make_synchronizer(
    wrapped: DistributedDataParallel,
    precision: object,
    config: DCTConfig,
    traffic: Traffic,
    place: tuple[int, int],
    timeout: timedelta | None,
    correction: MomentumCorrection | None = None,
) -> GradientSynchronizer:
    """The synchronizer of a wrapped model; its hook has still to be registered. All ranks call this together.

    Args:
        wrapped: The model.
        precision: Lightning's precision plugin, with a ``scaler`` when it scales the loss.
        config: The settings.
        traffic: Where bytes and time are counted.
        place: The number of this rank's node and its own number on that node.
        timeout: Of process groups that the exchange makes.
        correction: Where momentum is applied before compressing, what knows it.

    Raises:
        ValueError: The ranks cannot do the exchange that the settings ask for, or this one cannot run the kernel.
    """
    for device in {parameter.device.type for parameter in wrapped.parameters()}:
        check_kernel(config.kernel, device)
    scaler = getattr(precision, "scaler", None)
    names = parameter_names(wrapped.module)
    # What DistributedDataParallel leaves alone differs between ranks.
    ignored = {name.replace("_orig_mod.", "") for name in wrapped.parameters_to_ignore}
    synchronised = {parameter: name for parameter, name in names.items() if name not in ignored}
    exchange = make_exchange(
        config,
        {name: parameter for parameter, name in synchronised.items()},
        wrapped.process_group,
        place,
        traffic,
        wrapped.find_unused_parameters,
        timeout,
    )
    return GradientSynchronizer(
        config,
        synchronised,
        exchange,
        hold_unused=wrapped.find_unused_parameters,
        loss_scale=None if scaler is None else scaler.get_scale,
        correction=correction,
    )


def momentum_at_rest(optimizer: Optimizer, synchronizer: GradientSynchronizer | None) -> AbstractContextManager[None]:
    """Where an optimizer steps: with its momentum at rest where a synchronizer has what stands in for it."""
    if synchronizer is None or synchronizer.config.momentum == "keep":
        return nullcontext()
    if synchronizer.correction is not None:
        return synchronizer.correction.at_rest(optimizer)
    return resting_momentum(optimizer, synchronizer, _tell_once)


@lru_cache(maxsize=64)
def _tell_once(sentence: str) -> None:
    rank_zero_info(sentence)
