"""Clips gradients by their norm over several ranks: with different parameters, or by the norm of
the ranks' mean.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def install_clipping(
    precision: Any, group: dist.ProcessGroup | None, is_own: Callable[[Tensor], bool]
) -> None:
    """Make a precision plugin clip by the norm over the own parameters of a group's ranks and the
    shared ones.

    If ranks clipped by their own norms, replicas would differ. Lightning clips in the precision
    plugin, so this replaces two methods of that one object.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        parameters: list[Tensor] = list(precision.main_params(optimizer))
        shared = [parameter for parameter in parameters if not is_own(parameter)]
        clip_grad_norm(filter(is_own, parameters), float(clip_val), group, shared)

    @torch.no_grad()
    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        for parameter in (one for one in precision.main_params(optimizer) if one.grad is not None):
            if parameter.grad.is_sparse:  # and may contain a row twice, of which the sum is clipped
                parameter.grad = parameter.grad.coalesce()
            (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).clamp_(
                -clip_val, clip_val
            )

    precision.clip_grad_by_norm = clip_grad_by_norm
    precision.clip_grad_by_value = clip_grad_by_value


def install_clipping_of_mean(
    precision: Any, norm_of_mean: Callable[[Iterable[Tensor]], Tensor]
) -> None:
    """Make a precision plugin clip by the norm of the ranks' mean gradient, as under
    DistributedDataParallel.

    Each rank trains with its own gradients, which are longer than their mean, so their own norm
    would clip too much. ``norm_of_mean`` gives the norm for some parameters.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clip_by_norm_of_mean(precision.main_params(optimizer), float(clip_val), norm_of_mean)

    precision.clip_grad_by_norm = clip_grad_by_norm


def clip_by_norm_of_mean(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_of_mean: Callable[[Iterable[Tensor]], Tensor],
) -> Tensor:
    """Scale this rank's gradients by what brings the norm of the ranks' mean to ``max_norm``;
    return that norm.
    """
    own = list(parameters)
    norm = norm_of_mean(own)
    # In a loop, because sparse gradients have no `foreach`.
    torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach=False)
    return norm


def remove_clipping(precision: Any) -> None:
    """Undo both, so that the plugin holds no reference to a group."""
    for method in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(precision).pop(method, None)


def clip_grad_norm(
    own: Iterable[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    shared: Iterable[Tensor] = (),
) -> Tensor:
    """Scale gradients so that the Euclidean norm of all of them, over all ranks of a group, is at
    most ``max_norm``.

    A collective call. Every rank scales by the same factor, if the shared gradients are equal on
    all ranks. With updates they are each rank's own, and so is the factor.

    Args:
        own: Parameters on this rank only: stages of a pipeline, rows of a sharded table. Gradients
            may be sparse.
        max_norm: The largest norm allowed.
        group: The ranks that together have the model; None for this rank alone.
        shared: Parameters that all ranks have. This rank's gradients of them count once.

    Returns:
        The norm before clipping, a scalar of fp32; the same on every rank.
    """
    own = list(own)
    shared = list(shared)
    # A collective needs the same kind of device on all ranks, including ranks without gradients.
    # Parameters of other pipeline stages are on the meta device.
    devices = (parameter.device for parameter in own + shared)
    supported = [torch.device("cpu")] if group is None else group._device_types
    some_device = min(supported, key=lambda device: device.type != "cpu")
    device = next((device for device in devices if device.type != "meta"), some_device)
    # In fp64, so that the sum hardly depends on the distribution of parameters over ranks.
    squares = _sum_of_squares(own, device)
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = (squares + _sum_of_squares(shared, device)).sqrt().to(torch.float32)
    # In a loop, because sparse gradients have no `foreach`.
    torch.nn.utils.clip_grads_with_norm_(own + shared, max_norm, norm, foreach=False)
    return norm


def _sum_of_squares(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """The squares of all gradients, in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        # A sparse gradient may contain a row twice; only their sum has the right norm.
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        dtype = torch.promote_types(values.dtype, torch.float32)
        total += torch.linalg.vector_norm(values, dtype=dtype).to(device, torch.float64).square()
    return total
