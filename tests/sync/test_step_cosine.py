"""The cosine between ranks' steps and the factor on their mean: against steps with a known cosine, on real ranks."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distributed.training import Module, fit, rank
from lightning_dct import DCTStrategy, law
from lightning_dct.compress.awaited import Awaited
from lightning_dct.exchange.collectives import Link
from lightning_dct.sync.step_cosine import (
    ENTRIES,
    SMALLEST_STRIDE,
    WHOLE,
    StepCosine,
    cosine_of,
    is_measured,
    sample_of,
)
from lightning_dct.traffic import Traffic


def link() -> Link:
    return Link(torch.distributed.distributed_c10d._get_default_group(), Traffic())


def steps_with(cosine: float, ranks: int, size: int) -> list[Tensor]:
    """Random steps of unit variance, of which a part is common: ``E <q_r, q_s> = cosine``."""
    made = torch.Generator().manual_seed(5)
    common, *own = (torch.randn(size, generator=made) for _ in range(ranks + 1))
    return [math.sqrt(cosine) * common + math.sqrt(1 - cosine) * one for one in own]


def measured(cosine: float, size: int) -> tuple[int, int]:
    """What ranks find of steps with a cosine, and of a rank that steps to infinity."""
    step = steps_with(cosine, torch.distributed.get_world_size(), size)[rank()]
    found = int(cosine_of(step.clone(), link()))
    step[0] = math.inf if rank() else 0.0
    return found, int(cosine_of(step, link()))


@pytest.mark.parametrize(("ranks_", "cosine"), [(4, 0.0), (2, 0.1), (4, 0.7), (2, 1.0)])
def test_ranks_find_the_cosine_of_their_steps(ranks: Any, ranks_: int, cosine: float) -> None:
    """Oracle: the cosine that the steps were made with. The factor makes the mean as long as the steps."""
    found = ranks(ranks_).run(measured, cosine, 20_000)
    assert found == [found[0]] * ranks_
    assert found[0][0] / WHOLE == pytest.approx(cosine, abs=0.02)
    assert found[0][1] == -1
    steps = steps_with(cosine, ranks_, 20_000)
    known = StepCosine()
    known.value = found[0][0]
    mean = torch.stack(steps).mean(0) * known.lengthening(ranks_)
    assert mean.norm() == pytest.approx(float(torch.stack(steps).norm(dim=1).mean()), rel=0.03)


def still() -> int:
    return int(cosine_of(torch.zeros(30), link()))


def test_ranks_that_do_not_move_say_so(ranks: Any) -> None:
    assert ranks(2).run(still) == [-1, -1]


@pytest.mark.parametrize("sizes", [[1], [3, 5], [100_000, 7], [40_000] * 30, [0, 20], [0]])
def test_samples_are_small_and_take_all_tensors(sizes: list[int]) -> None:
    """Oracle: entries numbered in order; measurements that follow each other see other entries."""
    weights = [torch.arange(size) + 0.0 for size in sizes]
    samples = [sample_of(weights, step) for step in range(16, 816, 16)]
    for sample in samples:
        assert len(sample) <= min(2 * ENTRIES, sum(sizes) / SMALLEST_STRIDE) + len(sizes)
    seen = {float(sample[0]) for sample in samples if len(sample)}
    assert len(seen) >= min(sum(sizes[:1]) or sum(sizes), 16)


def test_when_it_is_measured() -> None:
    assert [step for step in range(1, 50) if is_measured(step)] == [1, 2, 4, 8, 16, 32, 48]


def rounds_of_a_run(settings: dict[str, Any]) -> tuple[int, int | None, float | None]:
    strategy = DCTStrategy(**{"density": 0.2, "min_tensor_size": 8, **settings})
    fit(strategy, Module(None, torch.optim.Adam, lr=0.01), 40)
    (rounds,) = strategy.updates._rounds.values()
    return rounds.cosine.value, rounds.cosine.measured, strategy.updates._lengthening(rounds, 2, rounds.steps)


def test_steps_apart_are_averaged_without_it(ranks: Any) -> None:
    """Oracle: no measurement and no factor with several steps apart, a delay or a dense exchange; else all alike."""
    for settings in ({"local_steps": 4}, {"local_steps": 1, "overlap_steps": 1}, {"local_steps": 1, "density": 1.0}):
        assert ranks(2).run(rounds_of_a_run, settings) == [(WHOLE, None, None)] * 2
    first, second = ranks(2).run(rounds_of_a_run, {"local_steps": 1})
    assert first == second
    assert 0 < first[0] < WHOLE
    assert 1.0 < first[2] < 2**0.5


def measured_in_a_long_run() -> list[int]:
    with patch.object(law, "LONG", 50), patch.object(StepCosine, "begin", autospec=True) as begin:
        fit(DCTStrategy(density=0.2, min_tensor_size=8, local_steps=1), Module(None, torch.optim.Adam, lr=0.01), 50)
    return [step for (_, step, _), _ in begin.call_args_list]


def test_the_plain_end_of_a_long_run_needs_no_cosine(ranks: Any) -> None:
    """Oracle: by hand; steps 46 to 50 are the last tenth, and 48 would be measured."""
    assert ranks(2).run(measured_in_a_long_run) == [[1, 2, 4, 8, 16, 32]] * 2


class Late(Awaited):
    """A device whose numbers arrive only when they are waited for."""

    def poll(self) -> None:
        pass

    def synchronize(self) -> None:
        super().poll()  # copies
        super().poll()  # delivers


def late() -> list[float]:
    cosine, awaited, factors = StepCosine(), Late(), []
    for step in range(1, 34):
        weights = [torch.zeros(64)]
        if is_measured(step):
            cosine.begin(step, weights)
            weights = [torch.ones(64) * (1 if rank() else -1)]
            cosine.measure(step, weights, link(), awaited)
        factors.append(cosine.lengthening(2))
    return factors


def test_a_measurement_counts_from_the_next_one_on(ranks: Any) -> None:
    """Oracle: opposite steps have the cosine 0; by hand, halfway there with each measurement but the latest."""
    first, second = ranks(2).run(late)
    assert first == second
    values = [1024] * 1 + [512] * 2 + [256] * 4 + [128] * 8 + [64] * 16 + [32] * 2
    assert first == [pytest.approx((2 / (1 + value / 1024)) ** 0.5) for value in values]


def test_a_sample_is_of_its_step_alone() -> None:
    """A rank that passes over a step without an exchange does not measure it with a later one."""
    cosine, weights = StepCosine(), [torch.zeros(50)]
    assert not cosine.has_begun(16)
    cosine.begin(16, weights)
    assert [cosine.has_begun(step) for step in (15, 16, 17)] == [False, True, False]
    weights[0] += 2.0
    assert set(cosine.sampled(16, weights).tolist()) == {2.0}
    assert not cosine.has_begun(16)
