"""How long a step takes with each of the settings that may be chosen, by the model of ``lightning-dct plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dct.auto.ladder import Option, dense, describe
from lightning_dct.config import DCTConfig
from lightning_dct.forecast.bytes_sent import dense_step
from lightning_dct.forecast.forecast import make_forecast
from lightning_dct.forecast.link import MeasuredLink
from lightning_dct.forecast.speed import Speed
from lightning_dct.forecast.workload import Workload
from lightning_dct.gradients.exchanges.nodes import NodeLayout
from lightning_dct.tables import rate_text
from lightning_dct.traffic import FP32_BYTES


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
        """What all gradients take on the link."""
        return self.link.all_reduce_seconds((2 if config.halves else FP32_BYTES) * self.workload.entries)

    def __str__(self) -> str:
        rate = "no limit that shows" if (bits := self.link.bits_per_second) is None else rate_text(float(f"{bits:.2g}"))
        return f"link: {rate}, {1e3 * self.link.latency:.2g} ms an all-reduce of nothing"


def predict_dense(measured: Measured, base: DCTConfig, now: tuple[DCTConfig, float] | None = None) -> list[Option]:
    """DDP in fp32 and in bf16.

    Args:
        measured: What the run is.
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
    """Updates, once warm-up is over.

    Args:
        measured: What the run is.
        configs: The settings.
        speeds: What compressing costs, by density.
    """
    options, rate = [], measured.link.bits_per_second or math.inf
    for config in configs:
        forecast = make_forecast(
            config, measured.workload, measured.layout, rate, speeds[config.density], measured.link.latency
        )
        row = forecast.row(forecast.choice.name if config.exchange == "auto" else config.exchange)
        options.append(Option(config, measured.compute + row.seconds, row.most_sent))
    return options


def reason_for(chosen: Option, longest: float, is_within: bool, is_shortest: bool) -> str:
    """A decision in a sentence."""
    limit = f"{1e3 * longest:,.1f} ms that a step may take"
    if is_within:
        why = f"it loses least of what stays within the {limit}"
    else:
        why = f"it is the fastest, and nothing stays within the {limit}"
        why += ", as delays of more than a tenth of the run are out of the question" if is_shortest else ""
    return f"takes {describe(chosen.config)}: predicted at {1e3 * chosen.seconds:,.1f} ms a step, {why}"
