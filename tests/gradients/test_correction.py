"""Velocities: taken up, masked and left alone; what the optimizer keeps to itself meanwhile."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_dct.gradients.correction import MomentumCorrection, MomentumSettings, advance, mask_sent
from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.wire import pack


def entries(seed: int, size: int = 6) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_whole_tensors_step_as_sgd_does(nesterov: bool, scale: float) -> None:
    """Oracle: torch's SGD with momentum, where everything is sent."""
    theirs, ours = nn.Parameter(entries(0)), entries(0)
    optimizer = SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
    velocity = torch.zeros(6, dtype=torch.float64)
    for seed in range(1, 6):
        theirs.grad = entries(seed)
        optimizer.step()
        residual = torch.zeros(6, dtype=torch.float64)
        advance(velocity, residual, entries(seed) / scale, MomentumSettings(0.9, nesterov), scale)
        ours -= 0.1 * (residual + entries(seed))
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_nothing_infinite_enters(broken: float, nesterov: bool) -> None:
    """Oracle: zero in its place."""
    kept = []
    for entry in (broken, 0.0):
        velocity, residual, gradient = entries(1), entries(2), entries(3)
        gradient[2] = entry
        advance(velocity, residual, gradient, MomentumSettings(0.9, nesterov), 1.0)
        kept.append((velocity, residual))
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("without_waiting", [False, True])
@pytest.mark.parametrize("starts", [None, (4, 30)])
def test_masked_where_sent(without_waiting: bool, starts: tuple[int, int] | None) -> None:
    """Oracle: the places that were packed; one slot of the payload is not in use."""
    plan = BucketPlan(("a", "b"), (20, 10), (3, 2), torch.float32, "1bit", starts)
    first, second = starts or (0, 20)
    positions = torch.tensor([0, 7, 22, 29])
    payload, _ = pack(plan.layout, positions, torch.ones(4), torch.empty(0, dtype=torch.uint8))
    velocity = entries(1, 50)
    expected = velocity.clone()
    expected[[first, first + 7, second + 2, second + 9]] = 0.0
    mask_sent(velocity, plan, payload, without_waiting)
    assert torch.equal(velocity, expected)


def test_users_settings_come_back() -> None:
    """Oracle: the settings before; those at rest; the same when two synchronizers share the correction."""
    one, other = nn.Parameter(entries(0)), nn.Parameter(entries(1))
    groups = [{"params": [one]}, {"params": [other], "momentum": 0.5, "nesterov": True}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    correction = MomentumCorrection(lambda: [optimizer])
    correction.take_charge_of([other])

    def settings() -> list[tuple[float, bool, float]]:
        return [(group["momentum"], group["nesterov"], group["weight_decay"]) for group in optimizer.param_groups]

    before = settings()
    for _ in range(2):
        with correction.at_rest(optimizer), correction.at_rest(optimizer):
            assert settings() == [(0.9, False, 0.01), (0.0, False, 0.02)]
            assert correction.settings() == {other: MomentumSettings(0.5, True)}
        assert settings() == before
    with pytest.raises(ZeroDivisionError), correction.at_rest(optimizer):
        1 / 0  # noqa: B018
    assert settings() == before
    assert correction.settings() == {other: MomentumSettings(0.5, True)}


def test_refusals_name_the_remedy() -> None:
    """Oracle: the messages."""
    one, other = nn.Parameter(entries(0)), nn.Parameter(entries(1))

    def refusal(optimizer: torch.optim.Optimizer) -> str:
        correction = MomentumCorrection(lambda: [optimizer])
        correction.take_charge_of([one])
        with pytest.raises(ValueError) as caught:
            correction.settings(others=[other])
        return str(caught.value)

    assert "the optimizer is Adam. Use `momentum='auto'`" in refusal(Adam([one]))
    assert "SGD has dampening=0.5. Set it to 0" in refusal(SGD([one], momentum=0.9, dampening=0.5))
    assert "Put the tables into a group of their own" in refusal(SGD([one, other], momentum=0.9))
    alone = MomentumCorrection(lambda: [Adam([other]), SGD([one], momentum=0.0)])
    alone.take_charge_of([one])
    assert alone.settings(others=[other]) == {}
