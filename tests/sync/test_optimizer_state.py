"""Second moments are averaged over ranks: beside the plain mean, on real ranks, and in trainings
whose data differ.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from distributed.training import rank
from lightning_dct.exchange.collectives import Link
from lightning_dct.sync.optimizer_state import SharedSquares, Squares, is_averaged, squares_of
from lightning_dct.sync.optimizer_trial import try_out
from lightning_dct.traffic import Traffic

RANKS = 3


def values_of(number: int) -> torch.Tensor:
    """Over twenty octaves; the first rank has seen no gradient in one row, in one column, and in an
    entry besides.
    """
    made = torch.Generator().manual_seed(number)
    values = (torch.randn(20, 25, generator=made) * 3).exp2()
    if number == 0:
        values[3] = 0.0
        values[:, 4] = 0.0
        values[7, 9] = 0.0
    values[11] = 0.0  # on no rank
    return values


def averaged() -> dict[str, list[float]]:
    everyone = Link(torch.distributed.distributed_c10d._get_default_group(), Traffic())
    # Rank 2 has stepped it once, the others often: as much per step.
    bias = 1 - 0.9 ** (1 if rank() == 2 else 40)
    given = {
        "matrix": Squares(values_of(rank()), 1.0),
        "late": Squares(torch.full((4, 3), 3.0 * bias), bias),
        "rare": Squares(torch.full((7, 2), 6.0) if rank() == 0 else None, 1.0),
        "vector": Squares(torch.tensor([1.0, 0.0, 2.0 * rank()]), 1.0),
        "broken": Squares(torch.full((2, 2), math.inf if rank() == 1 else 1.0), 1.0),
        "alike": Squares(values_of(1), 1.0),
        "image": Squares(
            torch.rand(4, 3, 5, 5).add_(rank()).to(memory_format=torch.channels_last), 1.0
        ),
    }
    SharedSquares().average(given, everyone, torch.device("cpu"))
    assert given["image"].values.is_contiguous(memory_format=torch.channels_last)
    given["late"].values.div_(bias)
    return {
        name: [] if one.values is None else one.values.flatten().tolist()
        for name, one in given.items()
    }


def expected_matrix(own: torch.Tensor, of_all: list[torch.Tensor]) -> torch.Tensor:
    """The equation of the module, entry by entry."""

    def product(values: torch.Tensor, i: int, j: int) -> float:
        return float(values[i].sum() * values[:, j].sum() / values.sum())

    expected = torch.zeros_like(own)
    for i in range(own.shape[0]):
        for j in range(own.shape[1]):
            mean = sum(product(one, i, j) for one in of_all) / len(of_all)
            expected[i, j] = own[i, j] * mean / product(own, i, j) if own[i, j] > 0 else mean
    return expected


def test_rows_and_columns_get_the_means_of_all_ranks(ranks: Any) -> None:
    """Oracle: the equation, entry by entry; bf16 rounds each sum by 0.4%."""
    found = ranks(RANKS).run(averaged)
    of_all = [values_of(number) for number in range(RANKS)]
    for number, after in enumerate(found):
        expected = expected_matrix(of_all[number], of_all).flatten().tolist()
        assert after["matrix"] == pytest.approx(expected, rel=0.02)
        assert after["late"] == pytest.approx([3.0] * 12, rel=0.01)
        assert after["rare"] == (pytest.approx([2.0] * 14, rel=0.01) if number == 0 else [])
        assert after["vector"] == pytest.approx([1.0, 0.0, 2.0], rel=0.01)
        assert after["broken"] == [math.inf if number == 1 else 1.0] * 4
        assert after["alike"] == pytest.approx(values_of(1).flatten().tolist(), rel=1e-6)


def test_how_often_follows_the_bytes() -> None:
    """Oracle: by hand.

    Four percent of a step's bytes: 16 steps of 1,000 bytes have 640 to spare.
    """
    first = [1, 2, 4, 8, 16, 32]
    assert [step for step in range(1, 150) if is_averaged(step, 1, 630, 1_000)] == [
        *first,
        *range(48, 150, 16),
    ]
    assert [step for step in range(1, 400) if is_averaged(step, 1, 2_600, 1_000)] == [
        *first,
        64,
        128,
        256,
        384,
    ]
    assert [step for step in range(5, 70, 5) if is_averaged(step, 5, 630, 1_000)] == [
        5,
        10,
        20,
        35,
        50,
        65,
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("AdamW", {"exp_avg_sq": 0.999}),
        ("RMSprop", {"square_avg": 0.99}),
        ("Adagrad", {"sum": 1.0}),
        ("Adamax", {}),
        ("SGD", None),
    ],
)
def test_a_trial_finds_squares_of_gradients_and_their_memory(
    kind: str, expected: dict[str, float] | None
) -> None:
    """Oracle: torch's documentation of each."""
    weights = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(3))]
    optimizer = getattr(torch.optim, kind)(weights, lr=0.01)
    trial = try_out(optimizer)
    assert trial.squares == (() if expected is None else (expected,))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    named = {str(number): weight for number, weight in enumerate(weights)}
    found = squares_of(optimizer, named, trial.squares_by_parameter(optimizer))
    assert len(found) == 2 * len(expected or {})
    if kind == "AdamW":
        assert [one.bias for one in found.values()] == [pytest.approx(0.001)] * 2


def test_a_variance_around_another_mean_is_no_square_that_may_be_replaced() -> None:
    """Centred RMSprop subtracts the square of its own mean gradient: another ``square_avg`` would
    give NaN.
    """
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.ones(6, 5))], centered=True)
    assert try_out(optimizer).squares == ({},)


def test_factors_of_adafactor_are_squares() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5))])
    assert set(try_out(optimizer).squares[0]) == {"row_var", "col_var", "variance"}
