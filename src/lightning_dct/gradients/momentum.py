"""Lets an optimizer's momentum rest where what is held back remembers longer: the residual is a momentum already.

An entry of a gradient that is sent with density ``d`` waits about ``1 / d`` optimizer steps in the residual and arrives
as the sum of what has come up meanwhile. A momentum of ``m`` sums, too, over about ``1 / (1 - m)`` steps. One after the
other the two delay the gradient twice and let the weights overshoot: AdamW with ``beta1 = 0.9`` at 1% ended 90% above
the dense loss where ``beta1 = 0`` ended 10% above it (docs/tuning.md). So for as long as ``1 / d >= 1 / (1 - m)`` the
optimizer steps as if it had no momentum:

    Adam, AdamW, Adamax, NAdam, RAdam    beta1 = 0, grown * bearable(lr)
    SGD, RMSprop                         momentum = 0, lr * (1 - dampening) / (1 - momentum)

A sum of gradients then moves the weights as far as before. For Adam and its kin, two things are made up for:

*Early steps.* ``grown = min(1, t * d / 4)`` in step ``t``: until its entries have been sent four times each, on
average, little is known of their second moments, and what was held back while the first steps turned the model upside
down is still arriving. It is the reason for which Adam is warmed up at all (Ma and Yarats, *On the adequacy of untuned
warmup*, AAAI 2021), only ``1 / d`` times later. SGD, which divides by nothing, only loses by it.

*Large steps.* In noise the average that ``beta1 = 0.9`` makes is 0.23 of ``sqrt(v)``, a gradient by itself all of it;
and without ``beta1`` Adam bears curvature up to ``2 / lr`` instead of ``2 (1 + beta1) / ((1 - beta1) lr)`` (Cohen et
al., *Adaptive Gradient Methods at the Edge of Stability*, 2022). So a learning rate above a tenth of the weights' size
is lowered to that, though to no less than half of what it was: ``bearable(lr) = min(lr, max(lr / 2, size / 10))``.

The four and the tenth are from runs of two models (docs/tuning.md), not from a theory.

The optimizer's own settings are put back after each step, so schedules, loggers and checkpoints see what the user gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

# AdamW is an Adam.
AVERAGING = (Adam, Adamax, NAdam, RAdam)
SUMMING = (SGD, RMSprop)
SENT_UNTIL_FULL_RATE = 4
BEARABLE_STEP = 0.1


class Sender(Protocol):
    """What sends the gradients, and knows how."""

    @property
    def synchronisations(self) -> int:
        """How many there have been before this step."""

    def density_of(self, parameters: Iterable[Tensor]) -> float:
        """The share of the entries of some parameters' gradients that it sends, in (0, 1]."""

    def weight_size_of(self, parameters: Iterable[Tensor]) -> float:
        """How large the weights are, root mean square."""


@contextmanager
def resting_momentum(optimizer: Optimizer, sender: Sender, told: Callable[[str], None]) -> Iterator[None]:
    """Step without momentum in here, in those groups of parameters whose residual remembers longer.

    Args:
        optimizer: Its settings are as before when this is left.
        sender: Sends the gradients that it steps with.
        told: Called with a sentence about each group that steps without, in every step.
    """
    before = []
    try:
        for group in optimizer.param_groups:
            momentum = momentum_of(optimizer, group)
            if momentum and (density := sender.density_of(group["params"])) <= 1.0 - momentum:
                told(_sentence(optimizer, group))
                settings = _settings_at_rest(optimizer, group, density, sender)
                before.append((group, {name: group[name] for name in settings}))
                group.update(settings)
        yield
    finally:
        for group, settings in before:
            group.update(settings)


def momentum_of(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """By how much the optimizer's momentum decays in a step, in [0, 1); 0 for none."""
    if isinstance(optimizer, AVERAGING):
        return float(group["betas"][0])
    return float(group["momentum"]) if isinstance(optimizer, SUMMING) else 0.0


def _settings_at_rest(optimizer: Optimizer, group: dict[str, Any], density: float, sender: Sender) -> dict[str, Any]:
    """The settings with which a group steps without its momentum."""
    if isinstance(optimizer, AVERAGING):
        grown = min(1.0, (sender.synchronisations + 1) * density / SENT_UNTIL_FULL_RATE)
        lr = grown * _bearable(group["lr"], sender.weight_size_of(group["params"]))
        return {"betas": (0.0, group["betas"][1]), "lr": lr}
    settings = {"momentum": 0.0, "lr": group["lr"] * _factor_of_sums(group)}
    return settings | ({"nesterov": False, "dampening": 0.0} if isinstance(optimizer, SGD) else {})


def _bearable(learning_rate: float | Tensor, weight_size: float) -> float | Tensor:
    """The rate, or less where its steps are large beside the weights."""
    bound = BEARABLE_STEP * weight_size
    if isinstance(learning_rate, Tensor):  # it may be on a GPU, which is not to be waited for
        return (learning_rate / 2).clamp(min=bound).minimum(learning_rate)
    return min(learning_rate, max(learning_rate / 2, bound))


def _factor_of_sums(group: dict[str, Any]) -> float:
    return float((1.0 - group.get("dampening", 0.0)) / (1.0 - group["momentum"]))


def _sentence(optimizer: Optimizer, group: dict[str, Any]) -> str:
    momentum = momentum_of(optimizer, group)
    if isinstance(optimizer, AVERAGING):
        settings = f"betas[0]=0 instead of {momentum:g}"
        rate = (
            f" The learning rate grows over the first {SENT_UNTIL_FULL_RATE} / density steps, and where it is above a"
            " tenth of the weights' size it is lowered, to half at most."
        )
    else:
        settings = f"momentum=0 instead of {momentum:g} and {_factor_of_sums(group):.3g} times the learning rate"
        rate = ""
    return (
        f"{type(optimizer).__name__} steps as with {settings}: what is held back of compressed gradients is a momentum"
        f" already.{rate} DCTStrategy(momentum='keep') leaves all of it alone."
    )
