"""Axes, summaries, settings, histograms and tables for W&B, on rank 0, beside the scalars of every logger.

============================  ========================================================================================
key                           value
============================  ========================================================================================
dct/dp/log10_density          histogram over tensors: share of the entries that is sent
dct/dp/log10_threshold        histogram over the compressed tensors: the smallest magnitude that is sent
dct/dp/log10_residual_norm    histogram over the tensors with a residual: its norm on rank 0
dct/dp/tensors                table of the same figures, one row per tensor
dct/mp/log10_threshold        histogram over all thresholds inside the model
dct/summary                   table: the one printed at the end of fit
============================  ========================================================================================

The run's config has the settings under ``lightning_dct``, by which runs can be grouped: the strategy's name, the number
of ranks and the fields of :class:`~lightning_dct.DCTConfig`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

from lightning_dct.config import DCTConfig
from lightning_dct.sync.synchronizer import TensorFigures

CONFIG_KEY = "lightning_dct"
STEP = "trainer/global_step"
"""The optimizer step, which Lightning's logger adds to every row."""
_OF_PARTS = {"compression_ratio": "last,mean", "density": "last,mean", "threshold": "last", "residual_norm": "last,max"}
SUMMARIES = {"dct/compression_ratio": "last,mean", "dct/overhead_ms": "mean,max"}
SUMMARIES |= {f"dct/{part}/{key}": summary for part in ("dp", "mp") for key, summary in _OF_PARTS.items()}
"""How W&B summarizes the history of a metric; for other metrics it shows the last value."""


def wandb_loggers(trainer: pl.Trainer) -> list[WandbLogger]:
    """The Trainer's loggers that write to W&B."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def describe_run(run: Any, settings: Mapping[str, Any]) -> None:
    """Give a ``wandb.Run`` the axis and summaries of our metrics, and the settings."""
    run.define_metric(STEP)
    # Lightning does so for all metrics, but only in runs that it has started.
    run.define_metric("dct/*", step_metric=STEP, step_sync=True)
    for key, summary in SUMMARIES.items():
        run.define_metric(key, step_metric=STEP, step_sync=True, summary=summary)
    run.config.update({CONFIG_KEY: dict(settings)}, allow_val_change=True)


def config_of(strategy: Any) -> Any:
    """The current settings; of another package's strategy its ``config`` attribute, or None."""
    return getattr(getattr(strategy, "synchronizer", None) or strategy, "config", None)


def settings_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The current settings of synchronisation: plain numbers, strings and dicts."""
    strategy = trainer.strategy
    settings = {"strategy": getattr(strategy, "strategy_name", type(strategy).__name__), "ranks": trainer.world_size}
    if isinstance(config := config_of(strategy), DCTConfig):  # DeepSpeed has another `config`
        settings |= vars(config)
    pipeline = ("stages", "micro_batches", "schedule")
    return settings | {name: getattr(strategy, name) for name in pipeline if hasattr(strategy, name)}


def tensor_media(figures: Iterable[TensorFigures], thresholds_inside: Iterable[float]) -> dict[str, Any]:
    """Histograms over the synchronised tensors and the thresholds inside the model, and a table of the tensors."""
    import wandb

    figures = list(figures)
    media: dict[str, Any] = {}
    histograms: dict[str, Iterable[float | None]] = {
        "dct/dp/log10_density": [figure.density for figure in figures],
        "dct/dp/log10_threshold": [figure.threshold for figure in figures],
        "dct/dp/log10_residual_norm": [figure.residual_norm for figure in figures],
        "dct/mp/log10_threshold": thresholds_inside,
    }
    for key, values in histograms.items():
        if logarithms := [math.log10(value) for value in values if value]:
            media[key] = wandb.Histogram(logarithms)
    if figures:
        media["dct/dp/tensors"] = wandb.Table(
            columns=["tensor", "entries", "density", "threshold", "residual_norm"],
            data=[list(figure) for figure in figures],
        )
    return media


def summary_media(tables: Mapping[str, Iterable[tuple[str, str]]]) -> dict[str, Any]:
    """The tables printed at the end of fit, by title, as one."""
    import wandb

    rows = [[title, name, value] for title, table in tables.items() for name, value in table]
    return {"dct/summary": wandb.Table(columns=["table", "figure", "value"], data=rows)}
