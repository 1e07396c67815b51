"""How long a step takes with each of the settings to choose from, by the model of ``lightning-dct plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dct.auto.ladder import Option, dense
from lightning_dct.config import DCTConfig
from lightning_dct.forecast.bytes_sent import dense_step
from lightning_dct.forecast.forecast import make_forecast
from lightning_dct.forecast.link import MeasuredLink
from lightning_dct.forecast.speed import Speed, measure_speed
from lightning_dct.forecast.workload import Workload
from lightning_dct.gradients.exchanges.nodes import NodeLayout
from lightning_dct.gradients.plan import real_numel
from lightning_dct.tables import rate_text
from lightning_dct.traffic import FP32_BYTES

SECONDS = 0.05
"""For how long compressing is timed, for each density, beside what that takes a few times at least."""


@dataclass(frozen=True)
class Measured:
    """What a run is, the same on every rank.

    Attributes:
        compute: Seconds of a step without synchronisation.
        link: Between the ranks as they are placed.
        layout: Where they are.
        workload: What is synchronised.
    """

    compute: float
    link: MeasuredLink
    layout: NodeLayout
    workload: Workload

    def all_reduce_seconds(self, config: DCTConfig) -> float:
        """How long the all-reduce of all gradients takes on the link."""
        return self.link.all_reduce_seconds((2 if config.halves else FP32_BYTES) * self.workload.entries)

    def __str__(self) -> str:
        rate = "no limit that shows" if (bits := self.link.bits_per_second) is None else rate_text(float(f"{bits:.2g}"))
        return f"link: {rate}, {1e3 * self.link.latency:.2g} ms an all-reduce of nothing"


def agreed(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The largest that any rank has, of each number; a collective call. Its bytes belong to no step."""
    largest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return [float(number) for number in largest]


def measure_speeds(
    configs: Sequence[DCTConfig], workload: Workload, group: dist.ProcessGroup, device: torch.device
) -> dict[float, Speed]:
    """The cost of compressing on the slowest rank while all of them compress, by density; a collective call.

    The settings have one value format. The largest bucket of the workload is what is timed.
    """
    speeds = {}
    for config in {config.density: config for config in configs}.values():
        buckets = workload.buckets_under(config)
        sizes = max(([real_numel(workload.parameters[name]) for name in bucket] for bucket in buckets), key=sum)
        own = measure_speed(config.density, config.value_format, sizes, config.min_tensor_size, SECONDS, device)
        compress, clear, add, move = agreed([own.compress, own.clear, own.add, own.move], group, device)
        speeds[config.density] = Speed(compress, clear, add, own.how, move)
    return speeds


def predict_dense(measured: Measured, base: DCTConfig, now: tuple[DCTConfig, float] | None = None) -> list[Option]:
    """DDP in fp32 and in bf16.

    Args:
        measured: The run.
        base: The settings that nobody chooses.
        now: Which of the two the run has at the moment, and the seconds a step waits for it: backward hides the rest.
            Without it nothing is taken to be hidden.
    """
    hidden = 0.0 if now is None else measured.all_reduce_seconds(now[0]) - now[1]
    sent = dense_step(measured.workload, measured.layout).sent[0].total
    return [
        Option(
            config,
            measured.compute + max(0.0, measured.all_reduce_seconds(config) - hidden),
            sent // (2 if config.halves else 1),
        )
        for config in (dense(base), dense(base, "bf16"))
    ]


def predict_updates(measured: Measured, configs: Sequence[DCTConfig], speeds: Mapping[float, Speed]) -> list[Option]:
    """Updates, once warm-up is over; ``speeds`` is the cost of compressing by density."""
    options, rate = [], measured.link.bits_per_second or math.inf
    for config in configs:
        forecast = make_forecast(
            config, measured.workload, measured.layout, rate, speeds[config.density], measured.link.latency
        )
        row = forecast.row(forecast.choice.name if config.exchange == "auto" else config.exchange)
        options.append(Option(config, measured.compute + row.seconds, row.most_sent))
    return options
