"""Chooses settings for a run: the settings to choose from, the rule, and the predicted time of a step with each.

    DDP in fp32, DDP in bf16, then updates at 1 bit, as :meth:`~lightning_dct.law.Given.rungs` orders them

The order is from the least to the most lossy. Every rung sends less than the one before. A run takes none for which it
is too short. Times follow the model of ``lightning-dct plan``.
:class:`~lightning_dct.callbacks.auto_settings.AutoSettings` chooses while a run trains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dct.compress.bucket_plan import real_numel
from lightning_dct.config import DCTConfig, ValueFormat
from lightning_dct.cost.bytes_sent import dense_step
from lightning_dct.cost.forecast import Forecast
from lightning_dct.cost.timing import MeasuredLink, Speed, find_slowest, measure_speed
from lightning_dct.cost.workload import Workload
from lightning_dct.exchange.factory import NodeLayout
from lightning_dct.law import steps_needed
from lightning_dct.tables import rate_text
from lightning_dct.traffic import FP32_BYTES

SECONDS = 0.05
"""How long compressing is timed for each density, at least."""
CHOSEN = ("compress", "local_steps", "delay", "density", "density_per_parameter", "value_format")
"""Settings that are chosen, so that users may not give them."""
OF_BOTH = ("refresh_every", "min_tensor_size", "guard", "exchange", "kernel", "missing_state")
ALIKE = 1.1
"""A step under plain DDP that takes at most so many times another's is not worth leaving: nobody returns to it."""


@dataclass(frozen=True)
class Option:
    """Settings, with what is predicted of a step: its seconds, and the bytes of the rank that sends most."""

    config: DCTConfig
    seconds: float
    num_bytes: int
    steps_needed: int = 0  # of a run that is long enough

    @property
    def is_lossless(self) -> bool:
        """Whether these are the settings of plain DDP."""
        return self.config.compress == "gradients" and not self.config.averages_in_bf16


def choose(options: Sequence[Option], longest: float, steps: float) -> Option:
    """The first option whose step is short enough; if there is none, the fastest that the run is long enough for.

    Plain DDP stays if its step is about as short as that. ``options`` go from the least to the most lossy, and any run
    is long enough for the first. ``longest`` is the seconds that a step may take, and ``steps`` the optimizer steps of
    the whole run: infinite if unknown.
    """
    allowed = [option for option in options if option.steps_needed <= steps]
    fastest = min(allowed, key=lambda option: option.seconds)
    found = next((option for option in allowed if option.seconds <= longest), fastest)
    first = options[0]
    return first if first.is_lossless and first.seconds <= ALIKE * found.seconds else found


def reason(chosen: Option, options: Sequence[Option], longest: float, steps: float) -> str:
    """What :func:`choose` has chosen and why, in a sentence."""
    limit = f"{1e3 * longest:,.1f} ms that a step may take"
    if chosen.seconds <= longest:
        why = f"it is the least lossy setting within the {limit}"
    else:
        why = f"it is the fastest setting, and none is within the {limit}"
        if chosen.is_lossless:
            why = f"it is lossless and about as fast as the best other setting, but exceeds the {limit}"
        if any(option.steps_needed > steps for option in options):
            why += ", because the run is too short for the others"
    return f"takes {describe(chosen.config)}: predicted at {1e3 * chosen.seconds:,.1f} ms a step, {why}"


def dense(base: DCTConfig, value_format: ValueFormat = "fp32") -> DCTConfig:
    """The settings of DistributedDataParallel: the mean of all gradients in every step, in fp32 or in bf16."""
    shared: dict[str, Any] = {name: getattr(base, name) for name in OF_BOTH}
    return DCTConfig(compress="gradients", density=1.0, value_format=value_format, **shared)


def check_left_out(base: DCTConfig) -> None:
    """Refuse settings that ``target_overhead`` chooses, with a ValueError that names them and the remedy."""
    usual = DCTConfig()
    given = [f"{name}={getattr(base, name)!r}" for name in CHOSEN if getattr(base, name) != getattr(usual, name)]
    if given:
        raise ValueError(
            f"`target_overhead` chooses these settings itself, but they were given as {', '.join(given)}. Leave these"
            " out, or leave out `target_overhead`. `min_density` is a lower bound on the density that it may choose."
        )


def describe(config: DCTConfig) -> str:
    """Settings in a few words.

    Example:
        >>> describe(dense(DCTConfig())), describe(DCTConfig())
        ('plain DDP', 'updates every 8 steps, 30%')
    """
    if config.compress == "gradients":
        return "DDP in bf16" if config.averages_in_bf16 else "plain DDP"
    every = "every step" if config.round_length == 1 else f"every {config.round_length} steps"
    return f"updates {every}, {100 * config.density:g}%"


def table_of(options: Sequence[Option], taken: DCTConfig, steps: float) -> list[list[str]]:
    """A row of heads, then a row for each option."""
    rows = [["settings", "ms a step", "bytes a step", "steps needed", ""]]
    return rows + [
        [
            describe(option.config),
            f"{1e3 * option.seconds:,.1f}",
            f"{option.num_bytes:,}",
            f"{option.steps_needed:,}",
            "taken" if option.config == taken else "" if option.steps_needed <= steps else "this run is too short",
        ]
        for option in options
    ]


@dataclass(frozen=True)
class Measured:
    """Measurements of a run, the same on every rank; ``compute`` has the seconds of a step without synchronisation."""

    compute: float
    link: MeasuredLink
    layout: NodeLayout
    workload: Workload

    def all_reduce_seconds(self, config: DCTConfig) -> float:
        """How long the all-reduce of all gradients takes on the link."""
        return self.link.all_reduce_seconds((2 if config.averages_in_bf16 else FP32_BYTES) * self.workload.entries)

    def __str__(self) -> str:
        rate = "no limit that shows" if (bits := self.link.bits_per_second) is None else rate_text(float(f"{bits:.2g}"))
        return f"link: {rate}, {1e3 * self.link.latency:.2g} ms an empty all-reduce"


def measure_speeds(
    configs: Sequence[DCTConfig], workload: Workload, group: dist.ProcessGroup, device: torch.device
) -> dict[float, Speed]:
    """The cost of compressing the largest bucket on the slowest rank, by density; a collective call.

    The settings have one value format.
    """
    speeds = {}
    for config in {config.density: config for config in configs}.values():
        buckets = workload.buckets_under(config)
        sizes = max(([real_numel(workload.parameters[name]) for name in bucket] for bucket in buckets), key=sum)
        own = measure_speed(config, sizes, SECONDS, device)
        compress, clear, add, move = find_slowest([own.compress, own.clear, own.add, own.move], group, device)()
        speeds[config.density] = Speed(compress, clear, add, own.how, move)
    return speeds


def predict_dense(measured: Measured, base: DCTConfig, now: tuple[DCTConfig, float] | None = None) -> list[Option]:
    """DDP in fp32 and in bf16; ``base`` has the settings that are not chosen.

    ``now`` is the present one of the two, and the seconds a step waits for it, because backward hides the rest. With
    None backward hides nothing.
    """
    hidden = 0.0 if now is None else measured.all_reduce_seconds(now[0]) - now[1]
    sent = dense_step(measured.workload, measured.layout).sent[0].total
    return [
        Option(
            config,
            measured.compute + max(0.0, measured.all_reduce_seconds(config) - hidden),
            sent // (2 if config.averages_in_bf16 else 1),
        )
        for config in (dense(base), dense(base, "bf16"))
    ]


def predict_updates(measured: Measured, configs: Sequence[DCTConfig], speeds: Mapping[float, Speed]) -> list[Option]:
    """Updates, once warm-up is over; ``speeds`` is the cost of compressing by density.

    Any run is long enough for the first of ``configs``, the least lossy.
    """
    options, rate, ranks = [], measured.link.bits_per_second or math.inf, len(measured.layout.places)
    for number, config in enumerate(configs):
        forecast = Forecast(
            config, measured.workload, measured.layout, rate, speeds[config.density], measured.link.latency
        )
        row = forecast.row(forecast.choice.name if config.exchange == "auto" else config.exchange)
        needed = steps_needed(config, ranks) if number else 0
        options.append(Option(config, measured.compute + row.seconds, row.most_sent, needed))
    return options
