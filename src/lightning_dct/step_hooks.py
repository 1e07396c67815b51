"""Hooks before and after the steps of all optimizers, which live as long as an object."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

# Hooks of objects that are gone. The collector may run while an optimizer goes through its hooks,
# and then none of them may be removed.
_left: list[RemovableHandle] = []


def before_steps_while_alive(owner: object, hook: Callable[..., Any]) -> RemovableHandle:
    """Call a hook before each step of any optimizer, as long as there is an object.

    Args:
        owner: The hook must not hold it. When it is gone, the hook must do nothing, because it is
            still called until the next one is registered.
        hook: Called with the optimizer and the arguments of its step.
    """
    return _register(register_optimizer_step_pre_hook, owner, hook)


def see_steps(
    owner: object,
    before: Callable[..., Any] | None = None,
    after: Callable[..., None] | None = None,
) -> list[RemovableHandle]:
    """Call methods of an object before and after each step of any optimizer, as long as it lives.

    If a step is compiled, the methods are not.

    Args:
        owner: The object.
        before: Its method that is called before a step, with the optimizer and the step's
            arguments; None for none. It may return other arguments, as torch's hooks may.
        after: The same after a step.
    """
    found = ((register_optimizer_step_pre_hook, before), (register_optimizer_step_post_hook, after))
    return [
        _register(register, owner, torch.compiler.disable(_weakly(method)))
        for register, method in found
        if method is not None
    ]


def _register(
    register: Callable[..., RemovableHandle], owner: object, hook: Callable[..., Any]
) -> RemovableHandle:
    while _left:
        _left.pop().remove()
    handle = register(hook)
    weakref.finalize(owner, _left.append, handle)
    return handle


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does nothing once its object is gone."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        its = weak()
        return None if its is None else its(*arguments)

    return call
