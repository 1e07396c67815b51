"""Both sets of weights of a rank's shards, and copies of local tensors for checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
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
        if not self.shown:
            self._own, self._shared = self._shared, self._exchange_contents(self._shared)
            self._before = {name: shown.clone() for name, shown in self._shared.items()}

    def hide(self) -> None:
        """Put this rank's own weights into the model again."""
        if self.shown:
            self.settle()
            self._exchange_contents(self._own)
            self._shared.update(self._own)
            self._own, self._before = {}, {}

    def follow_parameters(self) -> None:
        """Do nothing: the parameters stay where they are when training ends."""

    def _exchange_contents(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Exchange the contents of the model's weights and of others, by name, and return the model's."""
        for module in self._modules:
            module.reshard()
        in_model = {name: local_of(self.parameters[name]).data for name in others}
        for name, local in in_model.items():
            before = local.clone()
            local.copy_(others[name])
            others[name].copy_(before)
        return in_model


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
