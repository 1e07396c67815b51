"""Hooks end with their objects, and never while an optimizer goes through its hooks."""

import gc

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_dct.step_hooks import before_steps_while_alive


class Owner:
    """Of a hook."""


def test_an_object_may_go_while_an_optimizer_steps() -> None:
    """A hook removed meanwhile would change the dictionary that the optimizer goes through: an
    error.
    """
    owners: list[Owner] = [Owner(), Owner()]
    called: list[int] = []

    def let_go(*_: object) -> None:
        owners.clear()
        gc.collect()
        called.append(1)

    def other(*_: object) -> None:
        called.append(2)

    def last(*_: object) -> None:
        called.append(3)

    before_steps_while_alive(owners[0], let_go)
    before_steps_while_alive(owners[1], other)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    assert called == [1, 2]
    owner = Owner()
    handle = before_steps_while_alive(owner, last)
    hooks = list(_global_optimizer_pre_hooks.values())
    assert last in hooks
    assert let_go not in hooks
    assert other not in hooks
    handle.remove()
