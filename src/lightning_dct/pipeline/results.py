"""Results that only the last stage computes, on every rank: the loss and the logs of a step, and metrics' states."""

from __future__ import annotations

import pickle
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
        self._posted: tuple[Tensor, dist.Work | None] | None = None

    def post_receive(self) -> None:
        """Start to receive the object of this step; the last stage does nothing."""
        if not self._mesh.is_last:
            frame = torch.empty(_LENGTH + self._capacity, dtype=torch.uint8)
            self._posted = frame, dist.irecv(frame, group=self._mesh.control, group_src=self._mesh.stages - 1)

    def share(self, value: Any) -> Any:
        """Give every stage the last stage's object, which can be pickled and has its tensors on the CPU."""
        data = self._send(pickle.dumps(value)) if self._mesh.is_last else self._receive()
        self._capacity = -(-len(data) // _GRAIN) * _GRAIN
        return value if self._mesh.is_last else pickle.loads(data)

    def _send(self, data: bytes) -> bytes:
        start = data[: self._capacity].ljust(self._capacity, b"\0")
        frame = torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH, "little") + start), dtype=torch.uint8)
        group, last = self._mesh.control, self._mesh.stages - 1
        sending = [dist.isend(frame, group=group, group_dst=stage) for stage in range(last)]
        if len(data) > self._capacity:
            rest = torch.frombuffer(bytearray(data[self._capacity :]), dtype=torch.uint8)
            dist.broadcast(rest, group=group, group_src=last)
        for work in sending:
            assert work is not None
            work.wait()
        return data

    def _receive(self) -> bytes:
        assert self._posted is not None
        (frame, work), self._posted = self._posted, None
        assert work is not None
        work.wait()
        message = frame.numpy().tobytes()
        length = int.from_bytes(message[:_LENGTH], "little")
        data = message[_LENGTH : _LENGTH + length]
        if length > self._capacity:
            rest = torch.empty(length - self._capacity, dtype=torch.uint8)
            dist.broadcast(rest, group=self._mesh.control, group_src=self._mesh.stages - 1)
            data += rest.numpy().tobytes()
        return data


class LastStageGather:
    """A ``dist_sync_fn`` for metrics: gathers over the last stages of all pipelines, and broadcasts to other stages.

    torchmetrics' own would gather over all ranks, most of which never update the metric. That is wrong for averaged
    states, and a mismatch of dtypes for lists.
    """

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> LastStageGather:
        return self  # metrics are copied, and process groups cannot be

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Every pipeline's state, on every rank."""
        gathered = None
        if self._mesh.is_last:
            gathered = [part.cpu() for part in gather_all_tensors(state, group=self._mesh.data_parallel)]
        return [part.to(state.device) for part in self._mesh.share(gathered, self._mesh.stages - 1)]


def synchronise_metrics(module: nn.Module, mesh: PipelineMesh) -> list[Metric]:
    """Give metrics without a ``dist_sync_fn`` a :class:`LastStageGather`, and return them.

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
        metric.dist_sync_fn = LastStageGather(mesh)
    return found
