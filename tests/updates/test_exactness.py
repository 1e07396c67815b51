"""Exchanged updates are the right ones: a plain reference's, conserved, and DistributedDataParallel's where equal."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from distributed.training import (
    Module,
    Run,
    Watch,
    assert_learns,
    assert_replicas_equal,
    assert_weights_close,
    fit,
    noise_loss,
    on_two_nodes,
    perceptron,
)
from lightning_dct import DCTStrategy
from lightning_dct.gradients.residual import add_pieces
from updates import reference

STEPS = 23


def train_compressed(settings: dict[str, Any]) -> Run:
    strategy = DCTStrategy(min_tensor_size=128, refresh_every=1, guard=False, **settings)
    module = Module(None, torch.optim.SGD, lr=0.05, momentum=0.8)
    if settings["exchange"] != "by_node":
        return fit(strategy, module, STEPS, precision="64-true")
    with on_two_nodes():
        return fit(strategy, module, STEPS, precision="64-true", num_nodes=2, devices=2)


@pytest.mark.parametrize(
    ("world_size", "exchange", "value_format", "local_steps", "delay", "warmup_steps", "decay"),
    [
        (2, "all_gather", "1bit", 4, 0, 10, 1.0),
        (2, "all_gather", "fp32", 1, 0, 0, 1.0),
        (2, "all_gather", "1bit", 1, 0, 9, 0.5),
        (3, "all_gather", "bf16", 5, 3, 7, 0.8),
        (2, "all_gather", "int8", 4, 4, 0, 0.9),
        (3, "sharded", "fp32", 3, 0, 5, 0.9),
        (4, "sharded", "1bit", 4, 2, 0, 1.0),
        (4, "by_node", "int8", 3, 0, 5, 0.9),
        (4, "by_node", "1bit", 3, 1, 0, 1.0),
    ],
)
def test_matches_the_plain_reference(
    ranks: Any,
    world_size: int,
    exchange: str,
    value_format: str,
    local_steps: int,
    delay: int,
    warmup_steps: int,
    decay: float,
) -> None:
    """Oracle: reference.py, with every rank's SGD in one process."""
    settings: dict[str, Any] = {
        "density": 0.2,
        "exchange": exchange,
        "value_format": value_format,
        "local_steps": local_steps,
        "delay": delay,
        "warmup_steps": warmup_steps,
        "residual_decay": decay,
    }
    runs = ranks(world_size).run(train_compressed, settings)
    shared, own, sums_held = reference.train(
        perceptron().double(),
        noise_loss(world_size, STEPS),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8),
        workers=world_size,
        steps=STEPS,
        min_tensor_size=128,
        workers_per_node=2,
        **settings,
    )
    for place, run in enumerate(runs):
        for name, expected in shared.items():
            got = run.weights[f"model.{name}"].flatten()
            torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-9, atol=1e-11)
            got = run.state["weights"][f"model.{name}"].flatten()
            torch.testing.assert_close(got, torch.from_numpy(own[place][name]), rtol=1e-9, atol=1e-11)
    for name, expected in sums_held.items():
        owned = torch.zeros(len(expected), dtype=torch.float64)
        for run in runs:
            owned = add_pieces(owned, run.state["owned"].get(f"model.{name}", {}), len(owned))
        torch.testing.assert_close(owned, torch.from_numpy(expected), rtol=1e-9, atol=1e-11)
    assert any((own[0][name] != own[1][name]).any() for name in own[0])
    assert_replicas_equal(runs)


def train_many_steps(settings: dict[str, Any]) -> Run:
    strategy = DCTStrategy(**settings, warmup_steps=40)
    return fit(strategy, Module(None, torch.optim.AdamW, lr=0.01), 120, watch=Watch(every=20))


@pytest.mark.parametrize(("world_size", "settings"), [(2, {}), (3, {"delay": 8}), (4, {"local_steps": 16})])
def test_shared_weights_stay_bitwise_identical(ranks: Any, world_size: int, settings: dict[str, Any]) -> None:
    """Oracle: what a callback of the user hashes when a batch ends, compared between ranks with different data."""
    runs = ranks(world_size).run(train_many_steps, settings)
    assert_replicas_equal(runs)
    assert len(runs[0].hashes) == len(set(runs[0].hashes)) == 6
    own = [run.state["weights"]["model.first.weight"] for run in runs]
    assert not torch.equal(own[0], own[1])
    assert_learns(runs[0])


def train_densely(strategy: str) -> Run:
    chosen = DDPStrategy() if strategy == "ddp" else DCTStrategy(density=1.0, local_steps=1, value_format="fp32")
    return fit(chosen, Module(None, torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True), 20)


@pytest.mark.parametrize("world_size", [2, 3])
def test_density_one_in_every_step_trains_as_ddp(ranks: Any, world_size: int) -> None:
    """Oracle: Lightning's DDPStrategy. SGD with momentum is linear: the mean of its steps is the step of the mean."""
    theirs = ranks(world_size).run(train_densely, "ddp")
    ours = ranks(world_size).run(train_densely, "dct")
    for place in range(world_size):
        assert_weights_close(theirs[place].weights, ours[place].weights, rtol=1e-4, atol=1e-5)
