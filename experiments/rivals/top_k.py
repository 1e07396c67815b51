"""Top-k with error feedback as others implement it: exact selection in every step, int32 positions,
fp32 values.

The residual is that of DCT. In contrast to DCT, every step selects anew, and every entry takes
eight bytes. Annotations are objects here, not strings: DistributedDataParallel reads those of its
hooks.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dct.compress.error_feedback import Residuals
from lightning_dct.compress.threshold import entries_at
from lightning_dct.exchange.base import Collectives, Transfer, finish_transfers
from lightning_dct.sync.setup import parameter_names
from lightning_dct.traffic import FP32_BYTES, Traffic, all_gather_bytes, all_reduce_bytes


class TopKSynchronizer:
    """The state behind the hook (Aji and Heafield, 2017; Lin et al., 2018, without its momentum
    correction).

    It sends the share ``density`` of each tensor's entries, at least one. ``module`` is the model
    before wrapping.
    """

    def __init__(
        self, module: torch.nn.Module, density: float, group: dist.ProcessGroup, traffic: Traffic
    ) -> None:
        self._names = parameter_names(module)
        self._density = density
        self._group = group
        self._traffic = traffic
        self.residuals = Residuals()
        self._transfers: list[Transfer] = []

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Send the largest entries of a bucket; with the last bucket, wait for all and average the
        received entries.
        """
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        sizes = [parameter.numel() for parameter in parameters]
        with self._traffic.timed():
            residual = self.residuals.flat(
                [self._names[parameter] for parameter in parameters],
                sizes,
                torch.float32,
                buffer.device,
            )
            residual.add_(buffer)
            positions = _largest(residual, sizes, self._density)
            values = residual[positions]
            residual[positions] = 0
            self._transfers.append(
                Transfer(self._send(positions.to(torch.int32), values, buffer), 2, buffer.device)
            )
        sent = all_gather_bytes(
            (torch.int32.itemsize + FP32_BYTES) * positions.numel(), self._group.size()
        )
        dense = all_reduce_bytes(FP32_BYTES * buffer.numel(), self._group.size())
        self._traffic.add(
            bytes_sent=sent,
            bytes_dense=dense,
            entries_sent=positions.numel(),
            entries=buffer.numel(),
        )
        future = self._transfers[-1].future
        if bucket.is_last():  # here and not in callbacks, as DCT does it
            finish_transfers(self._transfers, self._traffic)
            self._traffic.add(steps=1)
            self._transfers = []
        return future

    def _send(
        self, positions: torch.Tensor, values: torch.Tensor, buffer: torch.Tensor
    ) -> Collectives:
        received = [
            part.new_empty(self._group.size() * part.numel()) for part in (positions, values)
        ]
        yield from [
            dist.all_gather_single(all_parts, part, group=self._group, async_op=True)
            for all_parts, part in zip(received, (positions, values), strict=True)
        ]
        return buffer.zero_().index_add_(
            0, received[0], received[1].to(buffer.dtype), alpha=1 / self._group.size()
        )


def _largest(accumulated: torch.Tensor, sizes: list[int], density: float) -> torch.Tensor:
    """Positions of the entries of largest magnitude, int64, the share ``density`` of each
    tensor.
    """
    parts = accumulated.abs().split(sizes)
    starts = accumulate(sizes, initial=0)
    largest = [
        part.topk(max(1, entries_at(density, part.numel())), sorted=False).indices for part in parts
    ]
    return torch.cat([indices.add_(start) for indices, start in zip(largest, starts, strict=False)])
