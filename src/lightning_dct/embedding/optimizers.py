"""Adagrad with one accumulator per row, so its state for rows of 16 entries is a sixteenth of their size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class RowWiseAdagrad(Optimizer):
    """Adagrad whose accumulator is the mean square of a row's gradient, for parameters with sparse gradients.

    With ``G`` the gradient of row ``i``: ``s_i += mean(G ** 2)``, ``row_i -= lr * G / (sqrt(s_i) + eps)``. Rows
    without a gradient stay as they are. Parameters with dense gradients get ordinary Adagrad, so one optimizer serves
    a whole model. (FBGEMM and TorchRec have the same "row-wise Adagrad".)

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        eps: Added to the root.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        for setting, value in (("lr", lr), ("eps", eps)):
            if not value >= 0:  # refuses NaN, too
                raise ValueError(f"`{setting}` must not be negative; got {value!r}.")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, after ``closure`` if there is one, and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group["lr"], group["eps"])
        return loss


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], learning_rate: float, eps: float) -> None:
    if not state:
        state["sum"] = parameter.new_zeros(len(parameter)) if gradient.is_sparse else torch.zeros_like(parameter)
    sums = state["sum"]
    if not gradient.is_sparse:
        sums.addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, sums.sqrt().add_(eps), value=-learning_rate)
        return
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    # The added dimension treats vectors as rows of one entry.
    sums[rows] += values.square().unsqueeze(-1).flatten(1).mean(dim=1)
    scale = sums[rows].sqrt_().add_(eps).view(-1, *(1 for _ in values.shape[1:]))
    parameter.index_add_(0, rows, values / scale, alpha=-learning_rate)
