"""Thresholds are selected anew on the same optimizer step on every rank, whatever a batch is."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from distributed.training import Module, Watch, fit, loader, trainer_for
from lightning_dct import CompressionMonitor, DCTStrategy, ThresholdRefresh


def look(trainer: Trainer) -> tuple[int, int, int]:
    synchronizer = trainer.strategy.synchronizer
    return (
        synchronizer.synchronisations,
        synchronizer.steps_since_refresh,
        trainer.strategy.traffic.totals.refreshes,
    )


def refreshing(seen: list[tuple[int, int, int]], refreshes: int = 0) -> list[int]:
    """The synchronisations, from 0, in which the number of refreshes rose."""
    steps = []
    for synchronisations, since, total in seen:
        if total > refreshes:
            steps.append(synchronisations - 1)
            assert since == 1
            refreshes = total
    return steps


def train(folder: Path, batches: int, ckpt_path: Path | None, settings: dict[str, Any]) -> Any:
    watch = Watch(look=look)
    # Guard off: it takes a new threshold from a step that shows far too many entries, which is no
    # refresh.
    strategy = DCTStrategy(
        compress="gradients", density=0.1, refresh_every=5, adapt_threshold=False
    )
    fit(
        strategy,
        Module(),
        batches,
        watch=watch,
        ckpt_path=None if ckpt_path is None else str(ckpt_path),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=7)],
        **settings,
    )
    return watch.seen


@pytest.mark.parametrize("accumulate", [1, 3])
def test_refreshes_by_optimizer_steps_also_after_resume(
    ranks: Any, tmp_path: Path, accumulate: int
) -> None:
    """Oracle: synchronisations 0, 5, 10, 15; saved after 7 and resumed, it goes on with 10."""
    settings = {"accumulate_grad_batches": accumulate}
    for seen in ranks(2).run(train, tmp_path / "whole", 17 * accumulate, None, settings):
        assert seen[-1][0] == 17
        assert refreshing(seen) == [0, 5, 10, 15]
    for seen in ranks(2).run(
        train, tmp_path / "resumed", 17 * accumulate, tmp_path / "whole" / "step=7.ckpt", settings
    ):
        assert seen[0][0] == 7 + (accumulate == 1)
        assert seen[-1][0] == 17
        assert refreshing(seen, refreshes=2) == [10, 15]


def test_refreshes_across_epochs_that_end_within_an_accumulation(
    ranks: Any, tmp_path: Path
) -> None:
    """Oracle: 7 batches at 3 a step make 3 steps an epoch; the count runs on over 4 epochs."""
    for seen in ranks(2).run(
        train, tmp_path, 7, None, {"accumulate_grad_batches": 3, "max_epochs": 4}
    ):
        assert seen[-1][0] == 12
        assert refreshing(seen) == [0, 5, 10]


def callbacks_after_two_fits(given: list[Any]) -> list[str]:
    trainer = trainer_for(
        DCTStrategy(compress="gradients", density=0.1, refresh_every=7),
        callbacks=given,
        enable_checkpointing=True,
    )
    for _ in range(2):
        trainer.fit(Module(), loader(2, 40, 8))
    refresh = next(
        callback for callback in trainer.callbacks if isinstance(callback, ThresholdRefresh)
    )
    return [type(callback).__name__ for callback in trainer.callbacks] + [refresh.every_n_steps]


@pytest.mark.parametrize(
    ("given", "every_n_steps"), [([], 7), ([ThresholdRefresh(4), CompressionMonitor()], 4)]
)
def test_callbacks_are_attached_once_and_the_users_win(
    ranks: Any, given: list[Any], every_n_steps: int
) -> None:
    """Oracle: one of each kind, before the checkpoint callback; the user's setting where there is
    one.
    """
    *names, found = ranks(2).run(callbacks_after_two_fits, given)[0]
    added = ["CompressionMonitor", "EvaluationJoin", "FailureNotice", "ModelCheckpoint"]
    added += ["RunAdvice", "SignalsAfterStep", "ThresholdRefresh"]
    assert sorted(names) == added
    assert names[:2] == ["FailureNotice", "EvaluationJoin"]
    assert names[-1] == "ModelCheckpoint"
    assert found == every_n_steps
