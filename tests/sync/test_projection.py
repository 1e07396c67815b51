"""`project=` must be a projection; optimizers that set exact zeros, and gradients that come late,
are warned of.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from distributed.training import Module, fit, launched, perceptron, warnings_of
from lightning_dct import DCTStrategy, Gradients, Updates
from lightning_dct.fabric import DCTStrategy as FabricDCTStrategy
from lightning_dct.sync.optimizer_trial import loses_with_late_gradients, try_out
from lightning_dct.sync.projection import Projection


@torch.no_grad()
def soft_threshold(module: nn.Module) -> None:
    for weights in module.parameters():
        weights.copy_(weights.sign() * (weights.abs() - 0.01).clamp(min=0.0))


@torch.no_grad()
def shrink(module: nn.Module) -> None:
    for weights in module.parameters():
        weights.mul_(0.9)


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for weights in module.parameters():
        weights.clamp_(-0.05, 0.05)


@torch.no_grad()
def to_unit_norm(module: nn.Module) -> None:
    for weights in module.parameters():
        weights.div_(weights.norm())


@torch.no_grad()
def hard_threshold(module: nn.Module) -> None:
    for weights in module.parameters():
        weights[weights.abs() < 0.05] = 0.0


@pytest.mark.parametrize(
    ("function", "warns"),
    [
        (soft_threshold, True),
        (shrink, True),
        (clamp, False),
        (to_unit_norm, False),
        (hard_threshold, False),
    ],
)
def test_a_function_that_moves_weights_each_time_is_warned_of(
    function: Callable[[nn.Module], None], warns: bool
) -> None:
    """Oracle: weights as after one call in each call; and nothing is said before anything has
    moved.
    """
    module = nn.Linear(30, 20)
    other = nn.Linear(30, 20)
    for weights in module.parameters():
        weights.data.zero_()
    project = Projection(function, module)
    if function is not to_unit_norm:
        assert not warnings_of(project)
    module.load_state_dict(other.state_dict())
    said = []
    for _ in range(7):
        said += warnings_of(project)
        function(other)
        assert all(
            torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
        )
    assert ["`project` is no projection" in one for one in said] == [True] * warns


class Proximal(optim.SGD):
    """Soft-thresholds weights after each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for weights in group["params"]:
                weights.copy_(weights.sign() * (weights.abs() - 0.01 * group["lr"]).clamp(min=0.0))
        return loss


@pytest.mark.parametrize(
    "kind", [optim.SGD, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.RAdam]
)
def test_optimizers_that_set_zeros_are_found(kind: Any) -> None:
    assert not try_out(kind(perceptron().parameters(), lr=0.1)).sets_zeros
    assert try_out(Proximal(perceptron().parameters(), lr=0.1)).sets_zeros


def train_with_zeros() -> list[str]:
    model = perceptron()
    optimizer = Proximal(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, density=0.2)
    model(torch.randn(4, 40)).square().mean().backward()
    said = warnings_of(optimizer.step) + warnings_of(optimizer.step)
    updates.close()
    return said


def test_an_optimizer_that_sets_zeros_is_told_once(ranks: Any) -> None:
    first, _ = ranks(2).run(train_with_zeros)
    assert ["`Proximal` sets small weights to exactly zero" in one for one in first] == [True]


def test_which_optimizers_lose_with_late_gradients() -> None:
    def loses(kind: Any, **settings: Any) -> bool:
        return loses_with_late_gradients(kind(perceptron().parameters(), lr=0.1, **settings))

    assert not any(loses(kind) for kind in (optim.SGD, optim.Adagrad, optim.ASGD))
    assert loses(optim.SGD, momentum=0.9)
    assert all(
        loses(kind)
        for kind in (optim.Adam, optim.AdamW, optim.RMSprop, optim.Adadelta, optim.Rprop)
    )


def train_with_gradients(kind: Any, density: float) -> list[list[str]]:
    """What is said under the Trainer, under Fabric and in a plain loop."""
    settings: dict[str, Any] = {"compress": "gradients", "density": density}
    said = [warnings_of(fit, DCTStrategy(**settings), Module(perceptron(), kind, lr=0.01), 3)]

    def with_fabric() -> None:
        fabric = launched(FabricDCTStrategy(**settings))
        fabric.setup(model := perceptron(), kind(model.parameters(), lr=0.01))

    def in_a_plain_loop() -> None:
        wrapped = DistributedDataParallel(perceptron())
        gradients = Gradients(wrapped, density=density)
        optimizer = kind(wrapped.parameters(), lr=0.01)
        for _ in range(2):
            wrapped(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
        assert gradients.traffic.totals.steps == 2

    said += [warnings_of(with_fabric), warnings_of(in_a_plain_loop)]
    return [
        [one for one in those if "`compress='gradients'` loses quality under `Adam`" in one]
        for those in said
    ]


def test_late_gradients_under_adam_are_warned_of(ranks: Any) -> None:
    first, _ = ranks(2).run(train_with_gradients, optim.Adam, 0.1)
    assert list(map(len, first)) == [1, 1, 1]
    for kind, density in ((optim.Adam, 1.0), (optim.SGD, 0.1)):
        assert ranks(2).run(train_with_gradients, kind, density) == [[[], [], []]] * 2
