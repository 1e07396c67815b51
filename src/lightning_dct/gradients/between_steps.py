"""What levers do to what the ranks hold between two optimizer steps: collective calls, all ranks together."""

from __future__ import annotations

from lightning_dct.gradients.collectives import add_up
from lightning_dct.gradients.hook import GradientSynchronizer
from lightning_dct.gradients.plan import real_dtype, real_numel


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
        plan = synchronizer.plans.of((name,), (size,), real_dtype(parameter))
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
