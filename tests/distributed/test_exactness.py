"""The synchronised gradients are the right ones: equal to DDP's, to the reference's, to each
other's, in sum.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from distributed.random_runs import (
    assert_remembered,
    assert_weights,
    draw,
    run_cases,
    train_gradients,
)
from distributed.training import (
    Module,
    Run,
    assert_weights_close,
    assert_weights_equal,
    fit,
)
from lightning_dct import DCTStrategy
from one_card import DEVICE

OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


def train_densely(strategy: str, optimizer: str) -> Run:
    kind, settings = OPTIMIZERS[optimizer]
    chosen = (
        DDPStrategy()
        if strategy == "ddp"
        else DCTStrategy(
            compress="gradients", density=1.0, value_format="fp32", exchange="two_phase"
        )
    )
    return fit(chosen, Module(None, kind, **settings), 20)


def bf16_and_fp32() -> list[Run]:
    dense = {"compress": "gradients", "density": 1.0}
    return [fit(DCTStrategy(**dense, value_format=one), Module(), 20) for one in ("fp32", "bf16")]


def test_bf16_averages_in_half_the_bytes(ranks: Any) -> None:
    for whole, half in ranks(2).run(bf16_and_fp32):
        assert half.totals.bytes_sent * 2 == whole.totals.bytes_sent == whole.totals.bytes_dense
        assert_weights_close(whole.weights, half.weights, rtol=0.1, atol=0.02)
        assert whole.hashes != half.hashes


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "adam"), (3, "momentum")])
def test_density_one_trains_as_ddp(ranks: Any, world_size: int, optimizer: str) -> None:
    """Oracle: Lightning's DDPStrategy on the same data, bitwise on two ranks."""
    theirs = ranks(world_size).run(train_densely, "ddp", optimizer)
    ours = ranks(world_size).run(train_densely, "dct", optimizer)
    compare = assert_weights_equal if world_size == 2 else assert_weights_close
    for rank in range(world_size):
        compare(theirs[rank].weights, ours[rank].weights)
    assert ours[0].synchronisations == 20


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a GPU's optimizers round otherwise than the reference on a CPU"
)
@pytest.mark.parametrize(
    ("world_size", "exchange"), [(2, "all_gather"), (3, "two_phase"), (4, "hierarchical")]
)
def test_matches_the_reference(ranks: Any, world_size: int, exchange: str) -> None:
    """Oracle: lightning_dct.reference, every bit of weights, residuals and thresholds; random
    shapes and settings.
    """
    by_rank = ranks(world_size).run(run_cases, "gradients", exchange)
    for seed, runs in enumerate(zip(*by_rank, strict=True)):
        weights, feedbacks = train_gradients(draw(seed, "gradients", exchange), world_size)
        for run in runs:
            assert_weights(run.weights, weights)
        assert_remembered(list(runs), feedbacks, ranks_per_node=2)
