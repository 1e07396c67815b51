"""Logs the traffic and its compression, prints a table at the end of fit, and has the ratio as a
metric.
"""

import math
import statistics
from dataclasses import replace
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_dct.activations.module import CompressedModule
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.callbacks import wandb_runs
from lightning_dct.callbacks.run_advice import RunAdvice
from lightning_dct.compress.bucket_plan import local_of, real_numel
from lightning_dct.config import check_integer
from lightning_dct.lightning_private import is_logged, logged_step
from lightning_dct.traffic import FP32_BYTES, Traffic, TrafficTotals, all_reduce_bytes, format_bytes


class CompressionRatio(Metric):
    """Dense fp32 bytes over bytes really sent, summed over updates and ranks.

    ``compute`` returns a scalar fp64 tensor; NaN when nothing was sent.

    Example:
        >>> from lightning_dct import CompressionRatio
        >>> from lightning_dct.traffic import TrafficTotals
        >>> ratio = CompressionRatio()
        >>> ratio.update(TrafficTotals(bytes_sent=10, bytes_dense=1000))
        >>> ratio.update(TrafficTotals(bytes_sent=30, bytes_dense=1000))
        >>> ratio.compute()
        tensor(50., dtype=torch.float64)
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    bytes_sent: Tensor
    bytes_dense: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("bytes_sent", "bytes_dense"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, traffic: TrafficTotals) -> None:
        """Add what was sent since the last update: ``strategy.traffic.totals -
        totals_at_last_update``.
        """
        self.bytes_sent += traffic.bytes_sent
        self.bytes_dense += traffic.bytes_dense

    def compute(self) -> Tensor:
        """The ratio over everything added so far."""
        return torch.where(self.bytes_sent > 0, self.bytes_dense / self.bytes_sent, torch.nan)


class CompressionMonitor(pl.Callback):
    """Log the traffic of training to every logger, one dict a step, at the Trainer's logging
    interval.

    ============================  ======================================================================================
    key                           value
    ============================  ======================================================================================
    dct/compression_ratio         bytes of the dense fp32 exchange over bytes sent, of all exchanges since the last log
    dct/run_compression_ratio     the same of the whole run, before a resume too
    dct/overhead_ms               time spent compressing and decompressing, ms a step, since the last log
    dct/seconds                   seconds of training since fit began, without validations
    dct/dp/compression_ratio      the same ratio, data parallelism only: updates or gradients
    dct/dp/density                entries sent over entries due, since the last log
    dct/dp/bytes_sent             bytes that this rank has sent, before a resume too
    dct/dp/bytes_dense            bytes that the dense fp32 exchange would have sent
    dct/dp/threshold              median of the thresholds of all compressed tensors
    dct/dp/residual_norm          Euclidean norm of the residual of this rank
    ============================  ======================================================================================

    The keys under ``dct/mp/`` are the same for traffic inside a split model: activations, embedding
    rows and their gradients. They are logged when there has been any. One process counts what two
    would exchange. ``dct/mp/overflows`` counts the forwards in which more activations reached a
    threshold than a payload holds.

    The values are those of rank 0. With the all-gather every rank sends the same number of bytes.
    Inside the model ranks differ, and the table at the end sums over all of them.

    The monitor works with any strategy that has a ``traffic`` counter. It logs thresholds and
    residuals if the strategy also has a ``synchronizer``. For Lightning's own ``DDPStrategy`` it
    counts the dense all-reduce of each step itself, so that a run can be compared with it. A
    ``CSVLogger`` also gets the settings, as ``lightning_dct``, and a ``WandbLogger`` more; see
    :mod:`lightning_dct.callbacks.wandb_runs`.

    Args:
        tensors_every_n_steps: Optimizer steps between two logs of every tensor, for W&B only; 0 for
            none.

    Raises:
        TypeError: ``tensors_every_n_steps`` is not a whole number.
        ValueError: It is negative.
    """

    def __init__(self, tensors_every_n_steps: int = 500) -> None:
        check_integer("CompressionMonitor(tensors_every_n_steps)", tensors_every_n_steps, minimum=0)
        self.tensors_every_n_steps = tensors_every_n_steps
        self._at_fit_start: dict[str, TrafficTotals] = {}
        self._bytes_of_ddp: int | None = None  # in a step
        self._described: dict[str, Any] = {}  # the settings that loggers know
        self._since = 0.0  # when training began, moved by the time of validations

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin counting, also in a resumed run."""
        self._next_tensors_at = 0
        self._since = perf_counter()
        self._described = {}
        self._is_due = False
        strategy = trainer.strategy
        self._bytes_of_ddp = None
        self._began_at = trainer.global_step
        if type(strategy) is DDPStrategy and strategy._ddp_comm_hook is None:
            entries = sum(
                real_numel(parameter)
                for parameter in pl_module.parameters()
                if parameter.requires_grad
            )
            self._bytes_of_ddp = all_reduce_bytes(FP32_BYTES * entries, _ranks_of(strategy))
        totals = self._at_fit_start = self._at_last_log = self._totals(trainer)
        self._steps_before = totals["dp"].steps if totals else 0
        if not totals:
            rank_zero_warn(
                f"`CompressionMonitor` has nothing to report: {type(strategy).__name__} does not"
                " count its traffic. Use `Trainer(strategy='dct')`."
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Describe the run to W&B and CSV files if its settings are new, and log when the Trainer
        logs.
        """
        # Not before the first step: the strategy chooses settings when training starts, after this
        # callback's turn.
        if trainer.is_global_zero and self._described != (
            settings := wandb_runs.settings_of(trainer)
        ):
            self._described = settings
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    wandb_runs.describe_run(logger.experiment, settings)
                elif isinstance(logger, CSVLogger):
                    logger.log_hyperparams({wandb_runs.CONFIG_KEY: settings})
        totals = self._totals(trainer)
        if not totals:
            return
        synchronised = totals["dp"].steps > self._steps_before
        self._steps_before = totals["dp"].steps
        # Not every batch has an optimizer step, as with accumulation: the next one that has is
        # logged.
        self._is_due = self._is_due or is_logged(trainer)
        if not synchronised or not trainer.is_global_zero or not self._is_due:
            return
        self._is_due = False
        if (synchronizer := getattr(trainer.strategy, "synchronizer", None)) is not None:
            # A GPU reports the entries it has sent late. The norm of the residual waits for it
            # anyway.
            synchronizer.flush()
        totals = self._totals(trainer)
        recent = {part: now - self._at_last_log[part] for part, now in totals.items()}
        dp = recent["dp"]
        mp = recent["mp"]
        overhead = 1e3 * (dp.seconds + mp.seconds) / dp.steps
        metrics = {"dct/overhead_ms": overhead, "dct/seconds": perf_counter() - self._since}
        for key, parts in (
            (wandb_runs.RATIO, recent.values()),
            (wandb_runs.RATIO_OF_RUN, totals.values()),
        ):
            if sent := sum(part.bytes_sent for part in parts):
                metrics[key] = sum(part.bytes_dense for part in parts if part.bytes_sent) / sent
        thresholds = [] if synchronizer is None else [*synchronizer.thresholds.by_label().values()]
        norm = None if synchronizer is None else synchronizer.norm()
        metrics |= part_metrics("dp", totals["dp"], dp, thresholds, norm)
        modules = _modules_of(trainer)
        if mp.steps:
            norm = math.hypot(*(module.residual_norm() for module in modules))
            thresholds = [
                threshold for module in modules for threshold in module.thresholds_in_use()
            ]
            metrics |= part_metrics("mp", totals["mp"], mp, thresholds, norm)
        if overflows := sum(
            module.overflows for module in modules if isinstance(module, SplitPoint)
        ):
            metrics["dct/mp/overflows"] = overflows
        # The dense bytes of steps without an exchange are those that the next one saves.
        later = {part: 0 if new.bytes_sent else new.bytes_dense for part, new in recent.items()}
        self._at_last_log = {
            p: replace(now, bytes_dense=now.bytes_dense - later[p]) for p, now in totals.items()
        }
        step = logged_step(trainer)
        of_tensors: dict[str, Any] = {}
        if step >= self._next_tensors_at:
            of_tensors = self._tensors(trainer)
            self._next_tensors_at = step + self.tensors_every_n_steps
        for logger in trainer.loggers:
            # One call, because each call is a row of W&B's history.
            logger.log_metrics(
                metrics | (of_tensors if isinstance(logger, WandbLogger) else {}), step=step
            )

    def on_validation_start(self, *_: Any) -> None:
        """Leave validations out of the time."""
        self._validating_since = perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        """Go on with the time."""
        self._since += perf_counter() - self._validating_since

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the tables, and log them to W&B."""
        totals = self._totals(trainer)
        if not totals or not totals["dp"].steps:
            return
        # Without a batch, as in a resumed run that was finished already, training never starts.
        since = {part: now - self._at_fit_start.get(part, now) for part, now in totals.items()}
        ratio = math.nan
        if _modules_of(trainer):  # the same on every rank, unlike its traffic
            inside = CompressionRatio().to(trainer.strategy.root_device)
            inside.update(since["mp"])
            ratio = float(inside.compute())  # of all ranks
        if not trainer.is_global_zero:
            return
        tables = {}
        if since["dp"].bytes_dense:  # a single process sends nothing
            title = (
                f"Synchronisation, rank 0 of {trainer.world_size}, {since['dp'].steps:,} optimizer"
                " steps"
            )
            tables[title] = summary_rows(since["dp"], _not_sent(trainer))
            callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            for advice in (callback for callback in callbacks if isinstance(callback, RunAdvice)):
                tables[title] += advice.summary_rows(trainer)
        if since["mp"].steps:
            title = (
                f"Inside the model, rank 0 of {trainer.world_size}, {since['mp'].steps:,} exchanges"
            )
            tables[title] = summary_rows(since["mp"])
            if not math.isnan(ratio):
                tables[title].insert(2, ("of all ranks", f"{ratio:,.1f}x"))
        for title, rows in tables.items():
            width = max(len(name) for name, _ in rows)
            print(
                f"\n{title}",
                *(f"{name.ljust(width)}  {fact}" for name, fact in rows),
                sep="\n",
                flush=True,
            )
        for logger in wandb_runs.wandb_loggers(trainer):
            media = {**wandb_runs.summary_media(tables), **self._tensors(trainer)}
            logger.log_metrics(media, step=logged_step(trainer))

    def _totals(self, trainer: pl.Trainer) -> dict[str, TrafficTotals]:
        """The totals of data parallelism ("dp") and inside the model ("mp"); empty if nothing is
        counted.
        """
        found = {"mp": getattr(trainer.strategy, "split_traffic", Traffic()).totals}
        if (traffic := getattr(trainer.strategy, "traffic", None)) is not None:
            return {"dp": traffic.totals, **found}
        if self._bytes_of_ddp is None:
            return {}
        # Several optimizers have a backward each.
        steps = trainer.global_step - self._began_at
        sent = steps * self._bytes_of_ddp
        return {"dp": TrafficTotals(steps=steps, bytes_sent=sent, bytes_dense=sent), **found}

    def _tensors(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Figures of every tensor, if a W&B logger takes them."""
        if not self.tensors_every_n_steps or not wandb_runs.wandb_loggers(trainer):
            return {}
        synchronizer = getattr(trainer.strategy, "synchronizer", None)
        figures = [] if synchronizer is None else synchronizer.figures_by_tensor()
        inside = [
            threshold for module in _modules_of(trainer) for threshold in module.thresholds_in_use()
        ]
        return wandb_runs.tensor_media(figures, inside)


def part_metrics(
    part: str,
    totals: TrafficTotals,
    recent: TrafficTotals,
    thresholds: list[float],
    residual_norm: float | None,
) -> dict[str, float]:
    """The metrics of one kind of traffic, with totals since fit began and those since the last
    log.
    """
    metrics: dict[str, float] = {"bytes_sent": totals.bytes_sent, "bytes_dense": totals.bytes_dense}
    if recent.entries:
        metrics["density"] = recent.density
    if recent.bytes_sent:
        metrics["compression_ratio"] = recent.compression_ratio
    if residual_norm is not None:
        metrics["residual_norm"] = residual_norm
    if thresholds:
        metrics["threshold"] = statistics.median(thresholds)
    if totals.admitted_rows:
        metrics |= {"admitted_rows": totals.admitted_rows, "evicted_rows": totals.evicted_rows}
    return {f"dct/{part}/{key}": value for key, value in metrics.items()}


def summary_rows(totals: TrafficTotals, not_sent: float | None = None) -> list[tuple[str, str]]:
    """The rows of a table at the end of fit; ``not_sent`` is the norm of the residual over that of
    the weights.
    """
    inside = (
        f", and {format_bytes(totals.bytes_inside_node)} inside the node"
        if totals.bytes_inside_node
        else ""
    )
    dense = f"instead of {format_bytes(totals.bytes_dense)} dense in fp32"
    waiting = (
        "" if not_sent is None else f"; {100 * not_sent:.2g}% of the weights' norm is not sent yet"
    )
    rows = [
        ("bytes sent", f"{format_bytes(totals.bytes_sent)} {dense}{inside}"),
        (
            "compression ratio",
            f"{totals.compression_ratio:,.1f}x" if totals.bytes_sent else "nothing was sent",
        ),
    ]
    if totals.bytes_of_buffers:
        much = 2 * totals.bytes_of_buffers > totals.bytes_sent
        remedy = "; `broadcast_buffers=False` leaves each rank its own" if much else ""
        rows.append(
            ("of them buffers", f"{format_bytes(totals.bytes_of_buffers)} uncompressed{remedy}")
        )
    if totals.entries:
        rows.append(
            ("entries sent", f"{100 * totals.density:.3g}% of {totals.entries:,} due{waiting}")
        )
    if totals.admitted_rows:
        rows.append(
            (
                "rows of growing tables",
                f"{totals.admitted_rows:,} admitted, {totals.evicted_rows:,} evicted",
            )
        )
    return rows


def _not_sent(trainer: pl.Trainer) -> float | None:
    """The norm of what this rank has not sent over that of its weights.

    None where residuals are not of weights, where all weights are zero, and where one of the two is
    not finite.
    """
    updates = getattr(trainer.strategy, "updates", None)
    if updates is None:
        return None
    weights = math.hypot(
        *(float(local_of(p.detach()).norm()) for p in updates.parameter_names if p.requires_grad)
    )
    share = float(updates.norm()) / weights if 0 < weights < math.inf else math.nan
    return share if math.isfinite(share) else None


def _modules_of(trainer: pl.Trainer) -> list[CompressedModule]:
    return getattr(trainer.strategy, "activation_modules", [])


def _ranks_of(strategy: DDPStrategy) -> int:
    group = strategy._ddp_kwargs.get("process_group")
    return strategy.world_size if group is None else group.size()
