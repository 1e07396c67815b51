"""How the gradient of pooled rows leaves autograd for the exchange, and how the exchange finishes with backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def deliver(weight: Tensor, pooled: Tensor, send_gradient: Callable[[Tensor], None]) -> Tensor:
    """Make ``pooled`` a part of the graph whose gradient goes to ``send_gradient`` and nowhere else.

    Args:
        weight: What is trained; its own gradient is set by the exchange.
        pooled: Any shape.
        send_gradient: Is given the gradient of ``pooled``.
    """
    return _Deliver.apply(weight, pooled, send_gradient)


def when_backward_ends(finish: Callable[[], None]) -> None:
    """Call something when the backward under way has done everything else, so that bytes travel meanwhile.

    DistributedDataParallel ends its own synchronisation in this way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(finish)


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pooled: Tensor, send_gradient: Callable[[Tensor], None]) -> Tensor:
        ctx.send_gradient = send_gradient
        return pooled.view_as(pooled)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.send_gradient(gradient)
        return None, None, None
