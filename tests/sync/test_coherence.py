"""How far gradients agree, and the gain on their mean: beside known coherence, and Adam on the mean
gradient.
"""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distributed.training import Module, fit, rank
from lightning_dct import DCTStrategy, law
from lightning_dct.compress.awaited import Awaited
from lightning_dct.exchange.collectives import Link
from lightning_dct.sync.coherence import (
    LEAST,
    Coherence,
    Sample,
    coherence_of_all,
    is_measured,
    places_of,
    sample_of,
    sample_of_gradient,
    shape_of,
    squares_over_ranks,
    weight_of,
)
from lightning_dct.traffic import Traffic
from strategies_for_hypothesis import examples

BETA = 0.999


def link() -> Link:
    return Link(torch.distributed.distributed_c10d._get_default_group(), Traffic())


def gradients(step: int, ranks: int, shape: tuple[int, int], cosine: Tensor) -> list[Tensor]:
    """Of unit variance, of which a part is common: ``E <g_r, g_s> = cosine`` in each row."""
    made = torch.Generator().manual_seed(step)
    common, *own = (torch.randn(shape, generator=made) for _ in range(ranks + 1))
    return [cosine.sqrt() * common + (1 - cosine).sqrt() * one for one in own]


def compared(ranks_: int, cosines: list[float], steps: int) -> tuple[list[float], float, int]:
    """The gains of rows after some steps, and of a tensor of one dimension that is alike on all
    ranks.
    """
    known = Coherence()
    awaited = Awaited()
    everyone = link()
    cosine = torch.tensor(cosines).repeat_interleave(4).unsqueeze(1)
    for step in filter(is_measured, range(1, steps + 1)):
        known.begin(step, {})
        own = gradients(step, ranks_, (4 * len(cosines), 200), cosine)[rank()]
        alike = torch.full((5,), 0.5 + step)
        samples = {"matrix": own, "scalars": alike}
        known.measure(
            {
                name: Sample(sample_of(one, step), shape_of(one), BETA)
                for name, one in samples.items()
            },
            everyone,
            awaited,
        )
        awaited.synchronize()
    gains = known.gains()
    rows, columns = gains["matrix"]
    mean = rows.view(len(cosines), 4).mean(1) * columns.mean()
    return mean.tolist(), float(gains["scalars"].rows[0]), len(known.tensors)


@pytest.mark.parametrize(("ranks_", "cosines"), [(2, [0.0, 1.0]), (4, [0.0, 0.3, 1.0])])
def test_ranks_find_the_gain_of_each_row(ranks: Any, ranks_: int, cosines: list[float]) -> None:
    """Oracle: the cosines that gradients were made with; what all ranks have alike is not
    lengthened.
    """
    found = ranks(ranks_).run(compared, ranks_, cosines, 2000)
    assert found == [found[0]] * ranks_
    expected = [math.sqrt(ranks_ / (1 + (ranks_ - 1) * cosine)) for cosine in cosines]
    assert found[0][0] == pytest.approx(expected, rel=0.12)
    assert found[0][1] == pytest.approx(1.0, abs=0.01)


def test_the_gain_is_that_of_adam_on_the_mean_gradient() -> None:
    """Oracle: second moments of the ranks' gradients and of their mean, in the plainest way;
    coherence that falls.
    """
    ranks = 4
    shape = (3, 400)
    of_ranks = torch.zeros(shape)
    of_mean = torch.zeros(shape)
    known = Coherence()
    for step in range(1, 401):
        cosine = torch.full((3, 1), max(0.0, 1 - step / 50))
        every = [one * (2.0 if step < 50 else 1.0) for one in gradients(step, ranks, shape, cosine)]
        of_ranks = BETA * of_ranks + torch.stack(every).square().mean(0)
        of_mean = BETA * of_mean + torch.stack(every).mean(0).square()
        if is_measured(step):
            known.begin(step, {})
            samples = [sample_of(one, step) for one in every]
            results = squares_over_ranks([one.bfloat16() for one in samples])
            with patch("lightning_dct.sync.coherence.measure_all", return_value=results):
                known.measure(
                    {"w": Sample(samples[0], shape, BETA)}, Ranks(ranks), (awaited := Awaited())
                )  # type: ignore[arg-type]
                awaited.synchronize()
    expected = (of_ranks.sum() / of_mean.sum()).sqrt()
    assert expected < 1.7  # the ranks' noise alone would be 2
    rows, columns = known.gains()["w"]
    assert float((rows[:, None] * columns).mean()) == pytest.approx(float(expected), rel=0.1)


class Ranks:
    """A link without a group."""

    def __init__(self, size: int) -> None:
        self.size = size


def test_opposed_gradients_have_a_longer_mean_within_a_bound() -> None:
    same = torch.ones(1, 10)
    assert coherence_of_all(torch.cat([same, same])) == 2.0
    assert coherence_of_all(torch.cat([same, -0.5 * same])) == LEAST
    assert coherence_of_all(torch.zeros(2, 10)) is None
    assert coherence_of_all(torch.cat([same, math.inf * same])) is None


@given(rows=st.integers(1, 300), width=st.integers(1, 300))
@examples(60)
def test_samples_are_small_and_take_all_rows_and_columns(rows: int, width: int) -> None:
    shape = (rows, width)
    seen = set()
    for step in range(1, 1200):
        start, stride = places_of(shape, step)
        places = range(start, rows * width, stride)
        assert len(places) <= max(64 * 2, rows * width / 63 + 1, rows + 1)
        seen |= {place % width for place in places} if rows > 1 else set()
    assert rows == 1 or rows * width < 128 or len(seen) > 0.9 * width


@given(data=st.data(), rows=st.integers(1, 40), width=st.integers(1, 9), step=st.integers(1, 99))
@examples(60)
def test_a_sparse_gradient_is_sampled_as_a_dense_one(
    data: st.DataObject, rows: int, width: int, step: int
) -> None:
    """Oracle: the dense gradient."""
    chosen = data.draw(st.lists(st.integers(0, rows - 1), max_size=12))
    values = torch.randn(len(chosen), width)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([chosen], dtype=torch.int64), values, (rows, width)
    )
    assert torch.equal(sample_of_gradient(sparse, step), sample_of(sparse.to_dense(), step))


def test_when_it_is_measured_and_what_a_measurement_weighs() -> None:
    assert [step for step in range(1, 100) if is_measured(step)] == [
        *range(1, 17),
        *range(20, 65, 4),
        80,
        96,
    ]
    assert [weight_of(step, None) for step in (1, 2, 96)] == [1.0, 0.25, 0.25]
    assert weight_of(10, 1.0) == 0.1
    assert weight_of(4, 0.5) == 0.25  # one measurement is noise
    assert weight_of(96, BETA) == pytest.approx((1 - BETA**16) / (1 - BETA**96))


def rounds_of_a_run(
    settings: dict[str, Any], optimizer: str = "Adam"
) -> tuple[list[str], bool, list[float]]:
    strategy = DCTStrategy(**{"density": 0.2, "min_tensor_size": 8, **settings})
    fit(strategy, Module(None, getattr(torch.optim, optimizer), lr=0.01), 40)
    (clock,) = strategy.updates._clocks.values()
    decision = strategy.updates._decide(clock, clock.steps)
    gains = decision.gains(clock.coherence)
    rows = [] if not gains else torch.cat([gain.rows for gain in gains.values()]).tolist()
    is_by_senders = decision.gain(clock.coherence) is None
    return sorted(clock.coherence.tensors), is_by_senders, rows


def test_steps_apart_are_averaged_without_it(ranks: Any) -> None:
    """Oracle: no measurement with several steps apart, a delay or SGD; else gains, alike on all
    ranks, dense too.
    """
    for settings in ({"local_steps": 4}, {"local_steps": 1, "overlap_steps": 1}):
        assert ranks(2).run(rounds_of_a_run, settings) == [([], True, [])] * 2
    assert ranks(2).run(rounds_of_a_run, {"local_steps": 1}, "SGD") == [([], False, [])] * 2
    for settings in ({"local_steps": 1}, {"local_steps": 1, "density": 1.0}):
        first, second = ranks(2).run(rounds_of_a_run, settings)
        assert first == second
        assert len(first[0]) == len(list(Module().parameters()))
        assert 1.0 < max(first[2]) < 2 * 2**0.5


def measured_in_a_long_run() -> list[int]:
    with patch.object(law, "LONG", 50), patch.object(Coherence, "begin", autospec=True) as begin:
        fit(
            DCTStrategy(density=0.2, min_tensor_size=8, local_steps=1),
            Module(None, torch.optim.Adam, lr=0.01),
            50,
        )
    return [step for (_, step, _), _ in begin.call_args_list]


def test_the_plain_end_of_a_long_run_needs_no_coherence(ranks: Any) -> None:
    """Oracle: by hand; steps 46 to 50 are the last tenth, and 48 would be measured."""
    expected = [*range(1, 17), *range(20, 45, 4)]
    assert ranks(2).run(measured_in_a_long_run) == [expected] * 2


class Late(Awaited):
    """A device whose numbers arrive only when they are waited for."""

    def poll(self) -> None:
        pass

    def synchronize(self) -> None:
        super().poll()  # copies
        super().poll()  # delivers


def late() -> list[float]:
    known = Coherence()
    awaited = Late()
    gains = []
    for step in range(1, 5):
        known.begin(step, {"w": torch.zeros(64)})
        moved = known.moved("w", torch.ones(64) * (1 if rank() else -1))
        assert moved is not None
        known.measure({"w": Sample(moved, (1, 64))}, link(), awaited)
        gains.append(float(known.gains()["w"].rows[0]) if known.gains() else 1.0)
    return gains


def test_a_measurement_counts_from_the_next_one_on(ranks: Any) -> None:
    """Oracle: opposed steps have the least coherence."""
    first, second = ranks(2).run(late)
    assert first == second == [1.0, *3 * [math.sqrt(2 / LEAST)]]
