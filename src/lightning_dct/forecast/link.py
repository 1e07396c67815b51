"""How fast the ranks of a run all-reduce, timed for a moment before it trains: plain DDP would wait for that."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.traffic import FP32_BYTES, all_reduce_bytes

SIZES = tuple(1 << power for power in (16, 18, 20))
"""Bytes of the tensors that are timed, one after the other."""
LONGEST = 0.02
"""Seconds after which no larger tensor is tried: a slow link shows its rate early."""
ROUNDS = 2


@dataclass(frozen=True)
class MeasuredLink:
    """The time of all-reduces.

    Attributes:
        world_size: Ranks that took part.
        num_bytes: Of the largest tensor that was timed.
        seconds: Its least time on the slowest rank.
        seconds_per_byte: Time of a further byte, from that tensor and the one before, without latency.
    """

    world_size: int
    num_bytes: int
    seconds: float
    seconds_per_byte: float

    def all_reduce_seconds(self, num_bytes: int) -> float:
        """The time of an all-reduce of another size."""
        return max(0.0, self.seconds + (num_bytes - self.num_bytes) * self.seconds_per_byte)

    @property
    def latency(self) -> float:
        """The time of an all-reduce of nothing."""
        return self.all_reduce_seconds(0)

    @property
    def bits_per_second(self) -> float | None:
        """The rate at which each rank sends meanwhile; None where a byte more took no longer."""
        sent = 8 * all_reduce_bytes(self.num_bytes, self.world_size) / self.num_bytes
        return sent / self.seconds_per_byte if self.seconds_per_byte else None


def measure_link(group: dist.ProcessGroup, device: torch.device) -> MeasuredLink:
    """Time all-reduces of growing size; a collective call. Its bytes belong to no step and are not counted.

    Args:
        group: The ranks, two or more.
        device: Where their gradients are.
    """
    # The first connects the ranks, and lets all of them begin together.
    _timed(torch.zeros(1, device=device), group)
    sizes: list[int] = []
    times: list[float] = []
    for size in SIZES:
        tensor = torch.zeros(size // FP32_BYTES, device=device)
        # The slowest rank's time: then all of them stop at the same size.
        slowest = torch.tensor([min(_timed(tensor, group) for _ in range(ROUNDS))], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        sizes.append(size)
        times.append(float(slowest))
        if len(sizes) > 1 and times[-1] > LONGEST:
            break
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return MeasuredLink(group.size(), sizes[-1], times[-1], max(0.0, slope))


def _timed(tensor: Tensor, group: dist.ProcessGroup) -> float:
    started = perf_counter()
    dist.all_reduce(tensor, group=group)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return perf_counter() - started
