"""What both strategies, the Trainer's and Fabric's, need to know of a model before DDP wraps it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module


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
