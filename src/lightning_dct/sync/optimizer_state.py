"""Averages what optimizers have learnt about the size of gradients: the state that grows with their square.

    v_r  <-  mean over ranks of v        every so many steps

Adam's first moment is linear in the gradient. So the mean of the ranks' steps ``m_r / sqrt(v)`` is Adam's step on the
mean gradient if all ranks divide by the same ``v``, whatever their data. With a ``v_r`` of its own, a rank whose
gradients are small, or of a few classes only, has an equal vote, and training goes to another place. So ``v`` is
averaged like the running statistics of a BatchNorm. First moments stay the rank's own.

Values travel as logarithms in one byte each, to the rank that owns a part of them, and back as a mean. Bias corrections
are undone before and done again afterwards: a rank that has stepped a parameter less often than the others has another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.exchange.collectives import Link, all_reduce_max, all_to_all, spread_payload

# Codes of one byte: 0 is zero, and each next one is larger by 2 ** (1 / STEPS). The last one stands for the largest
# value of all ranks, and the first one is 50 octaves below.
CODES, STEPS = 256, 5
# Averaged after so many steps at first, and then never more often than the last of them.
FIRST = (4, 16, 64)
# Share of an exchange's bytes that the average takes, at most.
SHARE = 0.04


class Squares(NamedTuple):
    """A part of the state of a parameter on this rank.

    Attributes:
        values: The state itself, of any shape, to be written in place; None if this rank has none.
        bias: What has to divide them, because they began at zero.
    """

    values: Tensor | None
    bias: float


def squares_of(
    optimizer: Optimizer, parameters: Iterable[Tensor], keys: Mapping[Tensor, Iterable[str]]
) -> list[Squares]:
    """All such state of some parameters of an optimizer, in their order."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for key in keys.get(parameter, ()):
            value = state.get(key)
            values = local_of(value) if isinstance(value, Tensor) else None
            found.append(Squares(values, _bias_of(state, groups[parameter])))
    return found


def _bias_of(state: Mapping[Any, Any], group: Mapping[str, Any]) -> float:
    """By how much a running mean that began at zero is too small; 1 if the state does not say so."""
    betas, steps = group.get("betas"), state.get("step")
    if not isinstance(betas, (tuple, list)) or len(betas) < 2 or steps is None:
        return 1.0
    bias = 1.0 - float(betas[1]) ** float(steps)
    return bias if 0.0 < bias < 1.0 else 1.0


def is_averaged(step: int, length: int, bytes_of_average: float, bytes_of_step: float) -> bool:
    """Whether squares are averaged after an optimizer step (from 1 on), ``length`` steps after the last exchange.

    That is as often as ``SHARE`` of the bytes of all steps allows, every 64, 128, 256 steps and so on.
    """
    times = max(bytes_of_average / max(SHARE * bytes_of_step, 1.0) / FIRST[-1], 1.0)
    every = FIRST[-1] * 2 ** math.ceil(math.log2(times))
    return any(one in FIRST or one % every == 0 for one in range(step - length + 1, step + 1))


def average(squares: Sequence[Squares], everyone: Link, device: torch.device) -> None:
    """Replace squares by their mean over all ranks, in place; a collective call.

    A rank without a part of the state counts as one that has seen zeros. What is zero on all ranks, or not finite on
    one, stays as it is.
    """
    given = [None if one.values is None else one.values.double() / one.bias for one in squares]
    sizes = [0 if values is None else values.numel() for values in given]
    largest = [0.0 if values is None or not values.numel() else float(values.max()) for values in given]
    agreed = torch.tensor([*map(float, sizes), *largest], dtype=torch.float64, device=device)
    all_reduce_max(agreed, everyone).wait()
    sizes_of_all, largest_of_all = (part.tolist() for part in agreed.split(len(squares)))
    if not any(sizes_of_all):
        return
    codes = [
        _encoded(torch.zeros(int(size), dtype=torch.float64, device=device) if values is None else values, most)
        for values, size, most in zip(given, sizes_of_all, largest_of_all, strict=True)
    ]
    means = _mean_of(torch.cat(codes), everyone).split([int(size) for size in sizes_of_all])
    for one, mean, most in zip(squares, means, largest_of_all, strict=True):
        if one.values is not None and math.isfinite(most):
            decoded = _decoded(mean).mul_(most * one.bias).view(one.values.shape).to(one.values.dtype)
            one.values.copy_(torch.where(decoded > 0, decoded, one.values))


def _encoded(values: Tensor, most: float) -> Tensor:
    """The codes of values (fp64) of which the largest of all ranks is ``most``: shape ``[n]``, uint8."""
    octaves = (values.reshape(-1) / (most or 1.0)).log2()
    codes = (octaves * STEPS).round().add_(CODES - 1).nan_to_num_(0.0, CODES - 1, 0.0).clamp_(1, CODES - 1)
    return torch.where(values.reshape(-1) > 0, codes, 0.0).to(torch.uint8)


def _decoded(codes: Tensor) -> Tensor:
    """The values of codes, in parts of the largest: fp64."""
    steps = torch.arange(CODES, dtype=torch.float64, device=codes.device).sub_(CODES - 1).div_(STEPS)
    table = steps.exp2()
    table[0] = 0.0
    return table[codes.long()]


def _mean_of(codes: Tensor, everyone: Link) -> Tensor:
    """The codes of the mean over ranks: each rank averages its part and sends that to all; a collective call."""
    ranks, count = everyone.size, codes.numel()
    part = -(-count // ranks)
    sent = torch.cat([codes, codes.new_zeros(part * ranks - count)])
    work, received = all_to_all(sent, ranks * [part], ranks * [part], everyone)
    work.wait()
    mean = _decoded(received.view(ranks, part)).mean(0)
    work, spread = spread_payload(_encoded(mean, 1.0), ranks * [part], everyone)
    work.wait()
    return spread[:count]
