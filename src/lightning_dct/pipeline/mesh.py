"""The mesh of data-parallel replicas x stages, and its process groups.

Rank ``r`` is stage ``r % stages`` of replica ``r // stages``, so neighbouring ranks are the stages of one pipeline.
Stages exchange activations several times a step, over the fast links inside a node. Replicas exchange a hundredth of
their updates, over the slow links.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from lightning_dct.agreement import without_bound_device


def to_device(tree: Any, device: torch.device | str) -> Any:
    """A tree whose tensors are on a device, without a graph."""
    return tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, tree)


class PipelineMesh:
    """One rank's place in the mesh, and its process groups; all ranks make it together.

    Attributes:
        stages: Ranks in a pipeline.
        stage: This rank's stage, from 0.
        replica: The number of this rank's pipeline, from 0.
        pipeline: The ranks of this pipeline, by stage, for activations and their gradients.
        data_parallel: The ranks with the same pieces, one of each pipeline.
        control: The ranks of this pipeline, by stage, for logs and checkpoints, on the CPU.
        everyone: All ranks, on the CPU.

    Raises:
        ValueError: The number of processes is no multiple of ``stages``.
    """

    def __init__(self, stages: int, device_type: str, timeout: timedelta | None) -> None:
        world_size = dist.get_world_size()
        if world_size % stages:
            raise ValueError(
                f"`stages={stages}` does not divide the {world_size} processes of this run (devices x nodes): every"
                f" pipeline takes {stages} of them. Give a multiple of {stages} devices, or another `stages`."
            )
        self.stages = stages
        self.replica, self.stage = divmod(dist.get_rank(), stages)
        names, shape = ("data_parallel", "pipeline"), (world_size // stages, stages)
        device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        self.data_parallel, self.pipeline = (device_mesh.get_group(name) for name in names)
        self.everyone = dist.new_group(backend="gloo", timeout=timeout)
        with without_bound_device():
            self.control, _ = dist.new_subgroups(stages, timeout=timeout, backend="gloo")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PipelineMesh":
        return self  # metrics that synchronise over it are copied, and process groups cannot be

    @property
    def is_last(self) -> bool:
        """Whether this rank has the pipeline's last piece, which computes the loss."""
        return self.stage == self.stages - 1

    def share(self, value: Any, stage: int) -> Any:
        """Broadcast a picklable object, with tensors on the CPU, from one stage of the pipeline."""
        box = [value]
        dist.broadcast_object_list(box, group=self.control, group_src=stage)
        return box[0]

    def gather_on_first(self, value: Any) -> list[Any]:
        """All stages' objects on global rank 0, in order of stages; elsewhere this rank's alone."""
        values = [value]
        for stage in range(1, self.stages if self.replica == 0 else 0):
            if self.stage == stage:
                dist.send_object_list([to_device(value, "cpu")], dst=0, group=self.control)
            elif self.stage == 0:
                box: list[Any] = [None]
                dist.recv_object_list(box, src=stage, group=self.control)
                values.append(box[0])
        return values
