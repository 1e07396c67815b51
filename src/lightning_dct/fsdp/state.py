"""What lies on this rank of tensors that are spread: copied to be saved, and put in its place again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dct.gradients.plan import local_of


def plain(value: Any) -> Any:
    """A tree of dicts and lists with every tensor in it as what lies on this rank, copied to the CPU."""
    return apply_to_collection(value, Tensor, lambda tensor: local_of(tensor).detach().to("cpu", copy=True))


def take_over(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put what :func:`plain` has made of this rank's ``optimizer.state_dict()`` into the optimizer.

    The optimizer has a state already: that of the checkpoint, whose settings are those of all replicas.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        state = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(state.get(key), Tensor):
                local_of(state[key]).copy_(value)
            else:
                state[key] = value


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor that is spread as another is, of which this lies on this rank."""
    if not isinstance(like, DTensor):
        return local.to(like.device)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local.to(like.device), mesh, placements, shape=like.shape, stride=like.stride())
