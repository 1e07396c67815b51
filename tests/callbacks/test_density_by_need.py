"""DensityByNeed on real ranks: shares change on the same step everywhere, for no more bytes, also after a restart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision

from distributed.test_loss_scaling import EVERYTHING, Overflowing
from distributed.test_resume import SaveAndStop, twice_ten_batches
from distributed.training import (
    Applied,
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_replicas_equal,
    fit,
    held_back,
    local_gradients,
    trainer_for,
)
from lightning_dct import DCTStrategy, DensityByNeed


def look(trainer: Trainer) -> tuple[int, dict[str, float], int]:
    synchronizer = trainer.strategy.synchronizer
    return synchronizer.synchronisations, synchronizer.plans.factors, trainer.strategy.traffic.totals.bytes_sent


def train(settings: dict[str, Any], scaled: bool) -> Any:
    applied = Applied()
    module = Overflowing(scaled, ((EVERYTHING),))
    module.optimizer_settings = {"lr": 0.2}
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))] if scaled else []
    strategy = DCTStrategy(density=0.1, guard=False, **settings)
    callbacks = [applied, DensityByNeed(every_n_steps=8)]
    with local_gradients() as given:
        run = fit(strategy, module, 16, watch=Watch(look=look), callbacks=callbacks, plugins=plugins)
    return run, (given, applied.sums, held_back(run.state, given))


@pytest.mark.parametrize(
    ("settings", "scaled", "shared_out_after"),
    [
        ({}, False, 9),
        ({"exchange": "sharded", "bucket_cap_mb": 0.0005}, False, 9),
        ({"warmup_steps": 10}, False, 11),
        # Of 16 steps the one that overflows in one entry comes sixth, and the tenth is the one that is to be counted.
        ({}, True, 9),
    ],
)
def test_shares_change_together(ranks: Any, settings: dict[str, Any], scaled: bool, shared_out_after: int) -> None:
    """Oracle: the steps, counted in synchronisations; bytes a step before and after; gradients conserved in sum."""
    results = ranks(2).run(train, settings, scaled)
    assert_replicas_equal([run for run, _ in results])
    assert_conserved([sums for _, sums in results])
    for run, _ in results:
        assert [now[:2] for now in run.seen] == [now[:2] for now in results[0][0].seen]
        for synchronisations, factors, _ in run.seen:
            assert bool(factors) == (synchronisations > shared_out_after)  # looked at before the callback acts
        factors = run.seen[-1][1]
        assert all(0.24 <= factor <= 4.1 for factor in factors.values())
        assert len({round(factor, 2) for factor in factors.values()}) > 1
        sent = [after[2] - before[2] for before, after in zip(run.seen[1:], run.seen[2:], strict=False)]
        # The first step had other buckets.
        assert sent[-1] <= max(sent[1:5]) * 1.02


def train_resumable(path: Path, what: str) -> Run:
    strategy = DCTStrategy(density=0.1, refresh_every=7)
    callback = DensityByNeed(every_n_steps=6)
    module = Module(None, torch.optim.SGD, lr=0.2)
    watch = Watch(look=look)
    if what == "half":
        trainer_for(strategy, callbacks=[watch, callback, SaveAndStop(path, 10)]).fit(module, twice_ten_batches())
        return Run({}, [], watch.hashes, seen=watch.seen)
    ckpt_path = str(path) if what == "resumed" else None
    return fit(strategy, module, twice_ten_batches(), ckpt_path=ckpt_path, callbacks=[callback], watch=watch)


def test_resumed_run_equals_the_uninterrupted_one(ranks: Any, tmp_path: Path) -> None:
    """Oracle: 20 batches without a break, shared out after 7, 13 and 19."""
    whole, half, resumed = (
        ranks(2).run(train_resumable, tmp_path / "half.ckpt", what) for what in ("whole", "half", "resumed")
    )
    for expected, first, run in zip(whole, half, resumed, strict=True):
        assert first.hashes + run.hashes == expected.hashes
        assert [now[1] for now in first.seen + run.seen] == [now[1] for now in expected.seen]
        changes = [factors for _, factors, _ in expected.seen]
        assert [step for step in range(1, 20) if changes[step] != changes[step - 1]] == [7, 13, 19]


@pytest.mark.parametrize("setting", ["every_n_steps", "bound"])
def test_settings_are_checked(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"`DensityByNeed\({setting}\)` must be at least 1"):
        DensityByNeed(**{setting: 0})
