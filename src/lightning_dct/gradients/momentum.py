"""Lets an optimizer's momentum rest where what is held back remembers longer: the residual is a momentum already.

An entry of a gradient that is sent with density ``d`` waits about ``1 / d`` optimizer steps in the residual and arrives
as the sum of what has come up meanwhile. A momentum of ``m`` sums, too, over about ``1 / (1 - m)`` steps. One after the
other the two delay the gradient twice and let the weights overshoot: AdamW with ``beta1 = 0.9`` at 1% ended 90% above
the dense loss where ``beta1 = 0`` ended 10% above it (docs/tuning.md). So for as long as ``1 / d >= 1 / (1 - m)`` the
optimizer steps as if it had no momentum:

    Adam, AdamW, Adamax, NAdam, RAdam    beta1 = 0, lr * (1 - beta1 / 2)
    SGD, RMSprop                         momentum = 0, lr * (1 - dampening) / (1 - momentum)

A sum of gradients moves the weights as far as before under SGD's rate, and so it would under Adam's own, whose average
weighs ``1 - beta1``. But without ``beta1`` Adam bears less: curvature up to ``2 / lr`` instead of
``2 (1 + beta1) / ((1 - beta1) lr)`` (Cohen et al., *Adaptive Gradient Methods at the Edge of Stability*, 2022), and
less still of gradients that come late. A rate that was tuned with ``beta1 = 0.9`` broke the language model in 2 of 3
runs at 3%, and 0.4 to 0.6 of it in none of 4 (docs/tuning.md). Hence the factor; it is that of this evidence, not of a
theory.

The optimizer's own settings are put back after each step, so schedules, loggers and checkpoints see what the user gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

# AdamW is an Adam.
AVERAGING = (Adam, Adamax, NAdam, RAdam)
SUMMING = (SGD, RMSprop)


@contextmanager
def resting_momentum(
    optimizer: Optimizer, density_of: Callable[[dict[str, Any]], float], told: Callable[[str], None]
) -> Iterator[None]:
    """Step without momentum in here, in those groups of parameters whose residual remembers longer.

    Args:
        optimizer: Its settings are as before when this is left.
        density_of: The density of a group's gradients: entries sent over entries.
        told: Called with a sentence about each group that steps without, in every step.
    """
    before = []
    try:
        for group in optimizer.param_groups:
            settings = without_momentum(optimizer, group)
            if settings and density_of(group) <= 1.0 - momentum_of(optimizer, group):
                told(_sentence(optimizer, group))
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


def without_momentum(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The settings with which a group steps without momentum; empty when it has none."""
    momentum = momentum_of(optimizer, group)
    if not momentum:
        return {}
    if isinstance(optimizer, AVERAGING):
        return {"betas": (0.0, group["betas"][1]), "lr": group["lr"] * (1.0 - momentum / 2.0)}
    settings = {"momentum": 0.0, "lr": group["lr"] * (1.0 - group.get("dampening", 0.0)) / (1.0 - momentum)}
    return settings | ({"nesterov": False, "dampening": 0.0} if isinstance(optimizer, SGD) else {})


def _sentence(optimizer: Optimizer, group: dict[str, Any]) -> str:
    averaging = isinstance(optimizer, AVERAGING)
    setting, momentum = "betas[0]" if averaging else "momentum", momentum_of(optimizer, group)
    # Of a learning rate of 1: the group's own may be a tensor on a GPU, which would have to be waited for.
    factor = without_momentum(optimizer, {**group, "lr": 1.0})["lr"]
    return (
        f"{type(optimizer).__name__} steps as with {setting}=0 instead of {momentum:g}"
        f" and {factor:.3g} times the learning rate: what is held back of compressed gradients is a momentum"
        " already. DCTStrategy(momentum='keep') leaves it alone."
    )
