"""fp16 with a loss scale: residuals live in unscaled units, and a skipped step leaves no trace in them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from distributed.training import (
    Applied,
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_learns,
    assert_replicas_equal,
    fit,
    hash_of,
    local_gradients,
    rank,
)
from lightning_dct import DCTStrategy

BATCHES = 16
# The step in which the gradients of one rank overflow, and that rank.
ONE_ENTRY = (5, 1)
EVERYTHING = (9, 0)


class Overflowing(Module):
    """One infinite entry in one gradient in one step, nothing but NaN and infinity in another."""

    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.overflows, self.now = overflows, (-1, -1)
        self.model.first.weight.register_hook(self._break_one_entry)

    def _break_one_entry(self, gradient: Tensor) -> Tensor:
        if self.overflows and self.now == ONE_ENTRY:
            gradient = gradient.clone()
            gradient[3, 4] = float("inf")
        return gradient

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.now = (batch_idx, rank())
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.overflows and self.now == EVERYTHING else loss


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
    }


def train(value_format: str, overflows: bool, scale: float, settings: dict[str, Any]) -> Any:
    strategy = DCTStrategy(density=0.1, value_format=value_format, refresh_every=5, **settings)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))
    applied = Applied()
    with local_gradients() as given:
        run = fit(
            strategy,
            Overflowing(overflows),
            BATCHES,
            watch=Watch(look=look),
            plugins=[plugin],
            callbacks=[applied],
        )
    return run, (given, applied.sums, run.residuals)


@pytest.mark.parametrize(
    ("value_format", "settings"),
    [("fp32", {}), ("bf16", {"bucket_cap_mb": 0.0005}), ("int8", {}), ("1bit", {}), ("bf16", {"guard": False})],
)
def test_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, value_format: str, settings: dict[str, Any]) -> None:
    """Oracle: the state before the step, bit by bit; and the sum of the gradients of all other steps."""
    results = ranks(2).run(train, value_format, True, 2.0**12, settings)
    runs: list[Run] = [run for run, _ in results]
    assert_replicas_equal(runs)
    for run in runs:
        seen = run.seen
        for step in range(1, BATCHES):
            before, after = seen[step - 1], seen[step]
            if step in (ONE_ENTRY[0], EVERYTHING[0]):
                assert after.pop("scale") == before.pop("scale") / 2
                for name, residual in before.pop("residuals").items():
                    assert torch.equal(residual, after["residuals"][name])
                before["residuals"] = after["residuals"]
                before["scale"] = after["scale"] = seen[step + 1]["scale"]
                assert after == before
            else:
                assert after["weights"] != before["weights"]
                assert after["synchronisations"] == before["synchronisations"] + 1
        assert all(residual.isfinite().all() for now in seen for residual in now["residuals"].values())
        assert run.synchronisations == BATCHES - 2
        # The refresh that was due in the step that overflowed is made up for in the next one.
        assert [now["refreshes"] for now in seen][4:8] == [1, 1, 2, 2]
    assert_conserved([sums for _, sums in results])


def test_residuals_are_in_unscaled_units(ranks: Any) -> None:
    """Oracle: the same run with a 64 times smaller scale, and the sums of the unscaled gradients."""
    small, large = (ranks(2).run(train, "fp32", False, scale, {}) for scale in (2.0**8, 2.0**14))
    assert_conserved([sums for _, sums in large])
    for (one, _), (other, _) in zip(small, large, strict=True):
        assert_learns(one)
        for name, residual in one.residuals.items():
            expected, found = float(residual.norm()), float(other.residuals[name].norm())
            assert 0.5 * expected <= found <= 2 * expected
