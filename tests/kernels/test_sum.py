"""What arrives is summed: every kernel against the reference, to the last bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.kernels import add_rows, numba_cpu, sum_entries
from lightning_dct.reference import weighted_sum
from strategies_for_hypothesis import examples

SIZE = 4000  # some blocks
Entries = list[tuple[Tensor, Tensor]]


class KernelUnderTest:
    name = "torch"


@pytest.fixture(autouse=True, params=["torch", "numba", "numba on two threads"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name, _, threads = request.param.partition(" ")
    monkeypatch.setattr(KernelUnderTest, "name", name)
    monkeypatch.setattr(numba_cpu, "ENTRIES_PER_THREAD", 7)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2 if threads else 1)
    yield
    torch.set_num_threads(threads_before)


def expected_sum(
    total: Tensor, segments: list[tuple[int, int]], entries: Entries, factor: float, by_senders: bool
) -> Tensor:
    """The reference's, in the segments."""
    dense = [torch.zeros_like(total).index_copy_(0, where, values.to(total.dtype)) for where, values in entries]
    sums = weighted_sum(dense or [torch.zeros_like(total)], factor, dense=False, by_senders=by_senders)
    expected = total.clone()
    for start, stop in segments:
        expected[start:stop] = sums[start:stop]
    return expected


def sparse(draw: st.DrawFn, segments: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    inside = np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in segments)])
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    positions = inside[generator.random(len(inside)) < share]
    values = generator.standard_normal(len(positions)).astype(np.float32) * np.float32(
        draw(st.sampled_from([1, 1e-40]))
    )
    if len(values) and draw(st.booleans()):
        values[generator.integers(len(values))] = draw(st.sampled_from([np.inf, -np.inf, np.nan]))
    return torch.tensor(positions), torch.tensor(values)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Entries]:
    borders = sorted(draw(st.lists(st.integers(0, SIZE), max_size=8)))
    segments = list(zip(borders[::2], borders[1::2], strict=False))
    if draw(st.booleans()):
        segments = [(0, SIZE)]
    return segments, [sparse(draw, segments) for _ in range(draw(st.integers(0, 4)))]


@examples(40)
@given(case=cases(), factor=st.sampled_from([0.5, 1 / 3, 65536.0, 1e-3]), wide=st.booleans(), by_senders=st.booleans())
def test_equals_the_reference_to_the_last_bit(
    case: tuple[list[tuple[int, int]], Entries], factor: float, wide: bool, by_senders: bool
) -> None:
    segments, entries = case
    total = torch.full((SIZE,), 7.0, dtype=torch.float64 if wide else torch.float32)
    expected = expected_sum(total, segments, entries, factor, by_senders)
    sum_entries(total, segments, entries, factor, KernelUnderTest.name, by_senders)
    assert np.array_equal(total.numpy(), expected.numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_rows_are_added_one_after_the_other(dtype: torch.dtype, dim: int) -> None:
    """As torch adds them, to the last bit; rows that are a view of others too."""
    generator = torch.Generator().manual_seed(dim)
    places = torch.randint(0, 20, (300,), generator=generator)
    rows = torch.randn(300, 2 * dim, generator=generator, dtype=dtype)[:, ::2]
    ours, theirs = (torch.ones(20, dim, dtype=dtype) for _ in range(2))
    add_rows(ours, places, rows)
    assert torch.equal(ours, theirs.index_add_(0, places, rows))
