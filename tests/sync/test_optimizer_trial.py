"""What a trial of an optimizer shows, and that it leaves the optimizer and its weights as they
were.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_dct.sync.optimizer_trial import try_out
from sync.optimizers import (
    Lookahead,
    MastersBeside,
    MastersInState,
    NeedsClosure,
    Sign,
    parameters_of,
)


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 9))]


def mixed() -> list[nn.Parameter]:
    return [*nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Conv1d(2, 3, 4)).parameters()]


LINEAR: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.3),
    "SGD with momentum": partial(optim.SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "ASGD": optim.ASGD,
    "Lookahead of SGD": lambda params: Lookahead(optim.SGD(params, lr=0.1)),
    "Adam that divides by 1": partial(optim.Adam, eps=1.0),
    "RMSprop that divides by 0.1": partial(optim.RMSprop, eps=0.1),
}
CHOOSING: dict[str, Callable[..., optim.Optimizer]] = {
    "Adam": partial(optim.Adam, weight_decay=0.1),
    "AdamW": optim.AdamW,
    "AdamW, a rate of 0 at first": partial(optim.AdamW, lr=0.0),
    "AdamW, fused": partial(optim.AdamW, fused=True),
    "AdamW, a tensor for a rate": lambda params: optim.AdamW(params, lr=torch.tensor(0.1)),
    "RAdam": optim.RAdam,
    "NAdam": partial(optim.NAdam, decoupled_weight_decay=True),
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "RMSprop": optim.RMSprop,
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,
    "SparseAdam": optim.SparseAdam,
    "Sign": Sign,
    "Lookahead of AdamW": lambda params: Lookahead(optim.AdamW(params)),
}
DECAYING = {
    "AdamW",
    "AdamW, a rate of 0 at first",
    "AdamW, fused",
    "AdamW, a tensor for a rate",
    "NAdam",
    "Adafactor",
}
DECAYING |= {"Sign", "Lookahead of AdamW"}


@pytest.mark.parametrize("name", [*LINEAR, *CHOOSING])
def test_whether_steps_grow_with_gradients_and_which_weights_decay(name: str) -> None:
    """Oracle: the definitions of these optimizers."""
    trial = try_out({**LINEAR, **CHOOSING}[name](mixed()))
    assert trial.is_scale_invariant == (name in CHOOSING)
    if name in CHOOSING:
        assert trial.decays == (name in DECAYING,)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="newer than this torch")
def test_muon_which_takes_only_matrices() -> None:
    assert try_out(optim.Muon(matrices()))[:2] == (True, (True,))


def test_each_group_decays_by_itself() -> None:
    groups = [
        {"params": matrices(), "weight_decay": 0.0},
        {"params": mixed(), "decoupled_weight_decay": False},
    ]
    # The setting may come later.
    assert try_out(optim.Adam(groups, decoupled_weight_decay=True)).decays == (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.randn(9, 9, dtype=dtype))]
    assert try_out(optim.AdamW(weights, eps=1e-4))[:2] == (True, (True,))  # 1e-8 is 0 in fp16
    assert not try_out(optim.SGD(weights, lr=0.1)).is_scale_invariant


def test_complex_weights_are_tried_without_a_warning() -> None:
    weights = [nn.Parameter(torch.randn(9, 9, dtype=torch.complex64))]
    torch.set_warn_always(True)  # else torch warns once in a process
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert try_out(optim.AdamW(weights))[:2] == (True, (True,))
    finally:
        torch.set_warn_always(False)
    assert not [str(one.message) for one in caught if "complex" in str(one.message)]


def everything_of(optimizer: optim.Optimizer) -> Any:
    held = {
        name: value
        for name, value in vars(optimizer).items()
        if "hook" not in name and name != "step"
    }
    return copy.deepcopy([held, parameters_of(optimizer), torch.get_rng_state()])


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys() or all(isinstance(key, torch.Tensor) for key in one)
        one = list(one.values())
        other = list(other.values())
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, optim.Optimizer):
        assert_same(vars(one), vars(other))
    elif isinstance(one, (int, float, str)):
        assert one == other


@pytest.mark.parametrize("make", [*LINEAR.values(), *CHOOSING.values(), NeedsClosure])
def test_nothing_of_the_optimizer_changes(make: Callable[..., optim.Optimizer]) -> None:
    """Oracle: copies of all that it holds, of its weights and of torch's random numbers, before and
    after.
    """
    weights = mixed()
    optimizer = make(weights)
    steps: list[optim.Optimizer] = []
    optimizer.register_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # wraps the step
    before = everything_of(optimizer)
    try_out(optimizer)
    assert_same(before, everything_of(optimizer))
    assert not steps
    assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("make", [MastersInState, MastersBeside])
def test_steps_of_copies_are_refused(make: Callable[..., optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"steps copies of the weights.*`compress='gradients'`"):
        try_out(make(mixed()))


def test_an_optimizer_that_reaches_for_other_tensors_is_stopped_before_it_writes() -> None:
    class Reaches(Sign):
        def __init__(self, params: Any, other: nn.Module) -> None:
            super().__init__(params)
            self.other = other

        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.other.weight.add_(1.0)
            return super().step(closure)

    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    assert not try_out(Reaches(mixed(), other)).is_scale_invariant
    assert torch.equal(other.weight, before)


def test_a_closure_cannot_be_tried() -> None:
    assert try_out(NeedsClosure(mixed()))[:2] == (False, (False,))
