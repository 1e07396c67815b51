import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.activations.masking import explore, magnitudes_of, select, select_at_once, select_thresholds
from lightning_dct.threshold import SMALLEST_THRESHOLD, nudge, nudge_all
from strategies_for_hypothesis import examples

# Few distinct values make ties; the rest are what activations should not be but are.
values = st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0, 2.0**-149, 1e-40, math.inf, -math.inf, math.nan])


@st.composite
def groups_and_room(draw: st.DrawFn) -> tuple[Tensor, int]:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 30))
    grouped = draw(st.lists(values, min_size=groups * size, max_size=groups * size))
    return torch.tensor(grouped).view(groups, size), draw(st.integers(1, size - 1))


def magnitude(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def selected_by_loop(group: list[float], threshold: float, k: int) -> tuple[list[bool], int, float]:
    magnitudes = [magnitude(value) for value in group]
    reach = [m >= threshold for m in magnitudes]
    if sum(reach) <= k:
        return reach, sum(reach), threshold
    cutoff = sorted(magnitudes)[-k]
    mask = [m > cutoff for m in magnitudes]
    room, ties = k - sum(mask), magnitudes.count(cutoff)
    rank = 0
    for i, m in enumerate(magnitudes):
        if m == cutoff:
            rank += 1
            mask[i] = rank * room // ties > (rank - 1) * room // ties
    return mask, sum(reach), cutoff


@given(case=groups_and_room(), threshold=st.sampled_from([SMALLEST_THRESHOLD, 0.4, 1.0, 1.5, 2.0, 5.0]))
@examples(120)
def test_select_by_loop(case: tuple[Tensor, int], threshold: float) -> None:
    grouped, k = case
    thresholds = torch.full((len(grouped),), threshold)
    for chosen in (select, select_at_once):
        mask, reached, cutoffs = chosen(magnitudes_of(grouped), thresholds, k)
        for group, row in enumerate(grouped.tolist()):
            # The threshold as fp32 has it.
            expected = selected_by_loop(row, thresholds[group].item(), k)
            assert (mask[group].tolist(), int(reached[group]), cutoffs[group].item()) == expected


@given(case=groups_and_room())
@examples(100)
def test_thresholds_by_sorting(case: tuple[Tensor, int]) -> None:
    grouped, k = case
    found = select_thresholds(magnitudes_of(grouped), k)
    for group, row in enumerate(grouped.tolist()):
        finite = sorted(abs(value) if math.isfinite(value) else 0.0 for value in row)
        assert found[group].item() == max(finite[-k], SMALLEST_THRESHOLD)


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_large_groups_are_cut_like_small_ones(density: float) -> None:
    torch.manual_seed(0)
    grouped = torch.randn(3, 5000).to(torch.bfloat16)  # rounding makes ties
    magnitudes = magnitudes_of(grouped)
    k = int(density * 5000)
    thresholds = select_thresholds(magnitudes, k + 100)
    thresholds[1] = 100.0  # one group stays below its room
    for ours, theirs in zip(select(magnitudes, thresholds, k), select_at_once(magnitudes, thresholds, k), strict=True):
        assert torch.equal(ours, theirs)
    assert select(magnitudes, thresholds, k).mask.sum(1).tolist() == [k, 0, k]


def test_ties_are_spread_over_all_samples() -> None:
    grouped = torch.ones(1, 64 * 100)
    mask = select(magnitudes_of(grouped), torch.tensor([0.5]), 640).mask
    per_sample = mask.view(64, 100).sum(1)
    assert per_sample.tolist() == [10] * 64


def test_zeros_are_never_chosen() -> None:
    magnitudes = magnitudes_of(torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    thresholds = select_thresholds(magnitudes, 3)
    assert select(magnitudes, thresholds, 3).mask.tolist() == [[False, False, True, False]]


@given(numel=st.integers(1, 300), data=st.data())
@examples(100)
def test_explored_places_are_distinct_and_one_a_stratum(numel: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, numel))
    draws = data.draw(st.lists(st.floats(0, 1 - 2.0**-24, width=32), min_size=count, max_size=count))
    chosen = explore(torch.tensor(draws, dtype=torch.float32), numel).tolist()
    assert len(chosen) == count
    for i, place in enumerate(chosen):
        assert i * numel // count <= place < (i + 1) * numel // count


def test_exploration_is_fair() -> None:
    trials = 5000
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(10)
    for _ in range(trials):
        hits[explore(torch.rand(4, generator=generator), 10)] += 1
    # Strata of 2, 3, 2 and 3 places.
    expected = torch.tensor([1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3])
    assert ((hits / trials - expected).abs() < 5 * 0.5 / math.sqrt(trials)).all()


@given(
    threshold=st.floats(2.0**-100, 2.0**100, width=32),
    count=st.integers(0, 1000),
    target=st.integers(1, 1000),
)
@examples(100)
def test_nudge_all_is_nudge(threshold: float, count: int, target: int) -> None:
    ours = nudge_all(torch.tensor([threshold, 1.0]), torch.tensor([count, target]), target, 1000)
    assert ours[0].item() == pytest.approx(nudge(threshold, count, target, 1000), rel=1e-5)
    assert ours[1].item() == pytest.approx(nudge(1.0, target, target, 1000), rel=1e-5)
