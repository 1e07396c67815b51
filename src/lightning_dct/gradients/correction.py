"""Momentum correction and momentum factor masking for SGD (Lin et al., Deep Gradient Compression, ICLR 2018, 3.2-3.3).

Momentum that the optimizer applies to sparse sums of gradients is not the momentum of those gradients. Here every rank
applies it to its own gradient before it is compressed, and the optimizer steps without, at its own learning rate:

    u   = m * u + g              the velocity of this rank: momentum correction
    a   = e + u                  the residual collects velocities instead of gradients (Nesterov: e + g + m * u)
    e   = a - sent               sent where |a| >= tau
    u   = 0 where sent           momentum factor masking
    w  -= lr * mean of sent

Without masking (density 1, tensors that go whole) the sum over ranks of ``u`` is the optimizer's momentum buffer, and
this is SGD with momentum as ever. Masking gives up what a velocity would still have added: it is the one place in this
package where gradient is dropped on purpose. An entry that has waited 1 / d steps and then goes on by the momentum of
all that time would overshoot.

Weight decay stays in the optimizer, which knows the weights: ``1 / (1 - m)`` of it, what momentum makes of it in sum.
Clipping by the Trainer acts on what arrives, as it does without correction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.wire import unpack, unpack_on_device


class MomentumSettings(NamedTuple):
    """How a velocity goes from one step to the next.

    Attributes:
        momentum: The share of it that is kept, in (0, 1).
        nesterov: Whether the optimizer is to step by ``g + m * u`` instead of ``u``.
    """

    momentum: float
    nesterov: bool


class MomentumCorrection:
    """Knows the momentum of each parameter, which its optimizer leaves to the velocities.

    Args:
        optimizers: Gives all optimizers; those of synchronised parameters must be SGD.
    """

    def __init__(self, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        self._optimizers = optimizers
        self._synchronised: set[Tensor] = set()
        # What the user has set in those groups whose momentum rests at the moment, by the group's identity.
        self._resting: dict[int, dict[str, Any]] = {}

    def take_charge_of(self, parameters: Iterable[Tensor]) -> None:
        """Say which parameters are synchronised, and so have velocities; the momentum of others is left alone."""
        self._synchronised.update(parameters)

    def settings(self, others: Collection[Tensor] = ()) -> dict[Tensor, MomentumSettings]:
        """The momentum of each synchronised parameter that has one.

        Args:
            others: Trained parameters that are not synchronised. They would lose their momentum in a group with some
                that are.

        Raises:
            ValueError: An optimizer is of a kind, or set in a way, that this does not work with.
        """
        found = {}
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                own = self._synchronised.intersection(group["params"])
                settings = self._resting.get(id(group), group)
                if own:
                    _check(optimizer, settings)
                if own and settings["momentum"]:
                    if not set(others).isdisjoint(group["params"]):
                        raise ValueError(
                            "`momentum='correct'` knows no momentum of sharded embedding tables, and a group of the"
                            " optimizer has a table and other parameters. Put the tables into a group of their own."
                        )
                    of_group = MomentumSettings(float(settings["momentum"]), bool(settings["nesterov"]))
                    found.update(dict.fromkeys(own, of_group))
        return found

    @contextmanager
    def at_rest(self, optimizer: Optimizer) -> Iterator[None]:
        """Step without momentum in here; the optimizer's settings are as before when this is left."""
        groups = [
            group
            for group in optimizer.param_groups
            if id(group) not in self._resting and not self._synchronised.isdisjoint(group["params"])
        ]
        try:
            for group in groups:
                _check(optimizer, group)
                self._resting[id(group)] = {name: group[name] for name in ("momentum", "nesterov", "weight_decay")}
                decay = group["weight_decay"] / (1.0 - group["momentum"])
                group.update({"momentum": 0.0, "nesterov": False, "weight_decay": decay})
            yield
        finally:
            for group in groups:
                group.update(self._resting.pop(id(group), {}))


def _check(optimizer: Optimizer, settings: dict[str, Any]) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, SGD):
        raise ValueError(
            f"`momentum='correct'` works with torch.optim.SGD, and the optimizer is {kind}. Use `momentum='auto'`,"
            " which knows the momentum of Adam and its relatives too, or `momentum='keep'`."
        )
    if settings.get("dampening"):
        raise ValueError(
            f"`momentum='correct'` works without dampening, and {kind} has dampening={settings['dampening']:g}. Set it"
            " to 0, or use `momentum='auto'`."
        )


def advance(
    velocity: Tensor, residual: Tensor, gradient: Tensor, settings: MomentumSettings, gradient_scale: float
) -> None:
    """Let a velocity take up a gradient, and the residual what the velocity adds to that gradient.

    The gradient itself is not changed: whatever sends ``residual + gradient_scale * gradient`` sends from ``e + u``.

    Args:
        velocity: Shape ``[n]``, in the residual's dtype, unscaled. Changed in place; of infinite and NaN entries of the
            gradient it takes nothing.
        residual: Shape ``[n]``. Changed in place.
        gradient: Shape ``[n]``: a tensor's gradient on this rank.
        settings: The momentum.
        gradient_scale: One over the loss scale of mixed-precision training.
    """
    velocity.mul_(settings.momentum)
    if not settings.nesterov:
        residual.add_(velocity)
    moved = torch.add(velocity, gradient, alpha=gradient_scale)
    velocity.copy_(torch.where(moved.isfinite(), moved, velocity))
    if settings.nesterov:
        residual.add_(velocity, alpha=settings.momentum)


def mask_sent(velocity: Tensor, plan: BucketPlan, payload: Tensor, without_waiting: bool) -> None:
    """Set a velocity to zero where entries are sent.

    Args:
        velocity: Shape ``[n]``: that of a bucket. Changed in place.
        plan: What was sent of the bucket.
        payload: Shape ``[plan.layout.num_bytes]``, uint8: what was sent.
        without_waiting: Whether the payload is on a device whose host must not wait for it.
    """
    if without_waiting:
        entries = unpack_on_device(plan.layout, payload).entries
        # Slots that are not in use name places too, and must not count there.
        sent = torch.zeros_like(velocity)
        sent.index_add_(0, plan.to_bucket(entries.positions), entries.in_use.to(velocity.dtype))
        velocity.masked_fill_(sent > 0, 0.0)
    else:
        velocity[plan.to_bucket(unpack(plan.layout, payload).positions)] = 0.0
