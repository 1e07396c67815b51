"""Checks of settings and models for a pipeline. All run before any process waits for another, and name a remedy."""

from collections.abc import Mapping

import lightning.pytorch as pl


def check_ddp_settings(settings: Mapping[str, object]) -> None:
    """Refuse settings of DDPStrategy and DCTStrategy that have no meaning here (ValueError)."""
    for setting in ("process_group", "static_graph", "find_unused_parameters", "target_overhead"):
        if settings.get(setting):
            raise ValueError(
                f"`DCTPipelineStrategy` cannot take `{setting}`: it makes its own process groups, gives finished"
                " gradients to DistributedDataParallel and keeps its settings. Leave the setting out."
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


def check_training(model: pl.LightningModule, precision: object) -> None:
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
