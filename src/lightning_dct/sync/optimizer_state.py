r"""Averages what optimizers have learnt about the size of gradients: the state that grows with
their square.

Adam's first moment is linear in the gradient. So the mean of the ranks' steps ``m_r / sqrt(v)`` is
Adam's step on the mean gradient if all ranks divide by the same ``v``, whatever their data. With a
``v_r`` of its own, a rank whose gradients are small, or of a few classes only, has an equal vote,
and training goes to another place. So ``v`` is averaged like the running statistics of a BatchNorm.
First moments stay the rank's own.

Ranks exchange the sums of rows and columns, as Adafactor (Shazeer and Stern, ICML 2018) keeps them.
They stand for

    A_ij  =  r_i c_j / t        r_i = sum over j of v_ij,   c_j = sum over i of v_ij,   t = sum of v
    v_ij  <-  v_ij  mean over ranks of A_ij / A_ij

which gives all ranks the same rows and columns, and leaves each the pattern within them. An entry
that is zero on this rank, because it has seen no gradient there, becomes the mean of ``A_ij``.
State of one dimension is averaged entry by entry.

If ranks draw from the same data, what their sums deviate by is noise. If not, they deviate in the
same direction again and again. The *persistence* of a rank, the correlation of its deviations
between one average and the next, tells one from the other: about 0, or 0.4 to 1. Where deviations
persist,

- the rank's own pattern gives way to that of ``A``, because patterns that differ make steps differ;
- half of what a rank will deviate by until the next average is taken in advance. Otherwise its
  steps would always be a little shorter where its gradients are large.
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
FIRST = 64
EVERY = 16
# Share of an exchange's bytes that the average takes, at most, but for the first ones.
SHARE = 0.04
# The weight of the latest correlation of deviations in their running mean.
WEIGHT = 0.25
# Deviations that persist less than the first are taken for noise, and those that persist more than
# the second for the ranks' data.
NOISE = 0.25
DATA = 0.4
# Deviations are turned around in this part. With 1 the noise in them would never fade.
TURNED = 0.8
# No further than so many times the mean, and its inverse.
FARTHEST = 4.0
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
    optimizer: Optimizer, parameters: Mapping[str, Tensor], keys: Mapping[Tensor, Iterable[str]]
) -> dict[str, Squares]:
    """All such state of some parameters of an optimizer, by its key and the parameter's name, in
    their order.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for key in keys.get(parameter, ()):
            value = state.get(key)
            values = local_of(value) if isinstance(value, Tensor) else None
            found[f"{key} {name}"] = Squares(values, _bias_of(state, groups[parameter]))
    return found


def _bias_of(state: Mapping[Any, Any], group: Mapping[str, Any]) -> float:
    """By how much a running mean that began at zero is too small; 1 if the state does not say
    so.
    """
    betas = group.get("betas")
    steps = state.get("step")
    if not isinstance(betas, (tuple, list)) or len(betas) < 2 or steps is None:
        return 1.0
    bias = 1.0 - float(betas[1]) ** float(steps)
    return bias if 0.0 < bias < 1.0 else 1.0


def sums_of(squares: Mapping[str, Squares], device: torch.device) -> list[Tensor]:
    """The sums of rows and columns of all squares of this rank: fp64, ``[sums]`` each."""
    return [_sums(one, _num_sums(*_shape_of(one.values)), device) for one in squares.values()]


def sums_as_bytes(sums: Sequence[Tensor]) -> Tensor:
    """Sums as ranks send them: uint8, two bytes each."""
    return torch.cat([*sums]).to(torch.bfloat16).view(torch.uint8)


def bytes_of_average(states: Iterable[Tensor], ranks: int) -> int:
    """What a rank sends when it averages states of these shapes."""
    return (ranks - 1) * sum(_NUM_BYTES * _num_sums(*_shape_of(state)) for state in states)


def may_be_averaged(step: int, length: int) -> bool:
    """Whether squares are averaged after a step if that takes few bytes; see :func:`is_averaged`."""
    return any(_is_early(one) or one % EVERY == 0 for one in _steps_made(step, length))


def is_averaged(step: int, length: int, bytes_of_average: float, bytes_of_step: float) -> bool:
    """Whether squares are averaged after an optimizer step (from 1 on), ``length`` steps after the
    last exchange.

    That is as often as ``SHARE`` of the bytes of all steps allows, every 16, 32, 64 steps and so
    on.
    """
    times = max(bytes_of_average / max(SHARE * bytes_of_step, 1.0) / EVERY, 1.0)
    every = EVERY * 2 ** math.ceil(math.log2(times))
    return any(_is_early(one) or one % every == 0 for one in _steps_made(step, length))


def _steps_made(step: int, length: int) -> range:
    """The steps since the last exchange."""
    return range(step - length + 1, step + 1)


def _is_early(step: int) -> bool:
    """Whether a step is one of the first 1, 2, 4, ... ones."""
    return step <= FIRST and step.bit_count() == 1


class Deviation(NamedTuple):
    """How the sums of one state on this rank deviate from the mean over ranks, in parts of the
    mean.

    Attributes:
        left: What the latest average has left: fp32, shape ``[sums]``.
        drift: What had come since the average before: fp32, shape ``[sums]``.
        persistence: The running mean of the correlation of one drift with the next.
    """

    left: Tensor
    drift: Tensor
    persistence: float


class SharedSquares:
    """Averages the squares of one optimizer, and knows how this rank has deviated.

    Attributes:
        deviations: By state, as :func:`squares_of` names it.
    """

    def __init__(self) -> None:
        self.deviations: dict[str, Deviation] = {}

    @property
    def persistence(self) -> float:
        """The mean of all states."""
        known = self.deviations.values()
        return sum(one.persistence for one in known) / len(known) if known else 0.0

    def average(self, squares: Mapping[str, Squares], everyone: Link, device: torch.device) -> None:
        """Give squares the means over all ranks of their rows and columns, in place; a collective
        call.

        A rank without a part of the state counts as one that has seen zeros. What is not finite on
        one rank stays as it is on all.
        """
        shapes = torch.tensor(
            [_shape_of(one.values) for one in squares.values()], dtype=torch.int64, device=device
        )
        all_reduce_max(shapes, everyone).wait()
        sizes = [_num_sums(*shape) for shape in shapes.tolist()]
        if not any(sizes):
            return
        sums = [_sums(one, size, device) for one, size in zip(squares.values(), sizes, strict=True)]
        work, gathered = all_gather_payload(sums_as_bytes(sums), everyone)
        work.wait()
        self.take(squares, sums, gathered, everyone.rank)

    def take(
        self, squares: Mapping[str, Squares], sums: Sequence[Tensor], gathered: Tensor, rank: int
    ) -> None:
        """Give squares the means over ranks of their rows and columns, in place.

        Args:
            squares: This rank's.
            sums: Of each, as :func:`sums_of` gives them.
            gathered: Those of all ranks, as :func:`sums_as_bytes` rounds them: uint8, ``[ranks,
                bytes]``.
            rank: This rank's row.
        """
        sizes = [len(one) for one in sums]
        of_all = gathered.view(torch.bfloat16).float().split(sizes, dim=1)
        is_finite = torch.stack([one.isfinite().all() for one in of_all]).tolist()
        given: dict[str, tuple[Squares, Tensor, Tensor]] = {}
        for (name, one), mine, of_ranks, finite in zip(
            squares.items(), sums, of_all, is_finite, strict=True
        ):
            if finite and one.values is not None:
                given[name] = one, mine.float(), of_ranks
        share = self._note(
            {name: _ratios(of_ranks, rank) for name, (_, _, of_ranks) in given.items()}
        )
        for one, mine, of_ranks in given.values():
            _give(one, mine, of_ranks, rank, share)

    def _note(self, ratios: Mapping[str, tuple[Tensor, Tensor]]) -> float:
        """Note how far sums deviate, before they become those of the mean, and how much of that
        persists.

        Args:
            ratios: By state, own sums in parts of the mean, and the mean.

        Returns:
            From 0, where deviations are noise, to 1.
        """
        correlated = {}
        drifts = {}
        for name, (ratio, mean) in ratios.items():
            before = self.deviations.get(name)
            drift = ratio - 1.0
            if before is not None and before.left.shape == ratio.shape:
                drift -= before.left.to(ratio.device)
                former = before.drift.to(ratio.device)
                pairs = (drift * former, drift.square(), former.square())
                correlated[name] = torch.stack([(pair * mean).sum() for pair in pairs])
            drifts[name] = drift
        found = torch.stack(list(correlated.values())).tolist() if correlated else []
        persistences = dict.fromkeys(ratios, 0.0)
        for name, (product, square, former_square) in zip(correlated, found, strict=True):
            size = math.sqrt(square * former_square)
            correlation = product / size if size > 0.0 else 0.0
            persistences[name] = (1 - WEIGHT) * self.deviations[
                name
            ].persistence + WEIGHT * correlation
        mean_of_all = sum(persistences.values()) / max(len(persistences), 1)
        share = min(max((mean_of_all - NOISE) / (DATA - NOISE), 0.0), 1.0)
        for name, (ratio, _) in ratios.items():
            self.deviations[name] = Deviation(
                _turned(ratio, share) - 1.0, drifts[name], persistences[name]
            )
        return share


def _ratios(of_ranks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The sums of one rank in parts of the mean over ranks, 1 where that is zero; and the mean."""
    mean = of_ranks.mean(0)
    return torch.where(mean > 0, of_ranks[rank] / mean, 1.0), mean


def _turned(ratios: Tensor, share: float) -> Tensor:
    """Where ratios of own sums to the mean are turned to: from 2 to about a half, if all of it
    persists.
    """
    turned = ratios.clamp(1 / FARTHEST, FARTHEST) ** (-TURNED * share)
    return torch.where(ratios > 0, turned, 1.0)


def _shape_of(state: Tensor | None) -> tuple[int, int]:
    """The rows and columns of a state; one with a single long dimension is one row."""
    if state is None:
        return 0, 0
    rows = state.shape[0] if state.dim() > 1 else 1
    return (rows, state.numel() // rows) if 1 < rows < state.numel() else (1, state.numel())


def _num_sums(rows: int, columns: int) -> int:
    return columns if rows <= 1 else rows + columns


def _sums(squares: Squares, size: int, device: torch.device) -> Tensor:
    """The sums of rows and then those of columns, or all values of a single row, over ``bias``:
    fp64, ``[size]``.
    """
    if squares.values is None:
        return torch.zeros(size, dtype=torch.float64, device=device)
    rows, columns = _shape_of(squares.values)
    matrix = squares.values.reshape(rows, columns)
    sums = [matrix.sum(dim, dtype=torch.float64) for dim in ((1, 0) if rows > 1 else (0,))]
    return torch.cat(sums) / squares.bias


def _give(squares: Squares, own: Tensor, of_ranks: Tensor, rank: int, share: float) -> None:
    """Give the squares of this rank the rows and columns of the mean over ranks, in place.

    Args:
        squares: With a state.
        own: Its sums, fp32: shape ``[sums]``.
        of_ranks: Those of all ranks, rounded alike, fp32: shape ``[ranks, sums]``.
        rank: The row of this rank.
        share: How much of the deviations persists.
    """
    values, bias = squares
    assert values is not None
    rows, columns = _shape_of(values)
    matrix = values.reshape(rows, columns).to(torch.promote_types(values.dtype, torch.float32))
    ratios, mean = _ratios(of_ranks, rank)
    turned = _turned(ratios, share)
    if rows == 1:
        scaled = matrix * torch.where(ratios > 0, turned / ratios, 1.0)
        values.copy_(torch.where(matrix > 0, scaled, mean * bias).view(values.shape))
        return
    parts = of_ranks.split([rows, columns], dim=1)
    means = _products(*parts).div_(len(of_ranks))
    rounded = _products(*(part[rank : rank + 1] for part in parts))
    of_rows, of_columns = turned.split([rows, columns])
    mean_of_rows = mean[:rows]
    of_whole = (of_rows * mean_of_rows).sum() / mean_of_rows.sum().clamp(
        min=torch.finfo(mean.dtype).tiny
    )
    means *= of_rows.unsqueeze(1) * of_columns / of_whole.clamp(min=1 / FARTHEST)
    pattern = matrix
    if share > 0:
        alike = _products(*(part.unsqueeze(0) for part in own.split([rows, columns]))) * bias
        pattern = matrix ** (1.0 - share) * alike**share
    scaled = pattern * torch.where(rounded > 0, means / rounded, 1.0)
    values.copy_(torch.where(matrix > 0, scaled, means * bias).view(values.shape))


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """The sum over ranks of ``A``: shape ``[rows, columns]``, from ``[ranks, rows]`` and ``[ranks,
    columns]``.
    """
    totals = rows.sum(1, keepdim=True)
    return torch.where(totals > 0, rows / totals, 0.0).T @ columns
