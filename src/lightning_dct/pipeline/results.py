"""Results that only the last stage computes, on every rank: the loss and the logs of a step, and metrics' states."""

import pickle
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dct.pipeline.mesh import PipelineMesh

_LENGTH = 8  # bytes of the length in front of every message
_GRAIN = 64  # bytes; messages vary a little in length, so capacities are rounded up to this


class StepResults:
    """Sends one object per step from the last stage of a pipeline to the others.

    ``dist.broadcast_object_list`` sends a size, then the object, each when the receiver is ready: two round trips at
    the end of every step. Here the receive is posted before the step, with the capacity of the last message. So a
    message arrives during the step. If it is longer, the rest follows in a broadcast.
    """

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        self._capacity = 0  # bytes, the same on every rank

    def post_receive(self) -> None:
        """Start to receive the object of this step, except on the last stage."""
        self._frame = torch.zeros(_LENGTH + self._capacity, dtype=torch.uint8)
        self._works: list[Any] = []
        if not self._mesh.is_last:
            self._works.append(dist.irecv(self._frame, group=self._mesh.control, group_src=self._mesh.stages - 1))

    def share(self, value: Any) -> Any:
        """Give every stage the last stage's object, which can be pickled and has its tensors on the CPU."""
        group, last, written = self._mesh.control, self._mesh.stages - 1, torch.empty(0, dtype=torch.uint8)
        if self._mesh.is_last:
            written = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            self._frame[:_LENGTH].view(torch.int64).fill_(written.numel())
            self._frame[_LENGTH:][: written.numel()] = written[: self._capacity]
            self._works = [dist.isend(self._frame, group=group, group_dst=stage) for stage in range(last)]
        for work in self._works:
            work.wait()
        length = int(self._frame[:_LENGTH].view(torch.int64))
        rest = written[self._capacity :] if self._mesh.is_last else written.new_empty(max(length - self._capacity, 0))
        if rest.numel():
            dist.broadcast(rest, group=group, group_src=last)
        self._capacity = -(-length // _GRAIN) * _GRAIN
        if self._mesh.is_last:
            return value
        return pickle.loads(torch.cat([self._frame[_LENGTH:][:length], rest]).numpy().tobytes())


def gather_last_stages(mesh: PipelineMesh, state: Tensor, group: Any = None) -> list[Tensor]:
    """Gather every pipeline's state of a metric, from the last stages, on every rank: a ``dist_sync_fn``.

    torchmetrics' own would gather over all ranks, most of which never update the metric. That is wrong for averaged
    states, and a mismatch of dtypes for lists.
    """
    gathered = None
    if mesh.is_last:
        gathered = [part.cpu() for part in gather_all_tensors(state, group=mesh.data_parallel)]
    return [part.to(state.device) for part in mesh.share(gathered, mesh.stages - 1)]


def synchronise_metrics(module: nn.Module, mesh: PipelineMesh) -> list[Metric]:
    """Give metrics without a ``dist_sync_fn`` a :func:`gather_last_stages`, and return them.

    Raises:
        ValueError: A metric has ``dist_sync_on_step``, but not all ranks run steps to their end.
    """
    found = []
    for name, child in module.named_modules():
        if isinstance(child, Metric) and child.dist_sync_on_step:
            raise ValueError(
                f"The metric {name!r} has `dist_sync_on_step=True`. Under `DCTPipelineStrategy` steps end on the last"
                " stage only, and metrics are synchronised when an epoch ends. Leave the setting out."
            )
        if isinstance(child, Metric) and child.dist_sync_fn is None:
            found.append(child)
    for metric in found:
        metric.dist_sync_fn = partial(gather_last_stages, mesh)
    return found
