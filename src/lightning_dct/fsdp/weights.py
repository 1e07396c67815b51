"""Both sets of weights of a rank's shards, and copies of local tensors for checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.sync.shared_weights import SharedWeights


class ShardWeights(SharedWeights):
    """The shared weights of this rank's shards. FSDP keeps pointers to its memory, so contents are exchanged.

    Args:
        modules: The modules that FSDP gathers, to free gathered weights of the other set.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        super().__init__()
        self._modules = modules

    def show(self) -> None:
        """Put the shared weights into the model."""
        if self.shown:
            return
        self._free_gathered()
        for name, parameter in self.parameters.items():
            local, stored = local_of(parameter).data, self._shared[name]
            own = local.clone()
            local.copy_(stored)
            self._own[name], self._shared[name] = stored.copy_(own), local
            self._before[name] = local.clone()

    def hide(self) -> None:
        """Put this rank's own weights into the model again."""
        if not self.shown:
            return
        self.settle()
        self._free_gathered()
        stored, self._own, self._before = self._own, {}, {}
        for name, own in stored.items():
            local = local_of(self.parameters[name]).data
            shared = local.clone()
            local.copy_(own)
            self._shared[name] = own.copy_(shared)

    def follow_parameters(self) -> None:
        """Do nothing: the parameters stay where they are when training ends."""

    def _free_gathered(self) -> None:
        for module in self._modules:
            module.reshard()


def plain(value: Any) -> Any:
    """A tree of dicts and lists with a CPU copy of the local part of every tensor."""
    return apply_to_collection(value, Tensor, lambda tensor: local_of(tensor).detach().to("cpu", copy=True))


def take_over(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load this rank's optimizer state, as :func:`plain` copied it, after the checkpoint's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        state = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(state.get(key), Tensor):
                local_of(state[key]).copy_(value)
            else:
                state[key] = value


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor with this local part, and sharded like another."""
    if not isinstance(like, DTensor):
        return local.to(like.device)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local.to(like.device), mesh, placements, shape=like.shape, stride=like.stride())
