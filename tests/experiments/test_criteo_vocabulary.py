from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm import criteo_vocabulary
from dlrm.criteo_vocabulary import MISSING_ID, RARE_ID, ValueCounter, Vocabulary, choose_values

words = st.one_of(st.integers(0, 5), st.integers(2**32 - 3, 2**32 - 1), st.integers(0, 2**32 - 1))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(words, max_size=20), max_size=8), st.integers(1, 30))
def test_counts_are_those_of_a_dictionary(pieces: list[list[int]], pending: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteo_vocabulary, "_MIN_PENDING", pending)
        counter = ValueCounter()
        for piece in pieces:
            counter.add(np.array(piece, dtype=np.uint32))
        values, counts = counter.result()
    expected = sorted(Counter(value for piece in pieces for value in piece).items())
    assert list(zip(values.tolist(), counts.tolist(), strict=True)) == expected


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(words, st.integers(1, 9)), st.integers(1, 5), st.one_of(st.none(), st.integers(3, 12)))
def test_frequent_values_first_then_small_ones(counts: dict[int, int], min_count: int, max_rows: int | None) -> None:
    ordered = sorted(counts)
    kept = choose_values(np.uint32(ordered), np.uint32([counts[value] for value in ordered]), min_count, max_rows)
    expected = sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v))
    assert kept.tolist() == expected[: None if max_rows is None else max_rows - 2]


@settings(deadline=None, max_examples=50)
@given(st.lists(words, unique=True, max_size=20), st.lists(st.tuples(words, st.booleans()), max_size=30))
def test_looking_up_is_that_of_a_dictionary(values: list[int], wanted: list[tuple[int, bool]]) -> None:
    vocabulary = Vocabulary(np.array(values, dtype=np.uint32))
    assert len(vocabulary) == len(values) + 2
    asked = wanted + [(value, False) for value in values]
    ids = vocabulary.look_up(
        np.uint32([value for value, _ in asked]), np.array([gone for _, gone in asked], dtype=bool)
    )
    places = {value: place + 2 for place, value in enumerate(values)}
    assert ids.tolist() == [MISSING_ID if gone else places.get(value, RARE_ID) for value, gone in asked]
