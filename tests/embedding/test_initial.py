import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.embedding import owners
from lightning_dct.embedding.owners import initial_rows
from strategies_for_hypothesis import examples

BOUNDS = np.array([0.5, 0.01, 3.0], dtype=np.float32)
DIM = 5
seeds = st.integers(-(2**70), 2**70)
rows_of_tables = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**40)), max_size=20)


def rows(seed: int, wanted: list[tuple[int, int]], dim: int = DIM, bounds: np.ndarray = BOUNDS) -> Tensor:
    tables, numbers = np.array(wanted, dtype=np.int64).reshape(-1, 2).T
    return initial_rows(seed, tables, numbers, bounds, dim)


def mixed(state: int) -> int:
    """The finaliser of SplitMix64."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def one_entry(seed: int, table: int, row: int, column: int) -> float:
    state = seed % 2**64
    for counter in (table, row, column):
        state = mixed((state + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)
    return float(np.float32((state >> 40) * 2.0**-23 - 1) * BOUNDS[table])


@given(seed=seeds, wanted=rows_of_tables)
@examples(60)
def test_entry_by_entry(seed: int, wanted: list[tuple[int, int]]) -> None:
    found = rows(seed, wanted)
    assert found.dtype == torch.float32
    assert found.shape == (len(wanted), DIM)
    assert found.tolist() == [[one_entry(seed, table, row, column) for column in range(DIM)] for table, row in wanted]


@given(seed=seeds, wanted=rows_of_tables)
@examples(30)
def test_the_same_without_numba(seed: int, wanted: list[tuple[int, int]]) -> None:
    with patch.object(owners, "rows_kernel", lambda _: None):
        found = rows(seed, wanted)
    assert torch.equal(found, rows(seed, wanted))


@given(seed=seeds, wanted=rows_of_tables, data=st.data())
@examples(60)
def test_whoever_asks_and_in_whatever_order(seed: int, wanted: list[tuple[int, int]], data: st.DataObject) -> None:
    found = rows(seed, wanted)
    order = data.draw(st.permutations(range(len(wanted))))
    cut = data.draw(st.integers(0, len(wanted)))
    parts = [rows(seed, [wanted[i] for i in part]) for part in (order[:cut], order[cut:])]
    assert torch.equal(torch.cat(parts), found[order])
    # Fewer entries of the same row are its first ones.
    assert torch.equal(rows(seed, wanted, dim=2), found[:, :2])


def test_uniform_between_the_bounds() -> None:
    count = 20_000
    for table, bound in enumerate(BOUNDS.tolist()):
        values = rows(7, [(table, row) for row in range(count // DIM)]) / bound
        assert float(values.min()) >= -1
        assert float(values.max()) < 1
        # Five standard deviations of what a uniform draw would show.
        assert abs(float(values.mean())) < 5 * math.sqrt(1 / 3 / count)
        assert abs(float(values.square().mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / count)
        tenths = torch.histc(values, bins=10, min=-1, max=1)
        assert float((tenths - count / 10).square().sum() / (count / 10)) < 9 + 5 * math.sqrt(18)  # chi-squared
        # Neither columns nor neighbouring rows go together.
        correlation = torch.corrcoef(torch.cat([values[:-1], values[1:]], dim=1).T).fill_diagonal_(0)
        assert float(correlation.abs().max()) < 5 / math.sqrt(count / DIM)


@pytest.mark.parametrize("row", [0, 2**31 - 1, 2**31, 2**62])
def test_large_row_numbers(row: int) -> None:
    assert rows(0, [(0, row)]).tolist() == [[one_entry(0, 0, row, column) for column in range(DIM)]]
