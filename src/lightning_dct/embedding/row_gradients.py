"""Gradients of rows: taken from autograd at the pooled rows, collected from all ranks, and put into ``weight.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_dct.kernels import add_rows

# Messages that may be under way at a time.
MOST_EXPECTED = 16


def when_backward_ends(gradients: CollectedGradients, finish: Callable[[], None]) -> None:
    """Call ``finish`` once for these gradients after the rest of this backward, as DistributedDataParallel does."""
    this_backward = torch._C._current_graph_task_id()
    if gradients.ended_by != this_backward:
        gradients.ended_by = this_backward
        torch.autograd.Variable._execution_engine.queue_callback(finish)


class CollectedGradients:
    """The gradients of this rank's rows that have arrived since the last backward ended."""

    def __init__(self, parts: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._parts = list(parts)
        self.ended_by = -1  # the backward that will end with them, of autograd's numbers
        self._expected: list[Callable[[], Iterable[tuple[Tensor, Tensor]]]] = []

    @property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Places among this rank's rows (int64 ``[k]``) and gradients (``[k, dim]``), in the order of :meth:`add`."""
        self.wait()
        return self._parts

    def add(self, places: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a rank's mean loss at ``places``; a row may occur more than once."""
        self._parts.append((places, gradient))

    def expect(self, arrive: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Add what ``arrive`` waits for and returns, places and gradients, before any part is read."""
        if len(self._expected) == MOST_EXPECTED:  # of look-ups without a backward
            self.wait()
        self._expected.append(arrive)

    def wait(self) -> None:
        """Wait for all expected parts."""
        for arrive in self._expected:
            self._parts += arrive()
        self._expected = []

    def deliver(
        self, weight: Tensor, world_size: int, resolve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> None:
        """Add the mean over ``world_size`` ranks to ``weight.grad`` as a sparse tensor, and forget the parts.

        ``resolve`` maps distinct places and their gradients to ascending rows of ``weight`` and their gradients.
        """
        parts, self._parts = self.parts, []
        distinct, inverse = torch.unique(torch.cat([places for places, _ in parts]), return_inverse=True)
        summed = parts[0][1].new_zeros(distinct.numel(), parts[0][1].shape[1])
        for part, (_, gradient) in zip(inverse.split([len(p) for p, _ in parts]), parts, strict=True):
            add_rows(summed, part, gradient)
        rows, mean = resolve(distinct, summed.div_(world_size).to(weight.dtype))
        gradient = torch.sparse_coo_tensor(
            rows.unsqueeze(0), mean, weight.shape, is_coalesced=True, check_invariants=False
        )
        weight.grad = gradient if weight.grad is None else (weight.grad + gradient).coalesce()


class DeliverRows(torch.autograd.Function):
    """Makes backward call ``send_gradient`` with the gradient of ``pooled``. It sets the gradient of ``weight``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pooled: Tensor, send_gradient: Callable[[Tensor], None]) -> Tensor:
        """The pooled rows, as they are."""
        ctx.send_gradient = send_gradient
        return pooled.view_as(pooled)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """No gradient: ``send_gradient`` has it."""
        ctx.send_gradient(gradient)
        return None, None, None
