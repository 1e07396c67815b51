"""The reference for ``dct_fsdp``: torch's hybrid sharding, with a dense all-reduce between
replicas.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from lightning_dct.fsdp.mesh_strategy import AXES, MeshStrategy, sharded_modules
from lightning_dct.traffic import Traffic


class HSDPStrategy(MeshStrategy):
    """``fully_shard`` over the mesh of replicas and shards; it counts no bytes, so its traffic is
    always zero.
    """

    def __init__(self, replicas: int | None = None, unit: int = 1_000_000) -> None:
        super().__init__(replicas, unit, {"reshard_after_forward": True})
        self.traffic = Traffic()

    @property
    def shard_mesh(self) -> DeviceMesh:
        """All ranks: FSDP takes the first dimension for that of replicas."""
        return self.device_mesh[AXES[:2]]

    def setup(self, trainer: Any) -> None:
        """Let gloo compute sums, because it has no means."""
        for module in sharded_modules(trainer.lightning_module):
            module.set_force_sum_reduction_for_comms(True)
        super().setup(trainer)
