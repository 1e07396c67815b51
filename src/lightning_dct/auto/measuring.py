"""What predictions are made from: numbers of this rank, made those of the slowest, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from lightning_dct.config import DCTConfig
from lightning_dct.forecast.speed import Speed, measure_speed
from lightning_dct.forecast.workload import Workload
from lightning_dct.gradients.plan import real_numel

SECONDS = 0.05
"""For how long compressing is timed, for each density, beside what that takes a few times at least."""


def agreed(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The largest that any rank has, of each number; a collective call. Its bytes belong to no step."""
    largest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return [float(number) for number in largest]


def measure_speeds(
    configs: Iterable[DCTConfig], workload: Workload, group: dist.ProcessGroup, device: torch.device
) -> dict[float, Speed]:
    """What compressing costs on the slowest rank while all of them compress, by density; a collective call.

    Args:
        configs: The settings, of one value format.
        workload: What is synchronised. Its largest bucket is what is timed.
        group: The ranks.
        device: Where their weights are.
    """
    speeds = {}
    for config in {config.density: config for config in configs}.values():
        sizes = max(
            ([real_numel(workload.parameters[name]) for name in bucket] for bucket in workload.buckets_under(config)),
            key=sum,
        )
        own = measure_speed(config.density, config.value_format, sizes, config.min_tensor_size, SECONDS, device)
        compress, clear, add, move = agreed([own.compress, own.clear, own.add, own.move], group, device)
        speeds[config.density] = Speed(compress, clear, add, own.how, move)
    return speeds
