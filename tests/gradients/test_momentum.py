"""An optimizer whose momentum rests, against plain formulas and against optimizers that never had one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_dct.gradients.momentum import resting_momentum

SPARSE = 0.01


def step(optimizer: Optimizer, parameter: Tensor, gradient: Tensor, density: float = SPARSE) -> list[str]:
    told: list[str] = []
    parameter.grad = gradient.clone()
    with resting_momentum(optimizer, lambda _: density, told.append):
        optimizer.step()
    return told


def entries(seed: int) -> Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_goes_as_far_in_sum(nesterov: bool, weight_decay: float) -> None:
    """Oracle: the closed form; 1 / (1 - 0.9) of each gradient, and of the decay, at once."""
    parameter = nn.Parameter(entries(0))
    expected = parameter.detach().clone()
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay)
    for seed in (1, 2, 3):
        step(optimizer, parameter, entries(seed))
        expected -= 0.1 * 10 * (entries(seed) + weight_decay * expected)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [SGD, RMSprop])
def test_sum_of_one_gradient(kind: type[Optimizer]) -> None:
    """Oracle: the same optimizer with its momentum, after a gradient and 300 steps with none."""
    settings: dict[str, Any] = {"momentum": 0.9} | ({"dampening": 0.5} if kind is SGD else {"alpha": 0.0})
    with_it, without = nn.Parameter(entries(0)), nn.Parameter(entries(0))
    # Dampening does not apply to the first gradient that a momentum sees; let it see a zero first.
    first, second = kind([with_it], lr=0.1, **settings), kind([without], lr=0.1, **settings)
    for number in range(300):
        with_it.grad = entries(1) * (number == 1)
        first.step()
    step(second, without, torch.zeros(5, dtype=torch.float64))
    step(second, without, entries(1))
    torch.testing.assert_close(without.detach(), with_it.detach(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", [Adam, AdamW, Adamax, NAdam, RAdam])
def test_averages_start_from_the_gradient(kind: type[Optimizer]) -> None:
    """Oracle: the same optimizer with beta1 = 0 and the lower learning rate, bit for bit."""
    resting, without = nn.Parameter(entries(0)), nn.Parameter(entries(0))
    first, second = kind([resting], lr=0.125, betas=(0.5, 0.99)), kind([without], lr=0.09375, betas=(0.0, 0.99))
    for seed in range(1, 9):
        step(first, resting, entries(seed), density=0.5)
        without.grad = entries(seed)
        second.step()
    assert torch.equal(resting, without)


def test_rests_while_the_residual_remembers_longer() -> None:
    """Oracle: 1 / density against 1 / (1 - momentum), group by group; the optimizer's settings when it steps."""
    one, other = nn.Parameter(entries(0)), nn.Parameter(entries(1))
    groups = [{"params": [one], "betas": (0.9, 0.99)}, {"params": [other], "betas": (0.5, 0.99)}]
    optimizer = Adam(groups, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([group["betas"][0] for group in optimizer.param_groups]))
    for density in (1.0, 0.51, 0.5, 0.11, 0.0999, 0.001):
        step(optimizer, one, entries(2), density)
    assert seen == [[0.9, 0.5], [0.9, 0.5], [0.9, 0.0], [0.9, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_users_settings_come_back() -> None:
    """Oracle: the settings before, after a step and after one that fails; what is told."""
    parameter = nn.Parameter(entries(0))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, nesterov=True)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    told = step(optimizer, parameter, entries(1))
    assert len(told) == 1
    assert "SGD steps as with momentum=0 instead of 0.9 and 10 times the learning rate" in told[0]
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before
    optimizer.register_step_pre_hook(lambda *_: 1 / optimizer.param_groups[0]["momentum"])
    with pytest.raises(ZeroDivisionError):
        step(optimizer, parameter, entries(1))
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: Adam(p, lr=0.1, betas=(0.0, 0.9)),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_nothing_to_rest(make: Any) -> None:
    """Oracle: the optimizer by itself, and silence."""
    touched, alone = nn.Parameter(entries(0)), nn.Parameter(entries(0))
    optimizer = make([alone])
    alone.grad = entries(1)
    optimizer.step()
    assert step(make([touched]), touched, entries(1)) == []
    assert torch.equal(touched, alone)
