"""Clips gradients by a norm that spans several ranks, each with parameters that the others do not have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def clip_grad_norm(
    own: Iterable[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    shared: Iterable[Tensor] = (),
) -> Tensor:
    """Scale gradients so that the Euclidean norm of all of them, over all ranks of a group, is at most ``max_norm``.

    Every rank of the group calls this at the same time and scales by the same factor.

    Args:
        own: Parameters that are on this rank only: stages of a pipeline, rows of a sharded table. Those without a
            gradient do not count. Gradients may be sparse.
        max_norm: The largest norm allowed.
        group: The ranks whose own parameters make up the model; None for this rank alone.
        shared: Parameters that all ranks of the group have, with equal gradients. They count once.

    Returns:
        The norm before clipping, a scalar of fp32; the same on every rank.
    """
    own, shared = list(own), list(shared)
    own_gradients, shared_gradients = _gradients_of(own), _gradients_of(shared)
    # The parameters' device also on a rank without gradients: a collective wants the same kind of device from all. Of
    # other stages' parameters a pipeline's rank has no more than shapes.
    devices = (parameter.device for parameter in own + shared)
    device = next((device for device in devices if device.type != "meta"), _device_of(group))
    # Squares in fp64: the sum does not depend on how parameters are spread over ranks, but for its last bits.
    squares = _sum_of_squares(own_gradients, device)
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = (squares + _sum_of_squares(shared_gradients, device)).sqrt().to(torch.float32)
    # As torch.nn.utils.clip_grad_norm_ does it: without a branch, which would wait for a GPU.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in own_gradients + shared_gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device that a group's collectives work on: the CPU where they do."""
    devices = [torch.device("cpu")] if group is None else group._device_types
    return min(devices, key=lambda device: device.type != "cpu")


def _gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        # A sparse gradient may name a row twice; only their sum has the right norm.
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        total += torch.linalg.vector_norm(values, dtype=torch.float32).to(device, torch.float64).square()
    return total
