"""fp16 with a loss scale: residuals live in unscaled units, and a skipped step leaves no trace in
them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from differences import assert_same
from distributed.resuming import fit_half
from distributed.training import (
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_learns,
    assert_replicas_equal,
    fit,
    fit_recorded,
    hash_of,
    rank,
)
from lightning_dct import DCTStrategy

BATCHES = 16
# The step in which the gradients of one rank overflow, and that rank.
ONE_ENTRY = (5, 1)
EVERYTHING = (9, 0)


class Overflowing(Module):
    """One infinite entry in one gradient in one step, nothing but NaN and infinity in others."""

    def __init__(
        self, overflows: bool, everything: Sequence[tuple[int, int]] = (EVERYTHING,)
    ) -> None:
        super().__init__()
        self.overflows = overflows
        self.everything = everything
        self.now = (-1, -1)
        self.model.first.weight.register_hook(self._break_one_entry)

    def _break_one_entry(self, gradient: Tensor) -> Tensor:
        if self.overflows and self.now == ONE_ENTRY:
            gradient = gradient.clone()
            gradient[3, 4] = float("inf")
        return gradient

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.now = (batch_idx, rank())
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.overflows and self.now in self.everything else loss


def look(trainer: Trainer) -> dict[str, Any]:
    synchronizer = trainer.strategy.synchronizer
    return {
        "weights": hash_of(trainer.lightning_module),
        "scale": trainer.precision_plugin.scaler.get_scale(),
        "synchronisations": synchronizer.synchronisations,
        "since refresh": synchronizer.steps_since_refresh,
        "thresholds": synchronizer.thresholds.state_dict(),
        "residuals": synchronizer.residuals.state_dict(),
        "refreshes": synchronizer.traffic.totals.refreshes,
        "owned": synchronizer.feedback.owned.state_dict(),
    }


def train(
    settings: dict[str, Any], module: Overflowing, scale: float, growth_interval: int = 1000
) -> Any:
    strategy = DCTStrategy(compress="gradients", density=0.1, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    return fit_recorded(strategy, module, BATCHES, watch=Watch(look=look), plugins=plugins)


def train_overflowing(settings: dict[str, Any]) -> Any:
    return train(settings, Overflowing(True), 2.0**12)


@pytest.mark.parametrize(
    ("value_format", "settings"),
    [
        ("1bit", {}),
        ("fp32", {"adapt_threshold": False}),
        ("bf16", {"bucket_cap_mb": 0.0005, "exchange": "two_phase"}),
    ],
)
def test_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Any, value_format: str, settings: dict[str, Any]
) -> None:
    """Oracle: the state before the step, bit by bit; and the sum of the gradients of all other
    steps.
    """
    results = ranks(2).run(
        train_overflowing, {"value_format": value_format, "refresh_every": 5, **settings}
    )
    runs: list[Run] = [run for run, _ in results]
    assert_replicas_equal(runs)
    for run in runs:
        seen = run.seen
        for step in range(1, BATCHES):
            before = seen[step - 1]
            after = seen[step]
            if step in (ONE_ENTRY[0], EVERYTHING[0]):
                assert after["scale"] == before["scale"] / 2
                assert_same({**after, "scale": 0}, {**before, "scale": 0})
            else:
                assert after["weights"] != before["weights"]
                assert after["synchronisations"] == before["synchronisations"] + 1
        assert all(
            residual.isfinite().all() for now in seen for residual in now["residuals"].values()
        )
        assert run.synchronisations == BATCHES - 2
        # The refresh that was due in the step that overflowed is made up for in the next one.
        assert [now["refreshes"] for now in seen][4:8] == [1, 1, 2, 2]
    assert_conserved([sums for _, sums in results])


def train_scaled(scale: float) -> Any:
    return train({"value_format": "fp32", "refresh_every": 5}, Overflowing(False), scale)


def test_residuals_are_in_unscaled_units(ranks: Any) -> None:
    """Oracle: the same run with a 64 times smaller scale, and the sums of the unscaled
    gradients.
    """
    small, large = (ranks(2).run(train_scaled, scale) for scale in (2.0**8, 2.0**14))
    assert_conserved([sums for _, sums in large])
    for (one, _), (other, _) in zip(small, large, strict=True):
        assert_learns(one)
        for name, residual in one.residuals.items():
            expected = float(residual.norm())
            found = float(other.residuals[name].norm())
            assert 0.5 * expected <= found <= 2 * expected


def overflow_at_the_start() -> Any:
    return train(
        {}, Overflowing(True, everything=((0, 1), (1, 0), (12, 1))), 2.0**10, growth_interval=2
    )


def test_overflow_in_the_first_steps_and_a_growing_scale(ranks: Any) -> None:
    """Oracle: after the skipped steps, all as at the start; at the end, the sums of the steps that
    counted.
    """
    results = ranks(2).run(overflow_at_the_start)
    for run, _ in results:
        for now in run.seen[:2]:
            assert now["synchronisations"] == now["refreshes"] == 0
            assert now["thresholds"] == {"values": {}, "targets": {}}
            assert not any(residual.any() for residual in now["residuals"].values())
        assert [now["scale"] for now in run.seen[:5]] == [2.0**9, 2.0**8, 2.0**8, 2.0**9, 2.0**9]
        # One of the two first overflows of the scale, one of the entry in step 5 and one in step
        # 12.
        assert run.synchronisations == BATCHES - 4
    assert_replicas_equal([run for run, _ in results])
    assert_conserved([sums for _, sums in results])


def train_unscaled() -> Run:
    def residuals_of(trainer: Trainer) -> dict[str, Tensor]:
        return trainer.strategy.synchronizer.residuals.state_dict()

    strategy = DCTStrategy(compress="gradients", density=0.1, value_format="2bit")
    return fit(strategy, Overflowing(True), 12, watch=Watch(look=residuals_of))


def test_without_a_scaler_nonfinite_gradients_arrive_and_stay_out_of_residuals(ranks: Any) -> None:
    """Oracle: as with DDP every rank's weights break, and at the very entry; residuals stay finite
    throughout.
    """
    runs = ranks(2).run(train_unscaled)
    assert runs[0].hashes == runs[1].hashes
    for run in runs:
        assert not run.weights["model.first.weight"][3, 4].isfinite()
        assert all(residual.isfinite().all() for now in run.seen for residual in now.values())
        assert all(loss == loss for loss in run.losses[: ONE_ENTRY[0] + 1])


def train_updates(save: Path | None, load: Path | None) -> Any:
    """Steps of rank 1 alone overflow, so its loss scale becomes another one than that of rank 0."""
    plugin = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
    )
    module = Overflowing(True, everything=((1, 1), (3, 1), (13, 1)))
    strategy = DCTStrategy(local_steps=2, density=0.1, warmup_steps=4)
    hashes, state = fit_half(save, load, strategy, module, plugins=[plugin])
    scale = plugin.scaler.get_scale()
    scales = [None, None]
    dist.all_gather_object(scales, scale)
    assert scales[0] != scales[1]
    return hashes, {**state, "scale": scale}


RATE = 0.125
DECAY = 0.25


def decay_under_a_scaler(skipping: tuple[int, ...], fused: bool, local_steps: int) -> list[float]:
    """By how much nearly all shared weights have shrunk after each of three steps, the first
    skipped by some ranks.
    """
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    module = Overflowing(True, everything=tuple((0, one) for one in skipping))
    module.optimizer = torch.optim.AdamW
    module.optimizer_settings = {"lr": RATE, "weight_decay": DECAY, "fused": fused}
    before = module.model.first.weight.detach().clone()

    def shrunk(trainer: Trainer) -> float:
        shared = trainer.strategy.updates.weights.shared("model.first.weight")
        return float((shared / before).median())

    strategy = DCTStrategy(local_steps=local_steps, density=0.1, warmup_steps=0)
    return fit(strategy, module, 4, watch=Watch(look=shrunk), plugins=[plugin]).seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skipping", [(), (1,), (0, 1)])
def test_a_skipped_step_does_not_decay(ranks: Any, skipping: tuple[int, ...], fused: bool) -> None:
    """Oracle: the mean of what the ranks have decayed by.

    Most entries have moved by nothing else, so far.
    """
    one_step = 1 - RATE * DECAY
    first = (one_step * (2 - len(skipping)) + len(skipping)) / 2
    for seen in ranks(2).run(decay_under_a_scaler, skipping, fused, 1):
        assert seen == pytest.approx([first * one_step**step for step in range(4)], rel=1e-6)
    for seen in ranks(2).run(decay_under_a_scaler, skipping, fused, 2):
        later = (one_step**2 * (2 - len(skipping)) + one_step * len(skipping)) / 2
        assert seen == pytest.approx([1.0, later, later, later * one_step**2], rel=1e-6)
