"""Both sets of weights of a rank's shards. FSDP keeps pointers into them, so contents change places, not pointers."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from lightning_dct.gradients.plan import local_of
from lightning_dct.updates import SharedWeights


class ShardWeights(SharedWeights):
    """The shared weights of what this rank holds of a sharded model.

    Args:
        modules: The modules that FSDP gathers: what they have gathered of the other set is freed.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        super().__init__()
        self._modules = modules

    def show(self) -> None:
        """Let the shared weights stand in the model."""
        if self.shown:
            return
        self._free_gathered()
        for name, parameter in self.parameters.items():
            local, stored = local_of(parameter).data, self._shared[name]
            own = local.clone()
            local.copy_(stored)
            self._own[name], self._shared[name] = stored.copy_(own), local
            self._versions[name] = local_of(parameter)._version

    def hide(self) -> None:
        """Let this rank's own weights stand in the model again; what was written into the shared ones becomes both."""
        self._free_gathered()
        stored, self._own = self._own, {}
        for name, own in stored.items():
            parameter = self.parameters[name]
            local = local_of(parameter)
            is_as_shown = local._version == self._versions[name]
            shared = local.detach().clone()
            if is_as_shown:
                local.data.copy_(own)
            self._shared[name] = own.copy_(shared)

    def follow_parameters(self) -> None:
        """Nothing to follow: the parameters stay where they are when training ends."""

    def _free_gathered(self) -> None:
        for module in self._modules:
            module.reshard()
