"""The figures of a run: as a table for the reader, and as ``result.json``."""

import gc
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dct.traffic import plain_table

BEST_PREFIX = "best_"
"""Metrics named ``<stage>/best_<metric>`` are those of a perfect model."""

_MILLISECONDS = 1e3


class StepTimer(Callback):
    """Measures the wall time of optimizer steps, and what each validation finds after how much of
    it.

    Attributes:
        tensor_bytes: Bytes of all tensors alive after the last step: weights, gradients, and
            whatever else is kept.
        history: The steps taken, the seconds they took and the metrics of each validation.

    Args:
        skip: First steps to leave out of the mean: they compile and allocate.
    """

    reads_weights = False

    def __init__(self, skip: int = 20) -> None:
        if skip < 0:
            raise ValueError(f"callbacks.step_timer.skip={skip}: must not be negative")
        self.skip = skip
        self.history: list[dict[str, Any]] = []
        self.tensor_bytes: int | None = None
        self._seconds = self._skipped_seconds = self._since = 0.0
        self._steps = self._step = 0
        self._skipped_costs = self._costs = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._seconds = 0.0
        self._skipped_seconds = 0.0
        self._steps = 0
        self.history = []
        self._step = trainer.global_step
        self._since = time.perf_counter()
        self._skipped_costs = costs_of(trainer.strategy)  # a resumed run has had some

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        now = time.perf_counter()
        self._steps += 1
        self._seconds += now - self._since
        self._costs = costs_of(trainer.strategy)
        if self._steps == self.skip:
            self._skipped_seconds = self._seconds
            self._skipped_costs = self._costs
        self._step = trainer.global_step
        self._since = now

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        # A validation between two steps is not part of them.
        self._since = time.perf_counter()
        if trainer.state.fn == TrainerFn.FITTING:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.history.append(
                {"step": trainer.global_step, "seconds": self._seconds, "metrics": metrics}
            )

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        # Views share a storage, which counts once. The collector sees no gradient that Python has
        # not touched.
        gradients = [
            parameter.grad for parameter in module.parameters() if parameter.grad is not None
        ]
        found = (
            item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)
        )
        found = itertools.chain(gradients, found)
        storages = (tensor.untyped_storage() for tensor in found if tensor.layout == torch.strided)
        self.tensor_bytes = sum(
            {storage.data_ptr(): storage.nbytes() for storage in storages}.values()
        )

    @property
    def mean_milliseconds(self) -> float | None:
        """The mean step, because most steps between two exchanges send nothing; None after too few
        steps.
        """
        measured = self._steps - self.skip
        return (
            _MILLISECONDS * (self._seconds - self._skipped_seconds) / measured
            if measured > 0
            else None
        )

    @property
    def mean_costs(self) -> tuple[float, float] | tuple[None, None]:
        """Of the mean step, the milliseconds in which this rank compresses, and those in which it
        waits for others.
        """
        if (measured := self._steps - self.skip) <= 0:
            return None, None
        compressing, waiting = (
            _MILLISECONDS * (after - before) / measured
            for before, after in zip(self._skipped_costs, self._costs, strict=True)
        )
        return compressing, waiting


def costs_of(strategy: Any) -> tuple[float, float]:
    """The seconds for which this rank has compressed, tables included, and has waited for updates
    or gradients.
    """
    both = [getattr(strategy, name, None) for name in ("traffic", "split_traffic")]
    counted = [traffic.totals for traffic in both if traffic is not None]
    return sum(totals.seconds for totals in counted), sum(
        totals.seconds_waiting for totals in counted
    )


def write_result(file: Path, figures: dict[str, Any]) -> None:
    """Write a whole JSON file or none; figures that are not finite become null."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.part")
    unfinished.write_text(json.dumps(_finite(figures), indent=2) + "\n")
    unfinished.replace(file)


def print_result(figures: dict[str, Any]) -> None:
    """Print the figures of a run as a table."""
    rows = [("figure", "value")]
    for name, value in figures["metrics"].items():
        best = figures["best_known"].get(name)
        rows.append(
            (name, f"{value:.4f}" + (f" (best known {best:.4f})" if best is not None else ""))
        )
    rows += [
        ("compression ratio, against dense fp32", _text(figures["compression_ratio"], "{:.1f}x")),
        ("bytes sent a step, each rank", _text(figures["bytes_sent_per_step"], "{:,.0f}")),
        (
            "bytes of dense fp32 a step, each rank",
            _text(figures["bytes_dense_per_step"], "{:,.0f}"),
        ),
    ]
    if figures["split_ratio"] is not None:
        inside = _text(figures["split_bytes_per_step"], "{:,.0f}")
        rows.append(
            (
                "inside the model: compression ratio, all ranks",
                _text(figures["split_ratio"], "{:.1f}x"),
            )
        )
        rows.append(("inside the model: bytes sent a step, this rank", inside))
    rows += [
        ("ms a training step", _text(figures["milliseconds_per_step"], "{:.1f}")),
        ("training steps", f"{figures['steps']:,}"),
        ("processes", str(figures["world_size"])),
        ("trainable parameters", f"{figures['trainable_parameters']:,}"),
    ]
    print(f"\nResult\n{plain_table(rows)}", flush=True)


def _text(value: float | None, pattern: str) -> str:
    return "-" if value is None or not math.isfinite(value) else pattern.format(value)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None at all levels, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def split_best_known(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Part measured metrics from best-known ones.

    Example:
        >>> split_best_known({"test/auc": 0.7, "test/best_auc": 0.8})
        ({'test/auc': 0.7}, {'test/auc': 0.8})
    """
    measured = {}
    best = {}
    for name, value in metrics.items():
        stage, _, metric = name.partition("/")
        if metric.startswith(BEST_PREFIX):
            best[f"{stage}/{metric.removeprefix(BEST_PREFIX)}"] = value
        else:
            measured[name] = value
    return measured, best
