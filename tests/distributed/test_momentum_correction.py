"""momentum="correct": velocities before compressing, under Lightning and Fabric, on every exchange."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_dct.fabric
from distributed import reference
from distributed.test_loss_scaling import EVERYTHING, ONE_ENTRY, Overflowing
from distributed.test_resume import SaveAndStop, twice_ten_batches
from distributed.training import (
    Module,
    Noise,
    Run,
    Watch,
    assert_replicas_equal,
    assert_weights_close,
    assert_weights_equal,
    fit,
    noise_loss,
    on_two_nodes,
    perceptron,
    rank,
    trainer_for,
)
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint import merge_states

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def train(exchange: str, value_format: str, accumulate: int) -> Run:
    settings: dict[str, Any] = {"density": 0.2, "exchange": exchange, "value_format": value_format}
    strategy = DCTStrategy(refresh_every=1, guard=False, momentum="correct", **settings)
    module = Module(None, torch.optim.SGD, **SGD)
    trainer: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": accumulate}
    if exchange != "by_node":
        return fit(strategy, module, 12 * accumulate, **trainer)
    with on_two_nodes():
        return fit(strategy, module, 12 * accumulate, num_nodes=2, devices=2, **trainer)


@pytest.mark.parametrize(
    ("world_size", "exchange", "value_format", "accumulate"),
    [
        (2, "all_gather", "fp32", 1),
        (3, "all_gather", "1bit", 2),
        (3, "sharded", "bf16", 1),
        (4, "by_node", "bf16", 1),
    ],
)
def test_matches_the_plain_reference(
    ranks: Any, world_size: int, exchange: str, value_format: str, accumulate: int
) -> None:
    """Oracle: reference.py, which simulates the ranks in one process with numpy."""
    runs = ranks(world_size).run(train, exchange, value_format, accumulate)
    model = perceptron().double()
    reference.train(
        model,
        noise_loss(world_size, 12, accumulate),
        workers=world_size,
        steps=12,
        value_format=value_format,
        density=0.2,
        min_tensor_size=128,
        exchange=exchange,
        workers_per_node=2,
        correct=True,
        **SGD,
    )
    expected = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    for run in runs:
        assert_weights_close(expected, run.weights, rtol=1e-11, atol=1e-12)


def train_whole(strategy: str, nesterov: bool) -> Run:
    chosen = DDPStrategy() if strategy == "ddp" else DCTStrategy(density=1.0, momentum="correct")
    module = Module(None, torch.optim.SGD, nesterov=nesterov, **SGD)
    return fit(chosen, module, 20, precision="64-true")


@pytest.mark.parametrize("nesterov", [False, True])
def test_density_one_is_sgd_with_momentum(ranks: Any, nesterov: bool) -> None:
    """Oracle: Lightning's DDPStrategy with the same optimizer."""
    theirs, ours = (ranks(2).run(train_whole, strategy, nesterov) for strategy in ("ddp", "dct"))
    assert_weights_close(theirs[0].weights, ours[0].weights, rtol=1e-9, atol=1e-11)
    assert_replicas_equal(ours)


def look(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.strategy.synchronizer.state_dict()
    return {**{f"e {name}": e for name, e in state["residuals"].items()}, **state["velocities"]}


def overflow(exchange: str) -> Run:
    strategy = DCTStrategy(density=0.1, refresh_every=5, exchange=exchange, momentum="correct")
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000))
    module = Overflowing(True)
    module.optimizer_settings = SGD
    return fit(strategy, module, 16, watch=Watch(look=look), plugins=[plugin])


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
def test_a_skipped_step_leaves_no_trace(ranks: Any, exchange: str) -> None:
    """Oracle: velocities, residuals and weights before it, bit by bit."""
    runs = ranks(2).run(overflow, exchange)
    assert_replicas_equal(runs)
    for run in runs:
        for step in range(1, 16):
            same = all(torch.equal(value, run.seen[step - 1][name]) for name, value in run.seen[step].items())
            assert same == (step in (ONE_ENTRY[0], EVERYTHING[0]))
            assert (run.hashes[step] == run.hashes[step - 1]) == same
            assert all(value.isfinite().all() for value in run.seen[step].values())


def train_resumable(path: Path, what: str) -> Run:
    strategy = DCTStrategy(density=0.1, value_format="int8", refresh_every=4, momentum="correct")
    module = Module(None, torch.optim.SGD, **SGD)
    if what == "half":
        watch = Watch()
        trainer_for(strategy, callbacks=[watch, SaveAndStop(path, 10)]).fit(module, twice_ten_batches())
        return Run({}, [], watch.hashes)
    return fit(strategy, module, twice_ten_batches(), ckpt_path=str(path) if what == "resumed" else None)


def test_resumed_run_equals_the_uninterrupted_one(ranks: Any, tmp_path: Path) -> None:
    """Oracle: 20 batches without a break, every bit of weights and velocities."""
    whole, half, resumed = (
        ranks(2).run(train_resumable, tmp_path / "half.ckpt", what) for what in ("whole", "half", "resumed")
    )
    for expected, first, run in zip(whole, half, resumed, strict=True):
        assert first.hashes + run.hashes == expected.hashes
        assert_weights_equal(expected.state["velocities"], run.state["velocities"])
        assert float(run.state["velocities"]["model.first.weight"].norm()) > 0


def test_another_number_of_ranks_goes_on_with_the_mean() -> None:
    """Oracle: the mean of the saved velocities; states from before there were any."""
    empty: dict[str, Any] = {"residuals": {}, "thresholds": {"values": {}, "targets": {}}}
    states = [{**empty, "velocities": {"a": torch.tensor([1.0, 2.0])}}, {**empty, "velocities": {"a": torch.ones(2)}}]
    assert merge_states(states)["velocities"]["a"].tolist() == [1.0, 1.5]
    assert merge_states([empty, empty])["velocities"] == {}


def train_with_fabric(momentum: float) -> list[float]:
    strategy = lightning_dct.fabric.DCTStrategy(density=1.0, momentum="correct" if momentum else "keep")
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, precision="64-true")
    fabric.launch()
    model = perceptron().double()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum))
    buffers = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for inputs, outputs in Noise(6, 40, 8, rank=rank()):
        optimizer.zero_grad()
        fabric.backward((model(inputs.double()) - outputs).square().mean())
        for name, parameter in model.named_parameters():
            if not momentum:  # by hand
                parameter.grad = buffers[name] = 0.9 * buffers[name] + parameter.grad
        optimizer.step()
    return [float(parameter.sum()) for parameter in model.parameters()]


def test_fabric(ranks: Any) -> None:
    """Oracle: momentum by hand."""
    ours, theirs = (ranks(2).run(train_with_fabric, momentum)[0] for momentum in (0.9, 0.0))
    assert ours == pytest.approx(theirs, rel=1e-9)


def refused() -> str:
    with pytest.raises(ValueError) as caught:
        fit(DCTStrategy(momentum="correct"), Module(None, torch.optim.Adam, lr=0.01), 2)
    return str(caught.value)


def test_other_optimizers_are_refused_before_training(ranks: Any) -> None:
    """Oracle: the message, on every rank."""
    assert all("the optimizer is Adam. Use `momentum='auto'`" in message for message in ranks(2).run(refused))
