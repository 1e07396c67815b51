import math
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.kernels import Selection, available_kernels, check_kernel, numba_cpu, reference
from lightning_dct.kernels import select as select_with
from strategies_for_hypothesis import examples

KERNELS = ["torch", "numba", "numba on two threads"]
CHUNK = 16
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class KernelUnderTest:
    name = "torch"


def select(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    scale: float = 1.0,
) -> Selection:
    return select_with(gradient, residual, segments, thresholds, scale, kernel=KernelUnderTest.name)


@pytest.fixture(autouse=True, params=KERNELS)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name, _, threads = request.param.partition(" ")
    monkeypatch.setattr(KernelUnderTest, "name", name)
    monkeypatch.setattr(reference, "CHUNK", CHUNK)
    # Few enough that the two threads share a segment, and that their border is in the middle of a block.
    monkeypatch.setattr(numba_cpu, "ENTRIES_PER_THREAD", 7)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2 if threads else 1)
    yield
    torch.set_num_threads(threads_before)


def select_by_loop(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    scale: float = 1.0,
) -> tuple[list[int], list[float], list[int], list[float]]:
    """Positions, values, counts and the residual afterwards: one entry at a time, in the residual's precision."""
    number = np.float64 if residual.dtype == torch.float64 else np.float32
    positions, values, counts, left = [], [], [], residual.tolist()
    with np.errstate(all="ignore"):
        for (start, stop), threshold in zip(segments, thresholds, strict=True):
            count = 0
            for place in range(start, stop):
                accumulated = number(residual[place].item()) + number(gradient[place].item()) * number(scale)
                if not abs(accumulated) < number(threshold):
                    positions.append(place)
                    values.append(float(accumulated))
                    count += 1
                if math.isfinite(accumulated):
                    left[place] = float(accumulated)
            counts.append(count)
    return positions, values, counts, left


def assert_equals_loop(
    gradient: Tensor,
    residual: Tensor,
    segments: Sequence[tuple[int, int]],
    thresholds: Sequence[float],
    scale: float = 1.0,
) -> None:
    positions, values, counts, left = select_by_loop(gradient, residual, segments, thresholds, scale)
    before, residual = gradient.clone(), residual.clone()
    selection = select(gradient, residual, segments, thresholds, scale)
    assert selection.positions.dtype == torch.int64
    assert selection.values.dtype == residual.dtype
    assert selection.positions.tolist() == positions
    np.testing.assert_array_equal(selection.values.numpy(), values)
    assert selection.counts == counts
    assert residual.tolist() == left
    assert torch.equal(gradient.nan_to_num(), before.nan_to_num())


def noise(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    zip([1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5, 2 * numba_cpu.BLOCK + 9], 2 * DTYPES, strict=False),
)
def test_equals_the_loop_around_chunk_boundaries(size: int, dtype: torch.dtype) -> None:
    residual = noise(size, torch.float64 if dtype == torch.float64 else torch.float32, seed=1)
    assert_equals_loop(noise(size, dtype), residual, [(0, size)], [0.8])


@pytest.mark.parametrize("segments", [[(3, 20), (20, 21), (40, 90)], [(0, 1), (99, 100)], [(5, 5), (10, 60)]])
def test_several_segments_with_gaps(segments: list[tuple[int, int]]) -> None:
    assert_equals_loop(noise(100), noise(100, seed=1), segments, [0.5, 1.5, 1.0][: len(segments)])


@pytest.mark.parametrize(("dtype", "scale"), zip(DTYPES, [2.0**-16, 0.5, 4.0, 0.25], strict=True))
def test_gradient_scale(dtype: torch.dtype, scale: float) -> None:
    residual = noise(50, torch.float64 if dtype == torch.float64 else torch.float32, seed=1)
    assert_equals_loop(noise(50, dtype) / scale, residual, [(0, 50)], [1.0], scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_gradients_are_picked_and_keep_the_old_residual(dtype: torch.dtype) -> None:
    gradient = noise(40, dtype)
    gradient[[0, 15, 16, 39]] = torch.tensor([math.nan, math.inf, -math.inf, math.nan], dtype=dtype)
    residual = noise(40, torch.float64 if dtype == torch.float64 else torch.float32, seed=1)
    before = residual.clone()
    assert_equals_loop(gradient, residual, [(0, 40)], [1.0])
    selection = select(gradient, residual, [(0, 40)], [1.0])
    assert {0, 15, 16, 39} <= set(selection.positions.tolist())
    assert torch.equal(residual[[0, 15, 16, 39]], before[[0, 15, 16, 39]])
    assert bool(residual.isfinite().all())


def test_sums_that_overflow_keep_the_old_residual() -> None:
    large = torch.finfo(torch.float32).max
    residual = torch.tensor([large, -large, 1.0])
    selection = select(torch.tensor([large, -large, 1.0]), residual, [(0, 3)], [5.0])
    assert selection.positions.tolist() == [0, 1]
    assert selection.values.tolist() == [math.inf, -math.inf]
    assert residual.tolist() == [torch.tensor(large).item(), torch.tensor(-large).item(), 2.0]


def test_no_segments() -> None:
    residual = torch.ones(10)
    positions, values, counts = select(torch.ones(10), residual, [], [])
    assert positions.dtype == torch.int64
    assert (positions.numel(), values.numel(), counts) == (0, 0, [])
    assert residual.tolist() == [1.0] * 10


def test_a_million_entries_and_several_threads_as_one_by_one() -> None:
    """Enough for every path: blocks, words of flags, a share for each thread."""
    gradient, residual = noise(1_000_000), noise(1_000_000, seed=1)
    expected = gradient + residual
    segments, thresholds = [(0, 400_001), (400_001, 999_000)], [3.0, 3.5]
    selection = select(gradient, residual, segments, thresholds)
    limits = torch.cat([torch.full((400_001,), 3.0), torch.full((598_999,), 3.5), torch.full((1000,), math.inf)])
    places = (expected.abs() >= limits).nonzero().squeeze(1)
    assert torch.equal(selection.positions, places)
    assert torch.equal(selection.values, expected[places])
    assert selection.counts == [int((places < 400_001).sum()), int((places >= 400_001).sum())]
    assert torch.equal(residual[:999_000], expected[:999_000])


numbers = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1e-40, 3e38, math.nan, math.inf, -math.inf]) | st.floats(width=32)
finite_numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 0.5, 3e38])


@given(data=st.data(), size=st.integers(1, 30), threshold=st.sampled_from([1e-38, 0.5, 1.0, 1e30]))
@examples(60)
def test_equals_the_loop_whatever_the_numbers(data: st.DataObject, size: int, threshold: float) -> None:
    gradient = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)))
    residual = torch.tensor(data.draw(st.lists(finite_numbers, min_size=size, max_size=size)))
    cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2 if size > 1 else 0, max_size=4)))
    segments = list(zip(cuts[::2], cuts[1::2], strict=False))
    pieces = st.integers(1, 8)
    with (
        mock.patch.object(reference, "CHUNK", data.draw(pieces)),
        mock.patch.object(numba_cpu, "ENTRIES_PER_THREAD", data.draw(pieces)),
    ):
        assert_equals_loop(gradient, residual, segments, [threshold] * len(segments))


def test_kernels_of_a_device() -> None:
    assert available_kernels("cpu") == ["torch", "numba"]
    assert "numba" not in available_kernels("cuda")


def test_a_kernel_for_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`kernel='numba'` works on cpu, not on cuda\. Use `kernel='auto'`"):
        check_kernel("numba", "cuda")


def test_a_kernel_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.kernels._is_installed", lambda package: package != "numba")
    assert available_kernels("cpu") == ["torch"]
    with pytest.raises(
        ValueError, match=r"needs the package numba: `pip install '.\[fast\]' in a clone of lightning_dct`"
    ):
        check_kernel("numba", "cpu")


def test_positions_that_int32_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the bucket were larger; what one selection gave is not overwritten by the next."""
    monkeypatch.setattr(numba_cpu, "LARGEST_INT32", 0)
    first = select(torch.tensor([0.0, 2.0, 3.0]), torch.zeros(3), [(0, 3)], [1.0])
    second = select(torch.tensor([4.0, 0.0, 0.0]), torch.zeros(3), [(0, 3)], [1.0])
    assert (first.positions.tolist(), first.values.tolist()) == ([1, 2], [2.0, 3.0])
    assert (second.positions.tolist(), second.values.tolist()) == ([0], [4.0])
