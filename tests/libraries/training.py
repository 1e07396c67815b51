"""What the trainings of all libraries share: two trainers, and the result as JSON."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import lightning as L

import lightning_dct  # noqa: F401  registers strategy="dct"

# The loss of the last validation, and what a model that was loaded predicts; None on other ranks
# than the first.
Outcome = tuple[float, list[float]] | None


def run(train: Callable[[L.Trainer, L.Trainer, str], Outcome], epochs: int) -> None:
    """Train with the strategy of the command line on two ranks, and write the outcome.

    ``train`` gets a trainer of two ranks, one of a single process, and the name of a checkpoint.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    L.seed_everything(0)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        strategy=given.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        default_root_dir=given.output.parent,
        enable_checkpointing=False,
        **quiet,
    )
    alone = L.Trainer(accelerator="cpu", devices=1, **quiet)
    outcome = train(trainer, alone, str(given.output.with_suffix(".ckpt")))
    if outcome is None:
        return
    loss, predicted = outcome
    assert all(math.isfinite(value) for value in (loss, *predicted))
    ratio = None
    if given.strategy != "ddp":
        ratio = trainer.strategy.traffic.totals.compression_ratio
    given.output.write_text(json.dumps({"loss": loss, "predicted": predicted, "ratio": ratio}))
