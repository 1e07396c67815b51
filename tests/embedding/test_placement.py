import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dct.embedding.owners import RowOwners, place_tables
from strategies_for_hypothesis import examples

Case = tuple[list[int], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables small and large, and a number of ranks."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 900)), min_size=1, max_size=8))
    return sizes, draw(st.integers(1, 6))


def owners_by_loop(placement: RowOwners) -> list[dict[tuple[int, int], int]]:
    """For each rank the place of every row it owns: table after table, rows ascending, places without gaps."""
    places: list[dict[tuple[int, int], int]] = [{} for _ in range(placement.world_size)]
    for table, rows in enumerate(placement.table_rows):
        for row in range(rows):
            owner = (placement.first_rank[table] + row // placement.block_rows[table]) % placement.world_size
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
    assert [expected[owner][key] for key, owner in zip(every, owners, strict=True)] == places.tolist()
    for rank, owned in enumerate(expected):
        assert list(owned.values()) == list(range(len(owned)))
        tables, rows = placement.rows_of(rank, np.arange(len(owned)))
        assert list(zip(tables.tolist(), rows.tolist(), strict=True)) == list(owned)
        assert placement.tables_of(rank, np.arange(len(owned))).tolist() == [table for table, _ in owned]
        listed = [
            ((table, row), place + row - start)
            for table, start, stop, place in placement.ranges(rank)
            for row in range(start, stop)
        ]
        assert listed == list(owned.items())
        # In any order, and the same place twice.
        chosen = np.array([*range(len(owned) - 1, -1, -2), *range(0, len(owned), 3)], dtype=np.int64)
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
    blocks = sum(placement.block_rows[table] for table in range(len(sizes)) if not is_whole(placement, table))
    assert max(placement.owned_rows) <= sum(sizes) / world_size + max(whole, default=0) + blocks


@given(case=cases())
@examples(60)
def test_tables_larger_than_a_share_are_cut_and_no_others(case: Case) -> None:
    sizes, world_size = case
    placement = place_tables(sizes, world_size)
    for table, rows in enumerate(sizes):
        cut = rows > sum(sizes) / world_size and rows >= world_size > 1
        owners = {rank for rank in range(world_size) for piece in placement.ranges(rank) if piece.table == table}
        if not cut:
            assert len(owners) == 1
            continue
        # On every rank, on none more than a block above its share.
        assert owners == set(range(world_size)) or placement.block_rows[table] * (world_size - 1) >= rows
        for rank in range(world_size):
            owned = sum(piece.stop - piece.start for piece in placement.ranges(rank) if piece.table == table)
            assert owned <= rows / world_size + placement.block_rows[table]
            assert owned < rows


@given(case=cases())
@examples(60)
def test_lookups_are_balanced_beside_memory(case: Case) -> None:
    sizes, world_size = case
    placement = place_tables(sizes, world_size)
    memory, traffic = [0.0] * world_size, [0.0] * world_size
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
