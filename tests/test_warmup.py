import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.warmup import WARMUP_SCHEDULES, WARMUP_STAGES, warmup_density, warmup_stage
from strategies_for_hypothesis import examples

schedules = st.sampled_from(WARMUP_SCHEDULES)
targets = st.floats(1e-4, 1.0)
lengths = st.integers(0, 5000)


@given(length=lengths, step=st.integers(0, 6000))
@examples(300)
def test_stages_are_equal_parts_of_the_warmup(length: int, step: int) -> None:
    stage = warmup_stage(step, length)
    assert isinstance(stage, int)
    if step >= length:
        assert stage == WARMUP_STAGES
    else:
        # Each stage begins at the first step that is not before its share of the warm-up.
        assert stage == max(s for s in range(WARMUP_STAGES) if step * WARMUP_STAGES >= s * length)
    assert warmup_stage(step + 1, length) >= stage


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 320, 1000])
def test_as_many_stages_as_there_are_steps_for(length: int) -> None:
    stages = [warmup_stage(step, length) for step in range(length + 1)]
    assert stages[0] == 0
    assert stages[-1] == WARMUP_STAGES
    assert len(set(stages[:-1])) == min(length, WARMUP_STAGES)
    lasts = [stages.count(stage) for stage in set(stages[:-1])]
    assert max(lasts) - min(lasts) <= 1


def test_no_warmup() -> None:
    assert warmup_stage(0, 0) == WARMUP_STAGES


@given(target=targets, schedule=schedules)
@examples(200)
def test_from_everything_down_to_the_target(target: float, schedule: str) -> None:
    densities = [warmup_density(target, stage, schedule) for stage in range(WARMUP_STAGES + 1)]
    assert densities[0] == 1.0
    assert densities[-1] == pytest.approx(target, rel=1e-15)
    assert densities == sorted(densities, reverse=True)


@given(target=st.floats(1e-4, 0.99), stage=st.integers(1, WARMUP_STAGES))
@examples(100)
def test_by_equal_factors_or_by_equal_differences(target: float, stage: int) -> None:
    factor = warmup_density(target, stage, "exponential") / warmup_density(target, stage - 1, "exponential")
    assert factor == pytest.approx(math.exp(math.log(target) / WARMUP_STAGES))
    step = warmup_density(target, stage - 1, "linear") - warmup_density(target, stage, "linear")
    assert step == pytest.approx((1 - target) / WARMUP_STAGES, rel=1e-9)


def test_documented_schedules() -> None:
    assert set(WARMUP_SCHEDULES) == {"exponential", "linear"}
    assert warmup_density(0.01, WARMUP_STAGES // 2, "exponential") == pytest.approx(0.1)
    assert warmup_density(0.01, WARMUP_STAGES // 2, "linear") == pytest.approx(0.505)
