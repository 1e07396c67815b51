"""Hands the gradients of a pipeline schedule to DistributedDataParallel, as if backward had just run.

A schedule runs its own backward passes, one per micro-batch, in the middle of ``training_step``. Lightning then calls
``zero_grad`` and ``backward``. So the schedule's gradients are set aside, and come back as the gradients of a function
from the parameters to the loss. ``backward`` of that loss fills ``.grad``, scales by gradient accumulation, and fires
DistributedDataParallel's hooks, all as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients that arise inside in a list, and leave ``.grad`` as it was.

    At the end the list has one gradient per parameter, or None.
    """
    before = [parameter.grad for parameter in parameters]
    gradients: list[Tensor | None] = []
    try:
        for parameter in parameters:
            parameter.grad = None
        yield gradients
        gradients.extend(parameter.grad for parameter in parameters)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def deliver(loss: Tensor, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> Tensor:
    """A copy of a scalar loss whose backward gives each parameter its gradient, once: it scales them in place."""
    return _Deliver.apply(loss, list(gradients), *parameters)


def through_ddp(ddp: DistributedDataParallel, function: Callable[[], Any]) -> Any:
    """Call ``function`` as the forward of a wrapped model, so that its backward is synchronised.

    A hack, and Lightning's own: it replaces the module's ``forward`` during the call.
    """
    ddp.module.forward = function
    try:
        return ddp()
    finally:
        del ddp.module.forward


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, *(None if g is None else g.mul_(scale.to(g.dtype)) for g in gradients))
