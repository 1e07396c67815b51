import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.kernels import buffered
from lightning_dct.kernels.buffered import BufferedSelection
from strategies_for_hypothesis import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
numbers = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1e-40, 3e38]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)
nonfinite_too = numbers | st.sampled_from([math.nan, math.inf, -math.inf])


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    capacities: Sequence[int],
    thresholds: Sequence[float],
    scale: float,
) -> BufferedSelection:
    """On the GPU where there is one; the residual changes in place."""
    numbers = torch.tensor([scale, *thresholds], dtype=residual.dtype, device=DEVICE)
    on_device = residual.to(DEVICE)
    picked_from = buffered.Segments(segments, capacities, torch.device(DEVICE))
    buffered_selection = buffered.select_into_buffer(gradient.to(DEVICE), on_device, picked_from, numbers)
    residual.copy_(on_device)
    return BufferedSelection(*(part.cpu() for part in buffered_selection))


def assert_equals_loop(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    capacities: Sequence[int],
    thresholds: Sequence[float],
    scale: float = 1.0,
) -> BufferedSelection:
    """One entry at a time, in the residual's precision."""
    number = np.float64 if residual.dtype == torch.float64 else np.float32
    left, after = residual.tolist(), residual.clone()
    buffered_selection = select(gradient, after, segments, capacities, thresholds, scale)
    begin = 0
    with np.errstate(all="ignore"):
        for index, ((start, stop), slots, threshold) in enumerate(zip(segments, capacities, thresholds, strict=True)):
            sums = {
                place: number(residual[place].item()) + number(gradient[place].item()) * number(scale)
                for place in range(start, stop)
            }
            left[start:stop] = [float(value) if math.isfinite(value) else left[place] for place, value in sums.items()]
            picks = [place for place, value in sums.items() if not abs(value) < number(threshold)]
            broken = [place for place, value in sums.items() if not math.isfinite(value)]
            picks = broken or picks
            assert buffered_selection.counts[index] == len(picks)
            assert buffered_selection.broken[index] == bool(broken)
            if broken:
                picks = picks[:slots]
            elif len(picks) > slots:
                # Of as many picks as fit it twice: the second, the fourth, and so on.
                picks = [picks[math.ceil(slot * len(picks) / slots) - 1] for slot in range(1, slots + 1)]
            filled = slice(begin, begin + len(picks))
            assert buffered_selection.positions[filled].tolist() == picks
            np.testing.assert_array_equal(buffered_selection.values[filled].numpy(), [sums[place] for place in picks])
            begin += slots
    assert buffered_selection.positions.numel() == buffered_selection.values.numel() == begin
    assert after.tolist() == left
    return buffered_selection


def noise(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("capacities", [(1, 1, 1), (7, 3, 20), (90, 100, 4000)])
def test_equals_the_loop_over_blocks_and_gaps(dtype: torch.dtype, capacities: tuple[int, ...]) -> None:
    residual = noise(5000, torch.float64 if dtype == torch.float64 else torch.float32, seed=1)
    segments = [(3, 90), (90, 91), (100, 4900)]
    assert_equals_loop(noise(5000, dtype), residual, segments, capacities, [2.0, 0.1, 3.0], 0.5)


def test_a_segment_with_more_picks_than_slots_is_sampled_regularly() -> None:
    buffered_selection = assert_equals_loop(torch.ones(4500), torch.zeros(4500), [(0, 4500)], [3], [0.5])
    assert buffered_selection.positions.tolist() == [1499, 2999, 4499]
    assert buffered_selection.counts.tolist() == [4500]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_broken_entry_among_too_many_picks_is_never_lost(value: float) -> None:
    gradient = torch.ones(6000)
    gradient[[17, 2500]] = value
    buffered_selection = assert_equals_loop(gradient, torch.zeros(6000), [(0, 3000), (3000, 6000)], [4, 4], [0.5, 0.5])
    assert buffered_selection.positions[:2].tolist() == [17, 2500]
    assert buffered_selection.broken.tolist() == [True, False]


@given(data=st.data(), size=st.integers(1, 30), threshold=st.sampled_from([1e-38, 0.5, 1.0, 1e30]))
@examples(60)
def test_equals_the_loop_whatever_the_numbers(data: st.DataObject, size: int, threshold: float) -> None:
    kind = data.draw(st.sampled_from([numbers, nonfinite_too]))
    gradient = torch.tensor(data.draw(st.lists(kind, min_size=size, max_size=size)))
    residual = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)))
    cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=4)))
    segments = list(zip(cuts[::2], cuts[1::2], strict=False))
    capacities = [data.draw(st.integers(1, stop - start)) for start, stop in segments]
    assert_equals_loop(gradient, residual, segments, capacities, [threshold] * len(segments))
