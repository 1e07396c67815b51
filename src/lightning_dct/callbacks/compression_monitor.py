"""Logs what compression does to the traffic, and sums it up in a table at the end of fit."""

from __future__ import annotations

import statistics
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dct.traffic import Traffic, TrafficTotals


class CompressionMonitor(pl.Callback):
    """Log the traffic of gradient synchronisation to every logger, one dict a step, at the Trainer's logging interval.

    ============================  ======================================================================================
    key                           value
    ============================  ======================================================================================
    dct/compression_ratio         bytes of the dense fp32 exchange over bytes sent, all traffic, since the last log
    dct/overhead_ms               time spent compressing and decompressing, ms a step, since the last log
    dct/dp/compression_ratio      the same ratio, gradients only
    dct/dp/density                entries sent over entries due, since the last log
    dct/dp/bytes_sent             bytes this rank put on the wire since fit began
    dct/dp/bytes_dense            bytes the dense fp32 exchange would have put there
    dct/dp/threshold              median of the thresholds of all compressed tensors
    dct/dp/residual_norm          Euclidean norm of everything this rank holds back
    ============================  ======================================================================================

    The values are those of rank 0. With the all-gather every rank sends the same number of bytes.

    The monitor works with any strategy that has a ``traffic`` counter; thresholds and residuals are logged when the
    strategy has a ``synchronizer`` as well.
    """

    def __init__(self) -> None:
        self._at_fit_start = TrafficTotals()
        self._at_last_log = TrafficTotals()
        self._steps_before = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin counting where a resumed run left off."""
        traffic = _traffic_of(trainer)
        if traffic is None:
            rank_zero_warn(
                f"`CompressionMonitor` has nothing to report: {type(trainer.strategy).__name__} does not count its"
                " traffic. Use `Trainer(strategy='dct')`."
            )
        else:
            self._at_fit_start = self._at_last_log = traffic.totals
            self._steps_before = traffic.totals.steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log when the Trainer logs."""
        traffic = _traffic_of(trainer)
        if traffic is None:
            return
        totals = traffic.totals
        synchronised, self._steps_before = totals.steps > self._steps_before, totals.steps
        # Lightning's rhythm counts optimizer steps and holds for each of a step's micro-batches: log after the last.
        if not synchronised or not trainer.is_global_zero or not trainer._logger_connector.should_update_logs:
            return
        metrics = self._metrics(trainer, totals, totals - self._at_last_log)
        self._at_last_log = totals
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table."""
        traffic = _traffic_of(trainer)
        if traffic is None or not trainer.is_global_zero or not traffic.totals.steps:
            return
        synchronizer = getattr(trainer.strategy, "synchronizer", None)
        rows = summary_rows(traffic.totals - self._at_fit_start, trainer.world_size)
        if synchronizer is not None:
            rows.append(("held back (norm of the residual)", f"{synchronizer.residuals.norm():.4g}"))
        print_table("Gradient synchronisation, rank 0", rows)

    def _metrics(self, trainer: pl.Trainer, totals: TrafficTotals, recent: TrafficTotals) -> dict[str, float]:
        metrics: dict[str, float] = {
            "dct/overhead_ms": recent.overhead_ms,
            "dct/dp/density": recent.density,
            "dct/dp/bytes_sent": totals.bytes_sent,
            "dct/dp/bytes_dense": totals.bytes_dense,
        }
        if recent.bytes_sent:
            metrics["dct/compression_ratio"] = metrics["dct/dp/compression_ratio"] = recent.compression_ratio
        synchronizer = getattr(trainer.strategy, "synchronizer", None)
        if synchronizer is not None:
            metrics["dct/dp/residual_norm"] = synchronizer.residuals.norm()
            if thresholds := synchronizer.thresholds.values():
                metrics["dct/dp/threshold"] = statistics.median(thresholds)
        return metrics


def summary_rows(totals: TrafficTotals, world_size: int) -> list[tuple[str, str]]:
    """The rows of the table at the end of fit.

    Args:
        totals: What was counted.
        world_size: Ranks that took part.
    """
    return [
        ("ranks", str(world_size)),
        ("optimizer steps synchronised", f"{totals.steps:,}"),
        ("bytes of the dense fp32 exchange", format_bytes(totals.bytes_dense)),
        ("bytes sent", format_bytes(totals.bytes_sent)),
        ("compression ratio", f"{totals.compression_ratio:,.1f}x" if totals.bytes_sent else "nothing was sent"),
        ("entries kept", f"{100 * totals.density:.3g}% of {totals.entries:,}"),
        ("time spent compressing", f"{totals.seconds:.2f} s ({totals.overhead_ms:.2f} ms a step)"),
        ("thresholds refreshed", f"{totals.refreshes:,} times"),
    ]


def format_bytes(num_bytes: int) -> str:
    """A byte count for people: decimal units, as network rates have."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value, 2) < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of two columns, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(name) for name, _ in rows)
        print("\n".join([f"\n{title}", *(f"  {name:<{width}}  {value}" for name, value in rows)]), flush=True)
        return
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def _traffic_of(trainer: pl.Trainer) -> Traffic | None:
    return getattr(trainer.strategy, "traffic", None)
