"""Second moments are averaged over ranks: beside the plain mean, on real ranks, and in trainings whose data differ."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from distributed.training import rank
from lightning_dct.exchange.collectives import Link
from lightning_dct.sync.optimizer_state import Squares, average, is_averaged, squares_of
from lightning_dct.sync.optimizer_trial import try_out
from lightning_dct.traffic import Traffic

RANKS = 3


def values_of(number: int) -> torch.Tensor:
    """Over forty octaves."""
    made = torch.Generator().manual_seed(number)
    return (torch.randn(500, generator=made) * 6).exp2()


def averaged() -> tuple[list[float], list[float], float, list[float], bool]:
    everyone = Link(torch.distributed.distributed_c10d._get_default_group(), Traffic())
    own = values_of(rank()).view(20, 25)
    own[0, 0] = 0.0
    # Rank 2 has stepped it once, the others often: as much per step.
    bias = 1 - 0.9 ** (1 if rank() == 2 else 40)
    late = torch.full((4,), 3.0 * bias)
    rare = torch.full((7,), 6.0)
    broken = torch.full((2,), math.inf if rank() == 1 else 1.0)
    given = [
        Squares(own, 1.0),
        Squares(late, bias),
        Squares(rare if rank() == 0 else None, 1.0),
        Squares(broken, 1.0),
    ]
    average(given, everyone, torch.device("cpu"))
    return own.flatten().tolist(), (late / bias).tolist(), float(rare[0]), broken.tolist(), bool(own[0, 0] == 0.0)


def test_the_mean_of_all_ranks_takes_the_place_of_each(ranks: Any) -> None:
    """Oracle: the plain mean, and codes 15% apart, twice. No state counts as zero; infinite and zero ones stay."""
    found = ranks(RANKS).run(averaged)
    expected = torch.stack([values_of(number) for number in range(RANKS)]).mean(0)
    for number, (own, late, rare, broken, stays_zero) in enumerate(found):
        assert own == found[0][0]
        assert own[1:] == pytest.approx(expected[1:].tolist(), rel=0.15)
        assert late == pytest.approx([3.0] * 4, rel=0.1)
        assert rare == (pytest.approx(2.0, rel=0.12) if number == 0 else 6.0)
        assert broken == ([math.inf] * 2 if number == 1 else [1.0] * 2)
        assert stays_zero


def test_how_often_follows_the_bytes() -> None:
    """Oracle: by hand. Four percent of a step's bytes: 64 steps of 1,000 bytes have 2,560 to spare."""
    assert [step for step in range(1, 400) if is_averaged(step, 1, 2_500, 1_000)] == [4, 16, *range(64, 400, 64)]
    assert [step for step in range(1, 400) if is_averaged(step, 1, 2_600, 1_000)] == [4, 16, 64, 128, 256, 384]
    assert [step for step in range(5, 200, 5) if is_averaged(step, 5, 2_500, 1_000)] == [5, 20, 65, 130, 195]


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
def test_a_trial_finds_squares_of_gradients_and_their_memory(kind: str, expected: dict[str, float] | None) -> None:
    """Oracle: torch's documentation of each."""
    weights = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(3))]
    optimizer = getattr(torch.optim, kind)(weights, lr=0.01)
    trial = try_out(optimizer)
    assert trial.squares == (() if expected is None else (expected,))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = squares_of(optimizer, weights, trial.squares_by_parameter(optimizer))
    assert len(found) == 2 * len(expected or {})
    if kind == "AdamW":
        assert [one.bias for one in found] == [pytest.approx(0.001)] * 2


def test_a_variance_around_another_mean_is_no_square_that_may_be_replaced() -> None:
    """Centred RMSprop subtracts the square of its own mean gradient: another ``square_avg`` would give NaN."""
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.ones(6, 5))], centered=True)
    assert try_out(optimizer).squares == ({},)


def test_factors_of_adafactor_are_squares() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5))])
    assert set(try_out(optimizer).squares[0]) == {"row_var", "col_var", "variance"}
