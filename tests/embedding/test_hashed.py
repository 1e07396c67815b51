import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.embedding.owners import place_by_hash
from strategies_for_hypothesis import examples

ids = st.integers(0, 50) | st.integers(0, 2**63 - 1) | st.sampled_from([2**58, 2**62 - 1, 2**62, 2**63 - 1])


@given(num_tables=st.integers(1, 40), world_size=st.integers(1, 5), data=st.data())
@examples(80)
def test_keys_lead_to_their_tables_and_ids_and_back(num_tables: int, world_size: int, data: st.DataObject) -> None:
    placement = place_by_hash(num_tables, world_size)
    drawn = data.draw(st.lists(st.tuples(st.integers(0, num_tables - 1), ids), unique=True, min_size=1, max_size=20))
    tables, rows = np.array(drawn, dtype=np.int64).T
    owners, keys = placement.locate(tables, rows)
    assert all(0 <= key < universe for key in keys.tolist() for universe in placement.owned_rows)
    assert set(owners.tolist()) <= set(range(world_size))
    assert len(set(keys.tolist())) == len(drawn)
    found, kept = placement.rows_of(0, keys)
    assert found.tolist() == placement.tables_of(0, keys).tolist() == tables.tolist()
    room = 2**63 // 2 ** (num_tables - 1).bit_length()
    assert all(new == old if old < room else new < room for old, new in zip(rows.tolist(), kept.tolist(), strict=True))
    again, same = placement.locate(found, kept)
    assert (again.tolist(), same.tolist()) == (owners.tolist(), keys.tolist())
    # Messages are in the order of keys and need that of tables.
    assert np.sort(keys).tolist() == keys[np.lexsort((kept, tables))].tolist()


@pytest.mark.parametrize("spread", [1, 2**40])
def test_ranks_get_equal_shares(spread: int) -> None:
    owners, _ = place_by_hash(3, 4).locate(np.zeros(40000, dtype=np.int64), np.arange(40000) * spread)
    counts = np.bincount(owners, minlength=4)
    assert abs(counts - 10000).max() < 500  # six standard deviations
