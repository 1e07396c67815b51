"""The mesh of data-parallel replicas x stages, its process groups, and what ranks share over them.

Rank ``r`` is stage ``r % stages`` of replica ``r // stages``: the stages of a pipeline are
neighbours, because they use the fast links inside a node. The last stage shares the loss and the
logs of a step, and the states of metrics.
"""

import pickle
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dct.agreement import without_bound_device

_LENGTH = 8  # bytes of the length in front of every message
_GRAIN = 64  # bytes; messages vary a little in length, so capacities are rounded up to this


def to_device(tree: Any, device: torch.device | str) -> Any:
    """A tree whose tensors are on a device, without a graph."""
    return tree_map(
        lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, tree
    )


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
                f"`stages={stages}` does not divide the {world_size} processes of this run (devices"
                f" x nodes): every pipeline takes {stages} of them. Give a multiple of {stages}"
                " devices, or another `stages`."
            )
        self.stages = stages
        self.replica, self.stage = divmod(dist.get_rank(), stages)
        names = ("data_parallel", "pipeline")
        shape = (world_size // stages, stages)
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
        if self.replica == 0 and self.stage > 0:
            dist.send_object_list([to_device(value, "cpu")], dst=0, group=self.control)
        for stage in range(1, self.stages if dist.get_rank() == 0 else 0):
            box: list[Any] = [None]
            dist.recv_object_list(box, src=stage, group=self.control)
            values += box
        return values


class StepResults:
    """Sends one object per step from the last stage of a pipeline to the others.

    ``dist.broadcast_object_list`` sends a size, then the object, each when the receiver is ready:
    two round trips at the end of every step. Here the receive is posted before the step, with the
    capacity of the last message. So a message arrives during the step. If it is longer, the rest
    follows in a broadcast.
    """

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        self._capacity = 0  # bytes, the same on every rank

    def post_receive(self) -> None:
        """Start to receive the object of this step, except on the last stage."""
        self._frame = torch.zeros(_LENGTH + self._capacity, dtype=torch.uint8)
        self._works: list[Any] = []
        if not self._mesh.is_last:
            self._works.append(
                dist.irecv(self._frame, group=self._mesh.control, group_src=self._mesh.stages - 1)
            )

    def share(self, value: Any) -> Any:
        """Give every stage the last stage's object, which can be pickled and has its tensors on the
        CPU.
        """
        group = self._mesh.control
        last = self._mesh.stages - 1
        written = torch.empty(0, dtype=torch.uint8)
        if self._mesh.is_last:
            written = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            self._frame[:_LENGTH].view(torch.int64).fill_(written.numel())
            self._frame[_LENGTH:][: written.numel()] = written[: self._capacity]
            self._works = [
                dist.isend(self._frame, group=group, group_dst=stage) for stage in range(last)
            ]
        for work in self._works:
            work.wait()
        length = int(self._frame[:_LENGTH].view(torch.int64))
        rest = (
            written[self._capacity :]
            if self._mesh.is_last
            else written.new_empty(max(length - self._capacity, 0))
        )
        if rest.numel():
            dist.broadcast(rest, group=group, group_src=last)
        self._capacity = -(-length // _GRAIN) * _GRAIN
        if self._mesh.is_last:
            return value
        return pickle.loads(torch.cat([self._frame[_LENGTH:][:length], rest]).numpy().tobytes())


def gather_last_stages(mesh: PipelineMesh, state: Tensor, group: Any = None) -> list[Tensor]:
    """Gather every pipeline's state of a metric, from the last stages, on every rank: a
    ``dist_sync_fn``.

    torchmetrics' own would gather over all ranks, most of which never update the metric. That is
    wrong for averaged states, and a mismatch of dtypes for lists.
    """
    gathered = None
    if mesh.is_last:
        gathered = [part.cpu() for part in gather_all_tensors(state, group=mesh.data_parallel)]
    return [part.to(state.device) for part in mesh.share(gathered, mesh.stages - 1)]


def synchronise_metrics(module: nn.Module, mesh: PipelineMesh) -> list[Metric]:
    """Give metrics without a ``dist_sync_fn`` a :func:`gather_last_stages`, and return them.

    Refuse any with ``dist_sync_on_step``, because not all ranks run steps to their end
    (ValueError).
    """
    metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
    for name, metric in metrics.items():
        if metric.dist_sync_on_step:
            raise ValueError(
                f"The metric {name!r} has `dist_sync_on_step=True`. Under `DCTPipelineStrategy`"
                " steps end on the last stage only, and metrics are synchronised when an epoch"
                " ends. Leave the setting out."
            )
    found = [metric for metric in metrics.values() if metric.dist_sync_fn is None]
    for metric in found:
        metric.dist_sync_fn = partial(gather_last_stages, mesh)
    return found
