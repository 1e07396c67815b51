"""Exchanged updates are the right ones: the reference's, and DistributedDataParallel's where
equal.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from distributed.random_runs import (
    STEPS,
    adamw,
    assert_remembered,
    assert_weights,
    draw,
    run_case,
    run_cases,
    train_updates,
)
from distributed.training import Module, Run, assert_weights_close, fit
from lightning_dct import DCTStrategy, law
from lightning_dct.sync import optimizer_clock
from lightning_dct.sync.optimizer_state import DATA
from one_card import DEVICE


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a GPU's optimizers round otherwise than the reference on a CPU"
)
@pytest.mark.parametrize(
    ("world_size", "exchange"), [(3, "all_gather"), (2, "two_phase"), (4, "hierarchical")]
)
def test_matches_the_reference(ranks: Any, world_size: int, exchange: str) -> None:
    """Oracle: lightning_dct.reference, every bit of both kinds of weights and of thresholds; random
    settings.
    """
    by_rank = ranks(world_size).run(run_cases, "updates", exchange)
    for seed, runs in enumerate(zip(*by_rank, strict=True)):
        shared, own, feedbacks = train_updates(draw(seed, "updates", exchange), world_size)
        assert_both_weights(runs, shared, own)
        # By node, all that ranks have moved is sent, and what is not sent of the sum is another
        # residual.
        differs = any(
            not torch.equal(one, other) for one, other in zip(own[0], own[1], strict=True)
        )
        assert differs or exchange == "hierarchical"
        assert_remembered(list(runs), feedbacks, ranks_per_node=2)


def assert_both_weights(
    runs: Any, shared: list[torch.Tensor], own: list[list[torch.Tensor]]
) -> None:
    """Of all ranks: the last bit of the shared weights, and of each rank's own."""
    for run, expected in zip(runs, own, strict=True):
        assert_weights(run.weights, shared)
        assert_weights(run.state["weights"], expected)


# Without a delay, with which buckets take turns. After every step, for what the mean's length
# depends on.
APART = [
    case._replace(settings=case.settings | {"overlap_steps": 0, "local_steps": steps})
    for seed, steps in ((0, 1), (4, 1), (4, 3))
    for case in [draw(seed, "updates", "all_gather")]
]


def run_in_a_bucket_each() -> list[Run]:
    with patch.object(optimizer_clock, "LARGEST_BUCKET", 1):
        return [run_case(case) for case in APART]


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a GPU's optimizers round otherwise than the reference on a CPU"
)
def test_what_is_sent_of_a_tensor_does_not_depend_on_its_bucket(ranks: Any) -> None:
    """Oracle: the reference, which knows no buckets.

    Here every tensor is one, also those that are sent dense.
    """
    for case, runs in zip(
        APART, zip(*ranks(2).run(run_in_a_bucket_each), strict=True), strict=True
    ):
        shared, own, _ = train_updates(case, 2)
        assert_both_weights(runs, shared, own)


def run_to_a_known_end() -> list[Run]:
    with patch.object(law, "LONG", STEPS):
        return [run_case(case) for case in APART]


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a GPU's optimizers round otherwise than the reference on a CPU"
)
def test_the_mean_is_plain_at_the_end_of_a_long_run(ranks: Any) -> None:
    """Oracle: the reference."""
    plain_after = law.LAST_PART * STEPS
    for case, runs in zip(APART, zip(*ranks(2).run(run_to_a_known_end), strict=True), strict=True):
        shared, own, _ = train_updates(case, 2, plain_after)
        assert_both_weights(runs, shared, own)
        lengthened, *_ = train_updates(case, 2)
        is_adam = case.optimizer(nn.Linear(1, 1).parameters()).defaults.get("betas") is not None
        assert is_adam == any(
            not torch.equal(one, other) for one, other in zip(shared, lengthened, strict=True)
        )


UNLIKE = [
    draw(seed, "updates", "all_gather")._replace(
        settings=APART[seed % 2].settings
        | {"local_steps": 1, "warmup_steps": 7, "residual_decay": 0.9},
        shapes=[(40, 30), (1200,), (9, 50)],
        optimizer=adamw,
        is_unlike=True,
    )
    for seed in (0, 1)
]


def run_unlike() -> list[Run]:
    return [run_case(case) for case in UNLIKE]


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a GPU's optimizers round otherwise than the reference on a CPU"
)
def test_ranks_that_pull_in_opposite_directions_match_the_reference(ranks: Any) -> None:
    """Oracle: the reference. Residuals are held back, and deviations of second moments persist."""
    for case, runs in zip(UNLIKE, zip(*ranks(3).run(run_unlike), strict=True), strict=True):
        shared, own, _ = train_updates(case, 3)
        assert_both_weights(runs, shared, own)
        for run in runs:
            assert any(
                bool(held.any())
                for name, held in run.state["held_back"].items()
                if "residual" in name
            )
            persistences = [float(values[1]) for values in run.state["deviations"].values()]
            assert sum(persistences) / len(persistences) > DATA


def train_densely(strategy: str) -> Run:
    chosen = (
        DDPStrategy()
        if strategy == "ddp"
        else DCTStrategy(density=1.0, local_steps=1, value_format="fp32")
    )
    return fit(chosen, Module(None, torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True), 20)


@pytest.mark.slow
def test_density_one_in_every_step_trains_as_ddp(ranks: Any) -> None:
    """Oracle: Lightning's DDPStrategy.

    SGD with momentum is linear: the mean of its steps is the step of the mean.
    """
    for theirs, ours in zip(
        *(ranks(3).run(train_densely, strategy) for strategy in ("ddp", "dct")), strict=True
    ):
        assert_weights_close(theirs.weights, ours.weights, rtol=1e-4, atol=1e-5)
