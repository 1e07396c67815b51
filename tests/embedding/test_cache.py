from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embedding.plain_directory import PlainCache
from lightning_dct.embedding import cache as cache_module
from lightning_dct.embedding.cache import RowCache
from strategies_for_hypothesis import examples

UNIVERSE = 24
requests = st.lists(st.sets(st.integers(0, UNIVERSE - 1), max_size=12).map(sorted), max_size=25)
capacities = st.integers(1, 14)


def slots_of(cache: RowCache) -> dict[int, int]:
    rows, slots = cache.contents()
    return dict(zip(rows.tolist(), slots.tolist(), strict=True))


def asked(rows: list[int]) -> Any:
    return np.array(rows, dtype=np.int64)


@given(capacity=capacities, history=requests)
@examples(60)
def test_the_same_as_a_dict(capacity: int, history: list[list[int]]) -> None:
    cache, plain = RowCache(capacity), PlainCache(capacity)
    for wanted in history:
        before = dict(plain.slots)
        evicted = plain.admit(wanted)
        admission = cache.admit(asked(wanted))
        after = slots_of(cache)
        assert after == plain.slots
        assert list(after) == sorted(after)
        assert admission.slots.tolist() == [after[row] for row in wanted]
        assert admission.new.tolist() == [row not in before for row in wanted]
        assert dict(zip(admission.evicted.tolist(), admission.evicted_slots.tolist(), strict=True)) == {
            row: before[row] for row in evicted
        }
        assert len(cache) == len(after) <= max(capacity, len(wanted))
        assert cache.counts[list(after.values())].tolist() == [plain.counts[row] for row in after]
        assert cache.find(asked([*after, UNIVERSE])).tolist() == [*after.values(), -1]


@given(capacity=capacities, history=requests, cut=st.integers(0, 25))
@examples(60)
def test_a_resumed_cache_goes_on_as_the_other_end_does(capacity: int, history: list[list[int]], cut: int) -> None:
    one, other = RowCache(capacity), RowCache(capacity)
    for number, wanted in enumerate(history):
        if number == cut:
            saved = other.state_dict()
            frozen = {name: value.clone() for name, value in saved.items() if isinstance(value, torch.Tensor)}
            other = RowCache(capacity)
            other.load_state_dict(saved)
        if number % 4 == 3:
            one.counts >>= 1
            other.counts >>= 1
        ours, theirs = one.admit(asked(wanted)), other.admit(asked(wanted))
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine.tolist() == yours.tolist()
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.pop("requests") == theirs.pop("requests") == len(history)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if cut < len(history):
        assert all(torch.equal(saved[name], value) for name, value in frozen.items()), "a saved state must not change"


@given(capacity=capacities, history=requests)
@examples(40)
def test_with_and_without_numba_slots_are_the_same(capacity: int, history: list[list[int]]) -> None:
    caches = RowCache(capacity), RowCache(capacity)
    for wanted in history:
        ours = caches[0].admit(asked(wanted))
        with mock.patch.object(cache_module, "rows_kernel", return_value=None):
            theirs = caches[1].admit(asked(wanted))
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]


def test_counts_are_halved_and_start_anew_after_an_eviction() -> None:
    cache = RowCache(2)
    for _ in range(5):
        cache.admit(asked([3, 6]))
    cache.admit(asked([6]))
    assert cache.counts[cache.find(asked([3, 6]))].tolist() == [5, 6]
    cache.counts >>= 1
    cache.admit(asked([1, 2]))
    cache.admit(asked([3]))
    assert slots_of(cache).keys() == {2, 3}
    assert cache.counts.tolist() == [1, 1]


@pytest.mark.parametrize("last_used", [2**31, 2**31 + 5])
def test_very_many_requests(last_used: int) -> None:
    cache = RowCache(2)
    cache.admit(asked([1, 2]))
    state = cache.state_dict()
    cache.load_state_dict({**state, "requests": last_used, "last_used": state["last_used"] + last_used - 1})
    cache.admit(asked([2]))
    assert cache.admit(asked([3])).evicted.tolist() == [1]


def test_many_rows_are_found_where_they_were_put() -> None:
    """Rows far apart and next to each other, while most of a cache comes and goes."""
    cache, generator = RowCache(3000), np.random.default_rng(0)
    where: dict[int, int] = {}
    for _ in range(60):
        near, far = generator.integers(0, 2000, 400), generator.integers(0, 2**40, 400)
        wanted = np.unique(np.concatenate([near, far, generator.choice(list(where) or [0], 300)]))
        admission = cache.admit(wanted)
        assert all(where.pop(row) == slot for row, slot in zip(*map(np.ndarray.tolist, admission[2:]), strict=True))
        for row, slot, new in zip(*map(np.ndarray.tolist, (wanted, *admission[:2])), strict=True):
            assert (row not in where) if new else (where[row] == slot)
            where[row] = slot
        assert slots_of(cache) == where
