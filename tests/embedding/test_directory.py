from hypothesis import given
from hypothesis import strategies as st

from embedding.plain_directory import PlainDirectory
from embedding.test_cache import asked, slots_of
from lightning_dct.embedding.growing import RowDirectory
from strategies_for_hypothesis import examples

# Few keys, so that they come again, and the largest.
keys = st.integers(0, 20) | st.sampled_from([2**62, 2**63 - 2, 2**63 - 1])
histories = st.lists(st.sets(keys, max_size=10).map(sorted), max_size=20)


def rows_of(directory: RowDirectory) -> dict[int, int]:
    return slots_of(directory.rows)


@given(
    capacity=st.integers(1, 12),
    admit_after=st.integers(1, 3),
    history=histories,
    resumed_at=st.integers(0, 20),
)
@examples(80)
def test_the_same_as_dicts(
    capacity: int, admit_after: int, history: list[list[int]], resumed_at: int
) -> None:
    directory = RowDirectory(capacity, admit_after)
    plain = PlainDirectory(capacity, admit_after)
    for number, wanted in enumerate(history):
        if number == resumed_at:
            saved = directory.state_dict()
            directory = RowDirectory(capacity, admit_after)
            directory.load_state_dict(saved)
        before = rows_of(directory)
        made, evicted = plain.request(wanted)
        keys, slots, gone = directory.request(asked(wanted))
        assert (keys.tolist(), sorted(gone.tolist())) == (made, sorted(evicted))
        assert rows_of(directory) == plain.rows.slots
        assert slots.tolist() == [plain.rows.slots[key] for key in made]
        assert directory.rows.find(asked(wanted)).tolist() == [
            plain.rows.slots.get(key, -1) for key in wanted
        ]
        # Never more rows than there is room for, whatever is requested; who stays, stays where it
        # was.
        assert len(plain.rows.slots) <= capacity
        assert directory.rows.num_slots <= capacity
        assert all(
            rows_of(directory)[key] == slot for key, slot in before.items() if key not in evicted
        )


@given(
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    capacity=st.integers(1, 12),
    history=histories,
    admit_after=st.integers(1, 3),
)
@examples(60)
def test_other_owners_merge_the_newest(
    worlds: tuple[int, int], capacity: int, history: list[list[int]], admit_after: int
) -> None:
    before, after = worlds
    olds = [RowDirectory(100, admit_after) for _ in range(before)]
    for wanted in history:
        for rank, old in enumerate(olds):
            old.request(asked([key for key in wanted if key % before == rank]))
    states = [old.state_dict() for old in olds]
    last = {key: number for number, wanted in enumerate(history) for key in wanted}
    for rank in range(after):
        new = RowDirectory(capacity, admit_after)
        new.merge(states, lambda keys, rank=rank: keys % after == rank)
        own = sorted(key for old in olds for key in rows_of(old) if key % after == rank)
        expected = sorted(own, key=lambda key: (-last[key], key))[:capacity]
        assert sorted(rows_of(new)) == sorted(expected)
        # Counts go on, too: an id that was seen often enough but for one time gets its row now.
        counted = [
            {key: old.counted.counts[slot] for key, slot in slots_of(old.counted).items()}
            for old in olds
        ]
        due = [
            key
            for counts in counted
            for key, count in counts.items()
            if count == admit_after - 1 and key % after == rank and key not in own
        ]
        if len(own) + len(due) <= capacity and sum(map(len, counted)) <= capacity:
            assert new.request(asked(sorted(due)))[0].tolist() == sorted(due)
