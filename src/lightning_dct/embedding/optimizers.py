"""Optimizers for rows: Adagrad with one accumulator a row, whose state for rows of 16 entries is a
sixteenth of theirs.

One optimizer serves a whole model, so that Lightning's automatic optimization does:
``RowWiseAdagrad`` with Adagrad for the dense parameters, ``AdamWithRows`` with AdamW. Optimizers
that take no sparse gradients are refused.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lightning_dct.step_hooks import before_steps_while_alive
from lightning_dct.sync.optimizer_trial import error_of_sparse_gradients


class RowWiseAdagrad(Optimizer):
    """Adagrad whose accumulator is the mean square of a row's gradient, for parameters with sparse
    gradients.

    With ``G`` the gradient of row ``i``: ``s_i += mean(G ** 2)``, ``row_i -= lr * G / (sqrt(s_i) +
    eps)``. Rows without a gradient stay as they are. Parameters with dense gradients get ordinary
    Adagrad, so one optimizer serves a whole model. (FBGEMM and TorchRec have the same "row-wise
    Adagrad".)

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
                    _update(
                        parameter, parameter.grad, self.state[parameter], group["lr"], group["eps"]
                    )
        return loss


class AdamWithRows(Optimizer):
    """AdamW for parameters with dense gradients, and :class:`RowWiseAdagrad` for those with sparse
    ones.

    So the networks of a recommender train with Adam, its embedding rows with row-wise Adagrad, and
    a LightningModule has one optimizer. Give rows a group of their own for another learning rate::

        AdamWithRows([{"params": model.tables.parameters(), "lr": 0.03}, {"params": model.mlps.parameters()}], lr=1e-3)

    Args:
        params: Parameters or groups of them.
        lr: Learning rate of both.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Of AdamW, decoupled; rows do not decay.
        row_eps: ``eps`` of :class:`RowWiseAdagrad`.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        row_eps: float = 1e-10,
    ) -> None:
        settings = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "row_eps": row_eps}
        for setting, value in settings.items():
            if not value >= 0:  # refuses NaN, too
                raise ValueError(f"`{setting}` must not be negative; got {value!r}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"`betas` must be at least 0 and below 1; got {betas!r}.")
        super().__init__(params, {**settings, "betas": tuple(betas)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, after ``closure`` if there is one, and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            dense = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    _update(
                        parameter,
                        parameter.grad,
                        self.state[parameter],
                        group["lr"],
                        group["row_eps"],
                    )
                else:
                    dense.append(parameter)
            self._step_dense(group, dense)
        return loss

    def _step_dense(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        first, second, steps = (
            [self.state[parameter][name] for parameter in parameters]
            for name in ("exp_avg", "exp_avg_sq", "step")
        )
        beta_1, beta_2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            first,
            second,
            [],
            steps,
            amsgrad=False,
            beta1=beta_1,
            beta2=beta_2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def group_of(weight: Tensor, optimizer: Optimizer) -> dict[str, Any] | None:
    """The parameter group with the rows; None if the optimizer does not have them."""
    return next(
        (group for group in optimizer.param_groups if any(p is weight for p in group["params"])),
        None,
    )


def refuse_optimizers_without_rows(module: nn.Module) -> None:
    """Refuse optimizers of a module's rows that take no sparse gradients, before their first step
    (ValueError).
    """
    this = weakref.ref(module)
    tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        rows = this()
        if rows is None or optimizer in tried:
            return
        weight: Any = rows.weight
        group = group_of(weight, optimizer)
        if not weight.requires_grad or group is None:
            return
        tried.add(optimizer)
        decay = float(group.get("weight_decay", 0.0))
        if (error := error_of_sparse_gradients(optimizer, decay)) is not None:
            raise ValueError(
                f"`{type(optimizer).__name__}` does not step the rows of {rows.name!r}, whose"
                f" gradients are sparse ({str(error)[:200]}). Use `lightning_dct.AdamWithRows`,"
                " which is AdamW for networks and `RowWiseAdagrad` for rows, with two groups:"
                " `AdamWithRows([{'params': tables.parameters(), 'lr': 0.03}, {'params':"
                " others}], lr=1e-3)`. Or `RowWiseAdagrad` for all parameters, or `Adagrad` or"
                " `SGD` without `weight_decay`."
            )

    before_steps_while_alive(module, before_step)


def _update(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], learning_rate: float, eps: float
) -> None:
    if not state:
        state["sum"] = (
            parameter.new_zeros(len(parameter))
            if gradient.is_sparse
            else torch.zeros_like(parameter)
        )
    sums = state["sum"]
    if not gradient.is_sparse:
        sums.addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, sums.sqrt().add_(eps), value=-learning_rate)
        return
    gradient = gradient.coalesce()
    rows = gradient.indices()[0]
    values = gradient.values()
    # The added dimension treats vectors as rows of one entry.
    sums[rows] += values.square().unsqueeze(-1).flatten(1).mean(dim=1)
    scale = sums[rows].sqrt_().add_(eps).view(-1, *(1 for _ in values.shape[1:]))
    parameter.index_add_(0, rows, values / scale, alpha=-learning_rate)
