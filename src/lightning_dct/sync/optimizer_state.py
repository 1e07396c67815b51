r"""Averages what optimizers have learnt about the size of gradients: the state that grows with their square.

    r_i = sum over j of v_ij,   c_j = sum over i of v_ij,   t = sum of v          of each rank
    v_ij  <-  v_ij  (R_i / r_i)  (C_j / c_j)  /  (T / t)                          R, C, T: means over ranks

Adam's first moment is linear in the gradient. So the mean of the ranks' steps ``m_r / sqrt(v)`` is Adam's step on the
mean gradient if all ranks divide by the same ``v``, whatever their data. With a ``v_r`` of its own, a rank whose
gradients are small, or of a few classes only, has an equal vote, and training goes to another place. So ``v`` is
averaged like the running statistics of a BatchNorm. First moments stay the rank's own.

Ranks exchange only the sums of rows and columns, as Adafactor (Shazeer and Stern, ICML 2018) keeps them. What differs
between ranks lies there: the rows of a class, of a word, of an expert. Within these a rank keeps its own pattern, and
where ranks are alike nothing changes. An entry that is zero on this rank, because it has seen no gradient there, becomes
``R_i C_j / T``. State of one dimension is averaged entry by entry.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.exchange.collectives import Link, all_gather_payload, all_reduce_max

# Averaged after 1, 2, 4, ... steps at first, and then at most once in so many steps.
FIRST, EVERY = 64, 16
# Share of an exchange's bytes that the average takes, at most, but for the first ones.
SHARE = 0.04
_NUM_BYTES = 2


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


def bytes_of_average(states: Iterable[Tensor], ranks: int) -> int:
    """What a rank sends when it averages states of these shapes."""
    return (ranks - 1) * sum(_NUM_BYTES * _num_sums(*_shape_of(state)) for state in states)


def is_averaged(step: int, length: int, bytes_of_average: float, bytes_of_step: float) -> bool:
    """Whether squares are averaged after an optimizer step (from 1 on), ``length`` steps after the last exchange.

    That is as often as ``SHARE`` of the bytes of all steps allows, every 16, 32, 64 steps and so on.
    """
    times = max(bytes_of_average / max(SHARE * bytes_of_step, 1.0) / EVERY, 1.0)
    every = EVERY * 2 ** math.ceil(math.log2(times))
    made = range(step - length + 1, step + 1)
    return any((one <= FIRST and one.bit_count() == 1) or one % every == 0 for one in made)


def average(squares: Sequence[Squares], everyone: Link, device: torch.device) -> None:
    """Give squares the means over all ranks of their rows and columns, in place; a collective call.

    A rank without a part of the state counts as one that has seen zeros. What is not finite on one rank stays as it is
    on all.
    """
    shapes = torch.tensor([_shape_of(one.values) for one in squares], dtype=torch.int64, device=device)
    all_reduce_max(shapes, everyone).wait()
    sizes = [_num_sums(*shape) for shape in shapes.tolist()]
    if not any(sizes):
        return
    own = torch.cat([_sums(one, size, device) for one, size in zip(squares, sizes, strict=True)]).to(torch.bfloat16)
    work, gathered = all_gather_payload(own.view(torch.uint8), everyone)
    work.wait()
    means = gathered.view(torch.bfloat16).double().mean(0)
    for one, mine, mean in zip(squares, own.double().split(sizes), means.split(sizes), strict=True):
        if one.values is not None:
            _set_sums(one.values, mine, mean, one.bias)


def _shape_of(state: Tensor | None) -> tuple[int, int]:
    """The rows and columns of a state; one with a single long dimension is one row."""
    if state is None:
        return 0, 0
    rows = state.shape[0] if state.dim() > 1 else 1
    return (rows, state.numel() // rows) if 1 < rows < state.numel() else (1, state.numel())


def _num_sums(rows: int, columns: int) -> int:
    return columns if rows <= 1 else rows + columns


def _sums(squares: Squares, size: int, device: torch.device) -> Tensor:
    """The sums of rows and then those of columns, or all values of a single row: fp64, ``size`` numbers."""
    if squares.values is None:
        return torch.zeros(size, dtype=torch.float64, device=device)
    rows, columns = _shape_of(squares.values)
    matrix = squares.values.reshape(rows, columns)
    sums = [matrix.sum(dim, dtype=torch.float64) for dim in ((1, 0) if rows > 1 else (0,))]
    return torch.cat(sums) / squares.bias


def _set_sums(values: Tensor, own: Tensor, mean: Tensor, bias: float) -> None:
    """Scale the rows and columns of values, which have sums ``own``, to those of ``mean``."""
    rows, columns = _shape_of(values)
    is_finite = mean.isfinite().all()
    factors = torch.where((own > 0) & is_finite, mean / own, 1.0).to(torch.float32)
    mean = mean.nan_to_num(0.0, 0.0, 0.0) * bias * is_finite
    matrix = values.reshape(rows, columns)
    if rows == 1:
        scaled, unseen = matrix * factors, mean
    else:
        of_rows, of_columns = factors.split([rows, columns])
        mean_of_rows, mean_of_columns = mean.split([rows, columns])
        own_total, total = own[:rows].sum(), mean_of_rows.sum()
        of_whole = torch.where((own_total > 0) & (total > 0), own_total * bias / total, 1.0).to(torch.float32)
        scaled = matrix * (of_rows * of_whole).unsqueeze(1) * of_columns
        per_total = torch.where(total > 0, mean_of_rows / total, 0.0)
        unseen = per_total.to(torch.float32).unsqueeze(1) * mean_of_columns.to(torch.float32)
    values.copy_(torch.where(matrix > 0, scaled, unseen).view(values.shape))
