"""What levers do to what the ranks hold between two optimizer steps: collective calls, all ranks together."""

from __future__ import annotations

import math

import torch

from lightning_dct.gradients.collectives import add_up
from lightning_dct.gradients.hook import GradientSynchronizer
from lightning_dct.gradients.plan import real_dtype, real_numel, target_of
from lightning_dct.gradients.synchronizer import Synchronizer
from lightning_dct.gradients.tails import Tails, share_out_entries
from lightning_dct.wire import BITS_PER_VALUE


def average_residuals(synchronizer: GradientSynchronizer) -> None:
    """Give every rank the mean of what all ranks hold back.

    Where ranks own the same pieces, as those of different nodes do, it is what they hold back of their sums.

    Raises:
        RuntimeError: A synchronisation is under way.
    """
    synchronizer.check_idle()
    memory, exchange = synchronizer.memory, synchronizer.exchange
    for parameter, name in synchronizer.parameter_names.items():
        size, device = real_numel(parameter), parameter.device
        plan = synchronizer.plans.of((name,), (size,), real_dtype(parameter), synchronizer.synchronisations)
        if plan.is_dense or not parameter.requires_grad:
            continue
        link = exchange.co_owners
        if link is None:
            held = [memory.residuals.of(name, size, plan.residual_dtype, device)]
        else:
            held = memory.owned_by_name(name, plan.residual_dtype, device)
        link = link or exchange.everyone
        for part in held:
            add_up(part, link)
            part.div_(link.size)


def decide_to_hold_back(synchronizer: GradientSynchronizer, bound: float, at_most: int) -> bool:
    """Decide whether the next synchronisation sends nothing: the same on every rank.

    Args:
        synchronizer: One that measures its gradients, after a synchronisation.
        bound: Nothing is sent while the norm of all that is held back is less than so many times that of the gradients.
        at_most: Synchronisations in a row that may send nothing.

    Returns:
        What was decided.

    Raises:
        RuntimeError: A synchronisation is under way.
        FloatingPointError: A gradient is infinite or NaN, on whichever rank.
    """
    synchronizer.check_idle()
    holding = synchronizer.holding
    assert holding is not None
    gradient = holding.measured()
    squares = torch.stack([gradient, gradient.new_tensor(synchronizer.memory.norm() ** 2)])
    add_up(squares, synchronizer.exchange.everyone)
    gradients, held = squares.tolist()
    if not math.isfinite(gradients + held):
        raise FloatingPointError(
            "A gradient is infinite or NaN. `EventTriggeredSending` must not hold it back, where it would stay: lower"
            " the learning rate, clip what makes it so, or remove the callback."
        )
    holding.back = holding.in_a_row < at_most and held < bound**2 * gradients
    return holding.back


def count_tails(synchronizer: Synchronizer) -> None:
    """Count each tensor's large entries in the next synchronisation, which selects all thresholds anew."""
    if synchronizer.memory.tails is None:
        synchronizer.memory.tails = Tails(synchronizer.parameter_names.values())
    synchronizer.request_refresh()


def tails_are_counted(synchronizer: Synchronizer) -> bool:
    """Whether a synchronisation has been counted; the same on every rank."""
    return synchronizer.memory.tails is not None and not synchronizer.refresh_requested


def share_out_by_tails(synchronizer: Synchronizer, bound: int) -> dict[str, float]:
    """Share entries out by what has been counted.

    Args:
        synchronizer: One for which :func:`tails_are_counted`.
        bound: See :func:`~lightning_dct.gradients.tails.share_out_entries`.

    Returns:
        By what the density of each parameter is multiplied from now on. Tensors that were not counted keep what they
        had.

    Raises:
        RuntimeError: A synchronisation is under way.
    """
    tails, synchronizer.memory.tails = synchronizer.memory.tails, None
    assert tails is not None
    config, plans = synchronizer.config, synchronizer.plans
    parameters = {name: parameter for parameter, name in synchronizer.parameter_names.items()}
    counts = tails.counts.to(next(iter(parameters.values())).device)
    add_up(counts, synchronizer.exchange.everyone)
    rows = {name: row for name, row in zip(tails.names, counts.tolist(), strict=True) if row[0]}
    sizes = [real_numel(parameters[name]) for name in rows]
    densities = [config.density_of(name) for name in rows]
    targets = [target_of(density, size) for density, size in zip(densities, sizes, strict=True)]
    shares = share_out_entries(list(rows.values()), sizes, targets, BITS_PER_VALUE[config.value_format], bound)
    factors = plans.factors | {
        name: share / (density * size)
        for name, share, density, size in zip(rows, shares, densities, sizes, strict=True)
    }
    synchronizer.scale_densities(factors)
    return factors
