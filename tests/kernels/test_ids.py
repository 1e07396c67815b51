"""Distinct ids and slots of rows: the compiled loops find what numpy does."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.embedding import bags, cache, messages
from lightning_dct.wire.positions import PayloadError
from strategies_for_hypothesis import examples

pytest.importorskip("numba")
from lightning_dct.kernels import numba_ids

keys = st.lists(
    st.integers(0, 3) | st.integers(2000, 2100) | st.integers(0, 2**63 - 1), max_size=60
)


@given(keys)
@examples(100)
def test_distinct_keys(given_keys: list[int]) -> None:
    """Oracle: numpy."""
    array = np.array(given_keys, dtype=np.int64)
    expected = np.unique(array, return_inverse=True)
    for number in (None, 1 + max(given_keys, default=0)):
        assert all(map(np.array_equal, numba_ids.distinct(array, number), expected))
        with without_numba():
            assert all(map(np.array_equal, bags.distinct(array, number), expected))


@contextmanager
def without_numba() -> Iterator[None]:
    with (
        patch.object(bags, "compiled", lambda *_, **__: None),
        patch.object(cache, "compiled", lambda *_, **__: None),
        patch.object(messages, "compiled", lambda *_, **__: None),
    ):
        yield


rows = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=12)


@given(requests=st.lists(rows, max_size=12), capacity=st.integers(3, 60))
@examples(60)
def test_slots_of_rows(requests: list[set[tuple[int, int]]], capacity: int) -> None:
    """Oracle: the same cache in numpy."""
    compiled = cache.RowCache(capacity, with_peers=True)
    plain = cache.RowCache(capacity, with_peers=True)
    every = np.array([(peer, row) for peer in range(3) for row in range(41)]).T
    for request in requests:
        peers, wanted = np.array(sorted(request)).T
        found = compiled.admit(wanted, peers=peers)
        with without_numba():
            expected = plain.admit(wanted, peers=peers)
            slots = plain.find(every[1], every[0])
        assert all(map(np.array_equal, found, expected))
        assert np.array_equal(compiled.find(every[1], every[0]), slots)


@given(
    universe=st.integers(0, 400),
    counts=st.dictionaries(st.integers(0, 399), st.integers(0, 70), max_size=200),
    wanted=st.sets(st.integers(0, 399), max_size=350),
    harm=st.none() | st.tuples(st.integers(0, 60), st.integers(1, 255)),
)
@examples(150)
def test_requests(
    universe: int, counts: dict[int, int], wanted: set[int], harm: tuple[int, int] | None
) -> None:
    """Oracle: the bytes and places of the same code in numpy, and its errors."""
    code = messages.RequestCode(universe)
    rows = sorted(row for row in counts if row < universe)
    code.learn(np.array(rows, np.int64), np.array([counts[row] for row in rows], np.int64))
    places = np.array(sorted(place for place in wanted if place < universe), dtype=np.int64)
    data = code.encode(places)
    with without_numba():
        assert torch.equal(data, code.encode(places))
    if harm is not None and harm[0] < data.numel():
        data[harm[0]] ^= harm[1]
    found = outcome_of(code, data)
    with without_numba():
        assert found == outcome_of(code, data)
    assert harm is not None or found == places.tolist()


def outcome_of(code: messages.RequestCode, data: torch.Tensor) -> list[int] | str:
    try:
        return code.decode(data, 350).tolist()
    except PayloadError as error:
        return str(error)
