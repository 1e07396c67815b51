import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.threshold import (
    GUARD_LARGEST_FACTOR,
    SMALLEST_THRESHOLD,
    Thresholds,
    keep_largest,
    kth_magnitude,
    nudge,
)
from strategies_for_hypothesis import examples, floats

counts = st.integers(0, 10**9)
targets = st.integers(1, 10**9)


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50), data=st.data())
@examples(300)
def test_kth_magnitude_equals_sorting(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values)
    before = tensor.clone()
    magnitudes = sorted((abs(v) if math.isfinite(v) else 0.0 for v in values), reverse=True)
    assert kth_magnitude(tensor, k) == max(magnitudes[k - 1], SMALLEST_THRESHOLD)
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


def test_the_threshold_of_zeros_is_the_smallest_normal_float() -> None:
    assert kth_magnitude(torch.zeros(10), 3) == np.finfo(np.float32).tiny == SMALLEST_THRESHOLD


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_kth_magnitude_of_every_dtype(dtype: torch.dtype) -> None:
    assert kth_magnitude(torch.tensor([0.5, -2.0, 1.0, -0.25], dtype=dtype), 2) == 1.0


@given(values=st.lists(floats | st.sampled_from([0.0, 1.0, -1.0, 2.0]), min_size=2, max_size=40), data=st.data())
@examples(300)
def test_keep_largest_equals_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values) - 1))
    kept = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:k]
    mask, smallest = keep_largest(torch.tensor(values), k)
    assert mask.dtype == torch.bool
    assert mask.nonzero().squeeze(1).tolist() == sorted(kept)
    assert smallest == min(abs(values[place]) for place in kept)


@given(threshold=st.floats(1e-30, 1e30), count=counts, target=targets)
@examples(300)
def test_nudge_goes_the_right_way_by_a_bounded_factor(threshold: float, count: int, target: int) -> None:
    factor = nudge(threshold, count, target) / threshold
    assert (factor > 1) == (count > target)
    assert (factor < 1) == (count < target)
    assert 1 / GUARD_LARGEST_FACTOR * (1 - 1e-12) <= factor <= GUARD_LARGEST_FACTOR * (1 + 1e-12)


def test_nudge_stays_where_the_count_is_right() -> None:
    assert nudge(0.123, 7, 7) == 0.123


def test_nudge_grows_with_the_count() -> None:
    nudged = [nudge(1.0, count, 100) for count in (0, 50, 90, 100, 110, 150, 200)]
    assert nudged == sorted(set(nudged))
    assert nudge(1.0, 10**9, 1) == GUARD_LARGEST_FACTOR
    assert nudge(1.0, 0, 10**9) == 1 / GUARD_LARGEST_FACTOR


def test_nudge_never_ends_below_the_smallest_threshold() -> None:
    assert nudge(SMALLEST_THRESHOLD, 0, 1000) == SMALLEST_THRESHOLD


def guarded(threshold: float, count: int, target: int) -> float:
    return nudge(threshold, count, target)


def unguarded(threshold: float, count: int, target: int) -> float:
    return threshold


def mean_count_under_drift(rule: Callable[[float, int, int], float], drift: float, target: int) -> float:
    """Mean share of the target over 300 steps whose Laplace gradients grow or shrink by ``drift`` a step."""
    noise = np.random.default_rng(0)
    threshold, counts = 0.0, []
    for step in range(300):
        gradient = torch.from_numpy(noise.laplace(scale=drift**step, size=20_000))
        threshold = threshold or kth_magnitude(gradient, target)
        counts.append(int((gradient.abs() >= threshold).sum()))
        threshold = rule(threshold, counts[-1], target)
    return float(np.mean(counts)) / target


@pytest.mark.parametrize("drift", [0.99, 1.0, 1.01])
@pytest.mark.parametrize("target", [20, 200, 2000])
def test_guard_holds_the_count_under_drift(drift: float, target: int) -> None:
    assert 2 / 3 <= mean_count_under_drift(guarded, drift, target) <= 5 / 4


@pytest.mark.parametrize("drift", [0.99, 1.01])
def test_without_the_guard_the_count_leaves(drift: float) -> None:
    assert not 2 / 3 <= mean_count_under_drift(unguarded, drift, 200) <= 5 / 4


def test_a_threshold_belongs_to_its_target() -> None:
    thresholds = Thresholds()
    assert thresholds.get("weight", 10) is None
    thresholds.set("weight", 10, 0.5)
    assert thresholds.get("weight", 10) == 0.5
    assert thresholds.get("weight", 11) is None
    assert thresholds.get("bias", 10) is None
    thresholds.set("weight", 11, 0.25)
    assert thresholds.get("weight", 10) is None
    assert thresholds.get("weight", 11) == 0.25


def test_values_of_all_thresholds() -> None:
    thresholds = Thresholds()
    assert thresholds.values() == []
    thresholds.set("a", 1, 0.5)
    thresholds.set("b", 2, 0.25)
    assert sorted(thresholds.values()) == [0.25, 0.5]


def test_state_round_trip_is_a_copy_of_plain_numbers() -> None:
    thresholds, resumed = Thresholds(), Thresholds()
    thresholds.set("a", 3, 0.1)
    state = thresholds.state_dict()
    resumed.set("gone", 1, 1.0)
    resumed.load_state_dict(state)
    thresholds.set("a", 3, 0.9)
    assert resumed.state_dict() == state == {"values": {"a": 0.1}, "targets": {"a": 3}}
    resumed.set("a", 3, 0.7)
    assert state["values"]["a"] == 0.1
