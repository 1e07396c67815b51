"""Gives the gradients of a pipeline schedule to DistributedDataParallel.

A schedule runs its own backward passes, one per micro-batch, in the middle of ``training_step``. Lightning then calls
``zero_grad`` and ``backward``. So :func:`set_aside` collects the schedule's gradients, and :func:`deliver` returns a
loss whose backward puts them into ``.grad``. Gradient accumulation and DistributedDataParallel's hooks work as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of the code inside in a list, one or None per parameter, and leave ``.grad`` unchanged."""
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
    """A copy of a scalar loss. Its backward, which may run once, scales the gradients in place and returns them."""
    return _Deliver.apply(loss, list(gradients), *parameters)


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
