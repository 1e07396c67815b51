"""An optimizer whose momentum rests, against plain formulas and against optimizers that never had one."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_dct.gradients.momentum import resting_momentum

SPARSE = 0.01


class Sends:
    """What sends gradients, with nothing behind it; by default so late that learning rates have grown."""

    def __init__(self, density: float = SPARSE, synchronisations: int = 10**6, weight_size: float = 10.0) -> None:
        self.density, self.synchronisations, self.weight_size = density, synchronisations, weight_size

    def density_of(self, parameters: Iterable[Tensor]) -> float:
        return self.density

    def weight_size_of(self, parameters: Iterable[Tensor]) -> float:
        return self.weight_size


def step(optimizer: Optimizer, parameter: Tensor, gradient: Tensor, sends: Sends | None = None) -> list[str]:
    told: list[str] = []
    parameter.grad = gradient.clone()
    with resting_momentum(optimizer, sends or Sends(), told.append):
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
    """Oracle: the same optimizer with beta1 = 0, bit for bit."""
    resting, without = nn.Parameter(entries(0)), nn.Parameter(entries(0))
    first, second = kind([resting], lr=0.125, betas=(0.5, 0.99)), kind([without], lr=0.125, betas=(0.0, 0.99))
    for seed in range(1, 9):
        step(first, resting, entries(seed), Sends(density=0.5))
        without.grad = entries(seed)
        second.step()
    assert torch.equal(resting, without)


def rates(optimizer: Optimizer, parameter: Tensor, sends: Iterable[Sends]) -> list[float]:
    """The learning rates that an optimizer steps with."""
    seen: list[float] = []
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(float(optimizer.param_groups[0]["lr"])))
    for each in sends:
        step(optimizer, parameter, entries(1), each)
    handle.remove()
    return seen


def test_learning_rate_grows_until_entries_have_been_sent() -> None:
    """Oracle: min(1, t * density / 4) written out; SGD's does not, nor Adam's where momentum works."""
    parameter = nn.Parameter(entries(0))
    steps = [Sends(density=0.125, synchronisations=before) for before in (0, 1, 15, 30, 31, 32, 1000)]
    shares = [1 / 32, 2 / 32, 16 / 32, 31 / 32, 1.0, 1.0, 1.0]
    assert rates(Adam([parameter], lr=0.5, betas=(0.5, 0.99)), parameter, steps) == [0.5 * share for share in shares]
    assert rates(SGD([parameter], lr=0.5, momentum=0.5), parameter, steps) == [1.0] * 7
    assert rates(Adam([parameter], lr=0.5, betas=(0.9, 0.99)), parameter, steps) == [0.5] * 7


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("weight_size", "expected"), [(8.0, 0.5), (5.0, 0.5), (4.0, 0.4), (2.5, 0.25), (1.0, 0.25), (0.0, 0.25)]
)
def test_learning_rate_beside_the_weights(weight_size: float, expected: float, as_tensor: bool) -> None:
    """Oracle: a tenth of the weights' size, and no less than half the rate, by hand; SGD's is left alone."""
    parameter, sends = nn.Parameter(entries(0)), [Sends(weight_size=weight_size)]
    lr = torch.tensor(0.5, dtype=torch.float64) if as_tensor else 0.5
    adam = Adam([parameter], lr=lr, foreach=False)
    assert rates(adam, parameter, sends) == pytest.approx([expected], rel=1e-12)
    assert adam.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5
    assert rates(SGD([parameter], lr=lr, momentum=0.5), parameter, sends) == [1.0]


def test_rests_while_the_residual_remembers_longer() -> None:
    """Oracle: 1 / density against 1 / (1 - momentum), group by group; the optimizer's settings when it steps."""
    one, other = nn.Parameter(entries(0)), nn.Parameter(entries(1))
    groups = [{"params": [one], "betas": (0.9, 0.99)}, {"params": [other], "betas": (0.5, 0.99)}]
    optimizer = Adam(groups, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([group["betas"][0] for group in optimizer.param_groups]))
    for density in (1.0, 0.51, 0.5, 0.11, 0.0999, 0.001):
        step(optimizer, one, entries(2), Sends(density))
    assert seen == [[0.9, 0.5], [0.9, 0.5], [0.9, 0.0], [0.9, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_users_settings_come_back() -> None:
    """Oracle: the settings before, after a step and after one that fails; what is told."""
    parameter = nn.Parameter(entries(0))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, nesterov=True)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    told = step(optimizer, parameter, entries(1))
    assert len(told) == 1
    assert "SGD steps as with momentum=0 instead of 0.9 and 10 times the learning rate" in told[0]
    assert "DCTStrategy(momentum='keep') leaves all of it alone" in told[0]
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
