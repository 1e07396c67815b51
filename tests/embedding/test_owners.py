"""Who owns which row, in which place, and what a row is at first."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.embedding import owners
from lightning_dct.embedding.owners import RowOwners, initial_rows, place_by_hash, place_tables
from strategies_for_hypothesis import examples

Case = tuple[list[int], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables small and large, and a number of ranks."""
    sizes = draw(
        st.lists(st.one_of(st.integers(1, 5), st.integers(1, 900)), min_size=1, max_size=8)
    )
    return sizes, draw(st.integers(1, 6))


def owners_by_loop(placement: RowOwners) -> list[dict[tuple[int, int], int]]:
    """For each rank the place of every row it owns: table after table, rows ascending, places
    without gaps.
    """
    places: list[dict[tuple[int, int], int]] = [{} for _ in range(placement.world_size)]
    for table, rows in enumerate(placement.table_rows):
        for row in range(rows):
            owner = (
                placement.first_rank[table] + row // placement.block_rows[table]
            ) % placement.world_size
            places[owner][table, row] = len(places[owner])
    return places


def is_whole(placement: RowOwners, table: int) -> bool:
    return placement.block_rows[table] >= placement.table_rows[table]


@given(case=cases())
@example(case=([1], 4))
@example(case=([33], 2))
@examples(60)
def test_every_row_has_one_owner_and_one_place_and_all_methods_agree(case: Case) -> None:
    placement = place_tables(*case)
    expected = owners_by_loop(placement)
    assert placement.owned_rows == tuple(len(rows) for rows in expected)
    every = [(table, row) for table, rows in enumerate(case[0]) for row in range(rows)]
    owners, places = placement.locate(*np.array(every).T)
    assert [
        expected[owner][key] for key, owner in zip(every, owners, strict=True)
    ] == places.tolist()
    for rank, owned in enumerate(expected):
        assert list(owned.values()) == list(range(len(owned)))
        tables, rows = placement.rows_of(rank, np.arange(len(owned)))
        assert list(zip(tables.tolist(), rows.tolist(), strict=True)) == list(owned)
        assert placement.tables_of(rank, np.arange(len(owned))).tolist() == [
            table for table, _ in owned
        ]
        listed = [
            ((table, row), place + row - start)
            for table, start, stop, place in placement.ranges(rank)
            for row in range(start, stop)
        ]
        assert listed == list(owned.items())
        # In any order, and the same place twice.
        chosen = np.array(
            [*range(len(owned) - 1, -1, -2), *range(0, len(owned), 3)], dtype=np.int64
        )
        tables, rows = placement.rows_of(rank, chosen)
        owners, places = placement.locate(tables, rows)
        assert (owners == rank).all()
        assert places.tolist() == chosen.tolist()


@given(case=cases())
@examples(60)
def test_memory_is_balanced(case: Case) -> None:
    sizes, world_size = case
    placement = place_tables(sizes, world_size)
    whole = [rows for table, rows in enumerate(sizes) if is_whole(placement, table)]
    # A cut table is spread but for one block.
    blocks = sum(
        placement.block_rows[table] for table in range(len(sizes)) if not is_whole(placement, table)
    )
    assert max(placement.owned_rows) <= sum(sizes) / world_size + max(whole, default=0) + blocks


@given(case=cases())
@examples(60)
def test_tables_larger_than_a_share_are_cut_and_no_others(case: Case) -> None:
    sizes, world_size = case
    placement = place_tables(sizes, world_size)
    for table, rows in enumerate(sizes):
        cut = rows > sum(sizes) / world_size and rows >= world_size > 1
        owners = {
            rank
            for rank in range(world_size)
            for piece in placement.ranges(rank)
            if piece[0] == table
        }
        if not cut:
            assert len(owners) == 1
            continue
        # On every rank, on none more than a block above its share.
        assert (
            owners == set(range(world_size))
            or placement.block_rows[table] * (world_size - 1) >= rows
        )
        for rank in range(world_size):
            owned = sum(
                stop - start for number, start, stop, _ in placement.ranges(rank) if number == table
            )
            assert owned <= rows / world_size + placement.block_rows[table]
            assert owned < rows


@given(case=cases())
@examples(60)
def test_lookups_are_balanced_beside_memory(case: Case) -> None:
    sizes, world_size = case
    placement = place_tables(sizes, world_size)
    memory = [0.0] * world_size
    traffic = [0.0] * world_size
    weights = [0.0]
    for table, rows in enumerate(sizes):
        shares = rows / sum(sizes), 1 / len(sizes)
        if not is_whole(placement, table):
            for rank in range(world_size):
                memory[rank] += shares[0] / world_size
                traffic[rank] += shares[1] / world_size
            continue
        memory[placement.first_rank[table]] += shares[0]
        traffic[placement.first_rank[table]] += shares[1]
        weights.append(max(shares))
    # A table goes where memory and traffic together are at most average, and brings its own weight.
    assert max(*memory, *traffic) <= 2 / world_size + max(weights) + 1e-9


def test_small_tables_of_one_size_are_dealt_out() -> None:
    assert sorted(place_tables([10] * 8, 2).first_rank) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_large_tables_begin_on_different_ranks() -> None:
    placement = place_tables([1000, 1000, 1000], 4)
    assert placement.first_rank == (0, 1, 2)
    assert max(placement.owned_rows) - min(placement.owned_rows) <= 3 * 16


ids = (
    st.integers(0, 50)
    | st.integers(0, 2**63 - 1)
    | st.sampled_from([2**58, 2**62 - 1, 2**62, 2**63 - 1])
)


@given(num_tables=st.integers(1, 40), world_size=st.integers(1, 5), data=st.data())
@examples(80)
def test_keys_lead_to_their_tables_and_ids_and_back(
    num_tables: int, world_size: int, data: st.DataObject
) -> None:
    placement = place_by_hash(num_tables, world_size)
    drawn = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_tables - 1), ids), unique=True, min_size=1, max_size=20
        )
    )
    tables, rows = np.array(drawn, dtype=np.int64).T
    owners, keys = placement.locate(tables, rows)
    assert all(0 <= key < universe for key in keys.tolist() for universe in placement.owned_rows)
    assert set(owners.tolist()) <= set(range(world_size))
    assert len(set(keys.tolist())) == len(drawn)
    found, kept = placement.rows_of(0, keys)
    assert found.tolist() == placement.tables_of(0, keys).tolist() == tables.tolist()
    room = 2**63 // 2 ** (num_tables - 1).bit_length()
    assert all(
        new == old if old < room else new < room
        for old, new in zip(rows.tolist(), kept.tolist(), strict=True)
    )
    again, same = placement.locate(found, kept)
    assert (again.tolist(), same.tolist()) == (owners.tolist(), keys.tolist())
    # Messages are in the order of keys and need that of tables.
    assert np.sort(keys).tolist() == keys[np.lexsort((kept, tables))].tolist()


@pytest.mark.parametrize("spread", [1, 2**40])
def test_ranks_get_equal_shares(spread: int) -> None:
    owners, _ = place_by_hash(3, 4).locate(
        np.zeros(40000, dtype=np.int64), np.arange(40000) * spread
    )
    counts = np.bincount(owners, minlength=4)
    assert abs(counts - 10000).max() < 500  # six standard deviations


BOUNDS = np.array([0.5, 0.01, 3.0], dtype=np.float32)
DIM = 5
seeds = st.integers(-(2**70), 2**70)
rows_of_tables = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**40)), max_size=20)


def rows(seed: int, wanted: list[tuple[int, int]]) -> Tensor:
    tables, numbers = np.array(wanted, dtype=np.int64).reshape(-1, 2).T
    return initial_rows(seed, tables, numbers, BOUNDS, DIM)


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
@example(seed=0, wanted=[(0, row) for row in (0, 2**31 - 1, 2**31, 2**62)])
@examples(60)
def test_entry_by_entry(seed: int, wanted: list[tuple[int, int]]) -> None:
    found = rows(seed, wanted)
    assert found.dtype == torch.float32
    assert found.shape == (len(wanted), DIM)
    assert found.tolist() == [
        [one_entry(seed, table, row, column) for column in range(DIM)] for table, row in wanted
    ]


@given(seed=seeds, wanted=rows_of_tables)
@examples(30)
def test_the_same_without_numba(seed: int, wanted: list[tuple[int, int]]) -> None:
    with patch.object(owners, "compiled", lambda device_type, loops: None):
        found = rows(seed, wanted)
    assert torch.equal(found, rows(seed, wanted))
