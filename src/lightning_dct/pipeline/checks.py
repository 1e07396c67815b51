"""Checks of settings and models for a pipeline. All run before any process waits for another, and name a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
import torch

from lightning_dct.callbacks.requirements import AVERAGING

OLDEST_TORCH = "2.13"


def check_torch() -> None:
    """Refuse versions of torch whose schedules are too old (RuntimeError)."""
    if torch.__version__ < OLDEST_TORCH:
        raise RuntimeError(
            f"`DCTPipelineStrategy` needs torch {OLDEST_TORCH} or later, and this is torch {torch.__version__}. Install"
            " a later one, or use `DCTStrategy`, which needs no pipeline."
        )


def check_ddp_settings(settings: Mapping[str, object]) -> None:
    """Refuse settings of DDPStrategy and DCTStrategy that have no meaning here (ValueError)."""
    for setting in ("process_group", "static_graph", "find_unused_parameters", "target_overhead"):
        if settings.get(setting):
            raise ValueError(
                f"`DCTPipelineStrategy` cannot take `{setting}`: it makes its own process groups, gives finished"
                " gradients to DistributedDataParallel and keeps its settings. Leave the setting out."
            )


def check_no_tables(tables: Mapping[str, object]) -> None:
    """Refuse embedding tables that all ranks share (ValueError): ranks of a pipeline have different modules."""
    if tables:
        raise ValueError(
            f"`DCTPipelineStrategy` cannot hold `ShardedEmbeddingBags` ({', '.join(map(repr, tables))}), which are"
            " spread over all ranks. Use `torch.nn.EmbeddingBag` in a stage, or `DCTStrategy`."
        )


def check_schedule(schedule: str, stages: int, micro_batches: int) -> None:
    """Refuse numbers of micro-batches that a schedule cannot run (ValueError)."""
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(
            f"`micro_batches={micro_batches}`: the schedule '1f1b' needs at least one micro-batch per stage"
            f" (`stages={stages}`). Use {stages} or more, or schedule='gpipe'."
        )
    if schedule == "interleaved_1f1b" and micro_batches % max(1, micro_batches // stages):
        raise ValueError(
            f"`micro_batches={micro_batches}`: the schedule 'interleaved_1f1b' needs a multiple of `stages={stages}`."
            f" Use {stages * (micro_batches // stages)}."
        )


def check_training(model: pl.LightningModule, precision: object, callbacks: Iterable[pl.Callback]) -> None:
    """Refuse ways of training that need the whole model, or the whole backward, at once (ValueError)."""
    if not model.automatic_optimization:
        raise ValueError(
            "`DCTPipelineStrategy` works with automatic optimisation only: the schedule runs backward itself, in the"
            " middle of `training_step`. Remove `self.automatic_optimization = False`."
        )
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            "precision='16-mixed' does not work with `DCTPipelineStrategy`: backward runs stage by stage before the"
            " GradScaler could scale the loss, so small fp16 gradients would vanish. Use precision='bf16-mixed', which"
            " needs no scaling, or '32-true'."
        )
    for callback in callbacks:
        if isinstance(callback, AVERAGING):
            raise ValueError(
                f"`{type(callback).__name__}` does not work with `DCTPipelineStrategy`: it copies the whole model, and"
                " each rank has the parameters of its own stage only. Average checkpoints after training."
            )
