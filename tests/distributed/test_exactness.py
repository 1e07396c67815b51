"""The synchronised gradients are the right ones: equal to DDP's, to a plain reference's, to each other's, in sum."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from distributed import reference
from distributed.training import (
    Applied,
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_learns,
    assert_replicas_equal,
    assert_weights_close,
    assert_weights_equal,
    fit,
    loader,
    local_gradients,
    noise_loss,
    on_two_nodes,
    perceptron,
)
from lightning_dct import DCTStrategy
from lightning_dct.gradients.residual import add_pieces

OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
FORMATS = ("fp32", "bf16", "int8", "int4", "1bit")


class Lopsided(nn.Module):
    """A scalar, a few biases and one matrix of 307,200 entries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.huge = nn.Linear(512, 600)
        self.small = nn.Linear(600, 3)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.gain * self.small(torch.relu(self.huge(inputs)))


def train_densely(strategy: str, optimizer: str) -> Run:
    kind, settings = OPTIMIZERS[optimizer]
    chosen = (
        DDPStrategy()
        if strategy == "ddp"
        else DCTStrategy(compress="gradients", density=1.0, value_format="fp32", exchange="sharded")
    )
    return fit(chosen, Module(None, kind, **settings), 20)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_density_one_trains_as_ddp(ranks: Any, world_size: int, optimizer: str) -> None:
    """Oracle: Lightning's DDPStrategy on the same data, bitwise on two ranks."""
    theirs = ranks(world_size).run(train_densely, "ddp", optimizer)
    ours = ranks(world_size).run(train_densely, "dct", optimizer)
    compare = assert_weights_equal if world_size == 2 else assert_weights_close
    for rank in range(world_size):
        compare(theirs[rank].weights, ours[rank].weights)
    assert ours[0].synchronisations == 20


def train_lopsided(value_format: str) -> Run:
    strategy = DCTStrategy(compress="gradients", density=0.05, value_format=value_format, refresh_every=30)
    module = Module(Lopsided(), torch.optim.SGD, lr=0.02)
    run = fit(strategy, module, loader(120, 512, 3), watch=Watch(every=20))
    run.residuals, run.state = {name: entries[:50] for name, entries in run.residuals.items()}, {}
    return run


@pytest.mark.parametrize(
    ("world_size", "value_format"), [(2, "fp32"), (2, "1bit"), (3, "bf16"), (3, "int8"), (4, "1bit"), (4, "int8")]
)
def test_replicas_stay_bitwise_identical(ranks: Any, world_size: int, value_format: str) -> None:
    """Oracle: a hash of all weights every 20 of 120 steps, compared between ranks that see different data."""
    runs = ranks(world_size).run(train_lopsided, value_format)
    assert_replicas_equal(runs)
    assert len(runs[0].hashes) == len(set(runs[0].hashes)) == 6
    assert runs[0].totals.refreshes == math.ceil(120 / 30)
    assert runs[0].losses != runs[1].losses
    assert any(not torch.equal(held, runs[1].residuals[name]) for name, held in runs[0].residuals.items())
    assert_learns(runs[0])


def train_compressed(value_format: str, density: float, exchange: str) -> Run:
    settings: dict[str, Any] = {"density": density, "min_tensor_size": 128, "exchange": exchange}
    strategy = DCTStrategy(compress="gradients", value_format=value_format, refresh_every=1, guard=False, **settings)
    module = Module(None, torch.optim.SGD, lr=0.05, momentum=0.5)
    if exchange != "by_node":
        return fit(strategy, module, 30, precision="64-true")
    with on_two_nodes():
        return fit(strategy, module, 30, precision="64-true", num_nodes=2, devices=2)


@pytest.mark.parametrize(
    ("world_size", "value_format", "density", "exchange"),
    [
        *((world_size, value_format, 0.05, "all_gather") for world_size in (2, 3) for value_format in FORMATS),
        *((world_size, value_format, 0.2, "sharded") for world_size in (2, 3, 4) for value_format in ("fp32", "1bit")),
        *((4, value_format, 0.2, "by_node") for value_format in ("bf16", "int8")),
    ],
)
def test_matches_the_plain_reference(
    ranks: Any, world_size: int, value_format: str, density: float, exchange: str
) -> None:
    """Oracle: reference.py, which simulates the ranks in one process with numpy."""
    runs = ranks(world_size).run(train_compressed, value_format, density, exchange)
    model = perceptron().double()
    held, sums_held = reference.train(
        model,
        noise_loss(world_size, 30),
        workers=world_size,
        steps=30,
        value_format=value_format,
        lr=0.05,
        momentum=0.5,
        density=density,
        min_tensor_size=128,
        exchange=exchange,
        workers_per_node=2,
    )
    expected = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    for rank, run in enumerate(runs):
        assert_weights_close(expected, run.weights, rtol=1e-12, atol=1e-13)
        if exchange != "by_node":
            residuals = {f"model.{name}": torch.from_numpy(entries) for name, entries in held[rank].items()}
            assert float(residuals["model.first.weight"].norm()) > 0
            assert_weights_close(residuals, run.residuals, rtol=1e-12, atol=1e-13)
    for name, expected_sum in sums_held.items():
        owned = torch.zeros(len(expected_sum), dtype=torch.float64)
        for run in runs:
            owned = add_pieces(owned, run.state["owned"].get(f"model.{name}", {}), len(owned))
        torch.testing.assert_close(owned, torch.from_numpy(expected_sum), rtol=1e-12, atol=1e-13)
    if exchange != "all_gather":
        assert sum(len(run.state["owned"].get("model.first.weight", {})) for run in runs) > 1


def train_recorded(value_format: str) -> Any:
    applied = Applied()
    strategy = DCTStrategy(compress="gradients", density=0.03, value_format=value_format, refresh_every=7)
    with local_gradients() as given:
        run = fit(strategy, Module(None, torch.optim.Adam, lr=0.01), 40, callbacks=[applied])
    return given, applied.sums, run.residuals


@pytest.mark.parametrize(
    ("world_size", "value_format"), [(2, "fp32"), (3, "bf16"), (2, "int8"), (3, "int4"), (3, "1bit")]
)
def test_gradients_are_conserved_in_sum(ranks: Any, world_size: int, value_format: str) -> None:
    """Oracle: W times what the optimizer got plus what ranks hold back, against fp64 sums of all local gradients."""
    results = ranks(world_size).run(train_recorded, value_format)
    assert len(results[0][0]) == 5
    assert any(float(entries.norm()) > 0 for entries in results[0][2].values())
    assert_conserved(results)
