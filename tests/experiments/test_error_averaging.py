"""ErrorAveraging on real ranks, against the reference, also after a restart and past skipped
steps.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from distributed.random_runs import Case, draw, run_case, train_gradients
from distributed.resuming import fit_half
from distributed.test_loss_scaling import Overflowing
from distributed.training import (
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_replicas_equal,
    assert_weights_equal,
    fit_recorded,
)
from lightning_dct import DCTStrategy
from lightning_dct.reference import States
from methods import ErrorAveraging


def case_of(exchange: str) -> Case:
    case = draw(1, "gradients", exchange)
    return case._replace(
        dtype=torch.float64,
        settings={**case.settings, "refresh_every": 1, "adapt_threshold": False},
    )


def train(exchange: str, accumulate: int) -> Run:
    return run_case(case_of(exchange), accumulate, callbacks=[ErrorAveraging(every_n_steps=5)])


@pytest.mark.parametrize(
    ("world_size", "exchange", "accumulate"), [(3, "all_gather", 2), (3, "two_phase", 1)]
)
def test_matches_the_reference(ranks: Any, world_size: int, exchange: str, accumulate: int) -> None:
    """Oracle: lightning_dct.reference.

    The last bits differ: the backend chooses the order of a sum of three.
    """
    case = case_of(exchange)

    def average(step: int, all_states: list[States]) -> None:
        for states in all_states if step % 5 == 0 else []:
            for _, _, start in list(states):
                some = [
                    held
                    for (sender, _, first), held in states.items()
                    if (sender, first) == ("rank", start)
                ]
                mean = sum(torch.as_tensor(held.residual) for held in some) / len(some)
                for held in some:
                    held.residual = mean

    expected, _ = train_gradients(case, world_size, accumulate, average)
    without, _ = train_gradients(case, world_size, accumulate)
    assert not torch.allclose(expected[0], without[0], rtol=1e-6)
    for run in ranks(world_size).run(train, exchange, accumulate):
        for number, weights in enumerate(expected):
            torch.testing.assert_close(
                run.weights[f"weights.{number}"].flatten(), weights, rtol=1e-11, atol=1e-12
            )


def look(trainer: Trainer) -> tuple[int, int, dict[str, Tensor]]:
    """Steps, bytes and residuals."""
    synchronizer = trainer.strategy.synchronizer
    return (
        synchronizer.synchronisations,
        synchronizer.traffic.totals.bytes_sent,
        synchronizer.residuals.state_dict(),
    )


def train_scaled() -> Any:
    """With what is held back before each averaging and after it."""
    before = Watch(look=look)
    after = Watch(look=look)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
    callbacks = [before, ErrorAveraging(every_n_steps=5), after]
    strategy = DCTStrategy(compress="gradients", density=0.1)
    run, sums = fit_recorded(strategy, Overflowing(True), 16, callbacks=callbacks, plugins=[plugin])
    return run, sums, before.seen, after.seen


def test_the_mean_is_what_all_hold_and_is_counted(ranks: Any) -> None:
    """Oracle: the mean of both ranks' residuals; 4 bytes an entry of the three compressed tensors;
    gradients in sum.
    """
    (one, sums, before, after), (other, other_sums, other_before, other_after) = ranks(2).run(
        train_scaled
    )
    assert_replicas_equal([one, other])
    assert_conserved([sums, other_sums])
    averaged = []
    for batch, (now, then) in enumerate(zip(before, after, strict=True)):
        if then[1] == now[1]:
            assert_weights_equal(now[2], then[2])
            continue
        averaged.append((batch, now[0]))
        assert then[1] - now[1] == 4 * (40 * 24 + 24 + 24 * 8)
        for name, residual in then[2].items():
            assert torch.equal(residual, other_after[batch][2][name])
            assert torch.equal(residual, (now[2][name] + other_before[batch][2][name]) / 2)
    # The sixth batch and the tenth overflow, and are no optimizer steps.
    assert averaged == [(4, 5), (11, 10)]


def train_resumable(save: Path | None, load: Path | None) -> Any:
    strategy = DCTStrategy(compress="gradients", density=0.1)
    return fit_half(save, load, strategy, Module(), callbacks=(ErrorAveraging(every_n_steps=6),))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"`ErrorAveraging\(every_n_steps\)` must be at least 1"):
        ErrorAveraging(0)
