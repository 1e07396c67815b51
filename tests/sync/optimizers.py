"""Optimizers of users' own, good and bad."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Sign(Optimizer):
    """Lion without momentum: the step is as long as the learning rate, whatever the gradient."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] * parameter.grad.sign())
        return loss


class MastersInState(Sign):
    """Steps fp32 copies, which it keeps in its state, and copies them into the model."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self):
            if "master" in self.state[parameter]:
                parameter.copy_(self.state[parameter]["master"])
        loss = super().step(closure)
        for parameter in parameters_of(self):
            self.state[parameter]["master"] = parameter.detach().clone()
        return loss


class MastersBeside(Sign):
    """The same with copies in a list that it makes with itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.masters = [parameter.detach().clone() for parameter in parameters_of(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter, master in zip(parameters_of(self), self.masters, strict=True):
            parameter.copy_(master)
        loss = super().step(closure)
        for parameter, master in zip(parameters_of(self), self.masters, strict=True):
            master.copy_(parameter)
        return loss


class Averages(Sign):
    """Averages weights over the ranks in its step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in parameters_of(self):
            dist.all_reduce(
                parameter.data,
                op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM,
            )
        return loss


class Lookahead(Optimizer):
    """Wraps an optimizer, and pulls weights back to a slow copy every five steps (Zhang et al.,
    2019).
    """

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.steps = 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.state = base.state
        self.slow = [parameter.detach().clone() for parameter in parameters_of(base)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        for slow, parameter in (
            zip(self.slow, parameters_of(self.base), strict=True) if self.steps % 5 == 0 else ()
        ):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)
        return loss


class NeedsClosure(Sign):
    """Cannot be tried without a loss."""

    def step(self, closure: Any) -> Any:
        return super().step(lambda: closure())
