"""Hooks before the steps of all optimizers, which live as long as an object."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
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
    while _left:
        _left.pop().remove()
    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(owner, _left.append, handle)
    return handle
