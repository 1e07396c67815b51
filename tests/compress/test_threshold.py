import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.compress.threshold import (
    GUARD_AIM,
    GUARD_LARGEST_FACTOR,
    GUARD_RESELECT,
    Thresholds,
    keep_largest,
    kth_magnitude,
    nudge,
    sample_of,
    threshold_from,
)
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD, limit_of
from strategies_for_hypothesis import examples, floats

counts = st.integers(0, 10**9)
targets = st.integers(1, 10**9)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50), data=st.data())
@examples(60)
def test_kth_magnitude_equals_sorting(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values).to(data.draw(st.sampled_from(DTYPES)))
    before = tensor.clone()
    magnitudes = sorted(
        (abs(v) if math.isfinite(v) else 0.0 for v in tensor.tolist()), reverse=True
    )
    assert kth_magnitude(tensor, k) == max(magnitudes[k - 1], SMALLEST_THRESHOLD)
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


@given(
    values=st.lists(floats | st.sampled_from([0.0, 1.0, -1.0, 2.0]), min_size=2, max_size=40),
    data=st.data(),
)
@examples(60)
def test_keep_largest_equals_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values) - 1))
    kept = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:k]
    mask, smallest = keep_largest(torch.tensor(values), k)
    assert mask.dtype == torch.bool
    assert mask.nonzero().squeeze(1).tolist() == sorted(kept)
    assert smallest == min(abs(values[place]) for place in kept)


@given(
    threshold=st.floats(1e-30, 1e30), count=counts, target=targets, size=st.integers(10**9, 10**10)
)
@examples(60)
def test_nudge_goes_the_right_way_by_a_bounded_factor(
    threshold: float, count: int, target: int, size: int
) -> None:
    factor = nudge(threshold, count, target, size) / threshold
    assert factor >= 1 if count > GUARD_AIM * target else factor <= 1
    assert 1 / GUARD_LARGEST_FACTOR * (1 - 1e-12) <= factor <= GUARD_LARGEST_FACTOR * (1 + 1e-12)


def test_nudge_grows_with_the_count() -> None:
    nudged = [nudge(1.0, count, 100, 1000) for count in (0, 50, 90, 110, 150, 200, 400)]
    assert nudged == sorted(set(nudged))
    assert nudged[2] < 1.0 < nudged[3]
    assert nudge(1.0, 10**9, 1, 1) == GUARD_LARGEST_FACTOR
    assert nudge(1.0, 0, 10**9, 10**9) == 1 / GUARD_LARGEST_FACTOR


def test_nudge_is_gentler_at_lower_densities() -> None:
    nudged = [nudge(1.0, 200, 100, size) for size in (1000, 10_000, 100_000)]
    assert nudged == sorted(nudged, reverse=True)
    assert nudged[-1] > 1.0


def counts_under_drift(target: int, drift: float) -> tuple[float, float]:
    """Entries above the threshold and entries sent, over the target: means over the last 150 of 300
    steps.

    Laplace gradients grow or shrink by the factor ``drift`` a step; what is not sent waits in a
    residual.
    """
    size = 10_000
    noise = np.random.default_rng(0)
    residual = np.zeros(size)
    threshold = 0.0
    counts = []
    for step in range(300):
        residual += noise.laplace(scale=drift**step, size=size)
        magnitudes = np.abs(residual)
        threshold = threshold or kth_magnitude(torch.from_numpy(residual), target)
        count = int((magnitudes >= threshold).sum())
        counts.append(count)
        residual[np.argsort(magnitudes)[size - min(count, target) :]] = 0.0
        threshold = nudge(threshold, count, target, size)
    shares = np.array(counts[150:]) / target
    return float(shares.mean()), float(np.minimum(shares, 1.0).mean())


@pytest.mark.parametrize(("target", "drift"), [(10, 1.0), (100, 0.99), (1000, 1.0), (1000, 1.01)])
def test_guard_holds_the_count_under_drift(target: int, drift: float) -> None:
    above, went = counts_under_drift(target, drift)
    assert 2 / 3 <= above <= 5 / 4
    assert went >= 2 / 3


def test_guard_under_fast_growth_fills_every_payload() -> None:
    above, went = counts_under_drift(100, 1.01)
    assert above <= 2  # no selection is forced
    assert went > 0.99


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


def test_state_round_trip_is_a_copy_of_plain_numbers() -> None:
    thresholds = Thresholds()
    resumed = Thresholds()
    thresholds.set("a", 3, 0.1)
    state = thresholds.state_dict()
    resumed.set("gone", 1, 1.0)
    resumed.load_state_dict(state)
    thresholds.set("a", 3, 0.9)
    assert resumed.state_dict() == state == {"values": {"a": 0.1}, "targets": {"a": 3}}
    resumed.set("a", 3, 0.7)
    assert state["values"]["a"] == 0.1


@pytest.mark.parametrize("tail", ["exponential", "normal", "uniform", "cubed"])
@pytest.mark.parametrize("density", [0.3, 0.01])
def test_a_threshold_that_far_too_many_reach_is_right_after_a_step(
    tail: str, density: float
) -> None:
    """From a hundredth of what it should be."""
    noise = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=noise)
    values = {
        "normal": values,
        "cubed": values.pow(3),
        "uniform": torch.rand(100_000, generator=noise),
    }.get(tail, torch.empty(100_000).exponential_(generator=noise))
    magnitudes = values.abs()
    target = int(density * 100_000)
    threshold = 0.01 * kth_magnitude(values, target)
    for _ in range(2):
        reached = magnitudes[magnitudes >= threshold]
        assert reached.numel() > 0.3 * target
        if reached.numel() > GUARD_RESELECT * target:
            threshold = limit_of(reached, 100_000, target)
        else:
            threshold = nudge(threshold, reached.numel(), target, 100_000)
    assert int((magnitudes >= threshold).sum()) < 2 * target


@pytest.mark.parametrize("density", [0.3, 0.01, 0.001])
def test_a_sample_gives_about_the_target(density: float) -> None:
    """Of a matrix whose columns differ by their scale, which a regular sample would not see."""
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * torch.linspace(
        0.1, 10, 1024
    )
    values = values.flatten()
    target = int(density * 1024 * 1024)
    sample = sample_of(values.numel(), target)
    assert sample is not None
    threshold = threshold_from(values[sample], values.numel(), target)
    assert int((values.abs() >= threshold).sum()) == pytest.approx(target, rel=0.2)
    assert bool((sample.diff() > 0).all())
    assert 0 <= int(sample[0]) < int(sample[-1]) < values.numel()
    assert sample_of(20_000, 10_000) is None
