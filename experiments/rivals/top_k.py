"""Top-k with error feedback as others implement it: exact selection in every step, int32 positions, fp32 values.

The residual is that of DCT. In contrast to DCT, every step selects anew, and every entry takes eight bytes. Annotations
are objects here, not strings: DistributedDataParallel reads those of its hooks.
"""

import math
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dct.compress.memory import Residuals
from lightning_dct.sync.setup import parameter_names
from lightning_dct.traffic import FP32_BYTES, Traffic, all_gather_bytes, all_reduce_bytes


class _Pending(NamedTuple):
    """A bucket under way, with the entries of all ranks once ``works`` are done."""

    works: tuple[dist.Work, dist.Work]
    positions: torch.Tensor
    values: torch.Tensor
    buffer: torch.Tensor
    future: Future[torch.Tensor]


class TopKSynchronizer:
    """The state behind the hook (Aji and Heafield, 2017; Lin et al., 2018, without its momentum correction).

    It sends the share ``density`` of each tensor's entries, at least one. ``module`` is the model before wrapping.
    """

    def __init__(self, module: torch.nn.Module, density: float, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._names = parameter_names(module)
        self._density = density
        self._group = group
        self._traffic = traffic
        self.residuals = Residuals()
        self._pending: list[_Pending] = []

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Send the largest entries of a bucket; with the last bucket, wait for all and average the received entries."""
        started = perf_counter()
        buffer, parameters = bucket.buffer(), bucket.parameters()
        sizes = [parameter.numel() for parameter in parameters]
        residual = self.residuals.flat(
            [self._names[parameter] for parameter in parameters], sizes, torch.float32, buffer.device
        )
        residual.add_(buffer)
        positions = _largest(residual, sizes, self._density)
        values = residual[positions]
        residual[positions] = 0
        sent = all_gather_bytes((torch.int32.itemsize + FP32_BYTES) * positions.numel(), self._group.size())
        dense = all_reduce_bytes(FP32_BYTES * buffer.numel(), self._group.size())
        self._traffic.add(bytes_sent=sent, bytes_dense=dense, entries_sent=positions.numel(), entries=buffer.numel())
        self._pending.append(self._send(positions.to(torch.int32), values, buffer))
        self._traffic.add(seconds=perf_counter() - started)
        future = self._pending[-1].future
        if bucket.is_last():
            self._receive()
        return future

    def _send(self, positions: torch.Tensor, values: torch.Tensor, buffer: torch.Tensor) -> _Pending:
        total = self._group.size() * positions.numel()
        all_positions, all_values = positions.new_empty(total), values.new_empty(total)
        works = (
            dist.all_gather_single(all_positions, positions, group=self._group, async_op=True),
            dist.all_gather_single(all_values, values, group=self._group, async_op=True),
        )
        future = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
        return _Pending(works, all_positions, all_values, buffer, future)

    def _receive(self) -> None:
        # Here and not in callbacks, as DCT does it.
        for pending in self._pending:
            for work in pending.works:
                work.wait()
            started = perf_counter()
            pending.buffer.zero_()
            values = pending.values.to(pending.buffer.dtype)
            pending.buffer.index_add_(0, pending.positions, values, alpha=1 / self._group.size())
            self._traffic.add(seconds=perf_counter() - started)
            pending.future.set_result(pending.buffer)
        self._traffic.add(steps=1)
        self._pending = []


def _largest(accumulated: torch.Tensor, sizes: list[int], density: float) -> torch.Tensor:
    """Positions of the entries of largest magnitude, int64, the share ``density`` of each tensor."""
    positions, start = [], 0
    for tensor in accumulated.abs().split(sizes):
        # Less a hair, for products such as 0.07 * 100.
        k = max(1, math.ceil(density * tensor.numel() * (1 - 1e-12)))
        positions.append(tensor.topk(k, sorted=False).indices.add_(start))
        start += tensor.numel()
    return torch.cat(positions)
