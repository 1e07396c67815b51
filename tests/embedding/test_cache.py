"""Which rows are remembered, and what of them: against dicts."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distributed.harness import RankFailure
from embedding.plain_directory import PlainCache
from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding import store as store_module
from lightning_dct.embedding.cache import UNBOUNDED, RowCache
from lightning_dct.embedding.store import RowStore, add_entries, bytes_a_row, default_room
from lightning_dct.wire.positions import PayloadError
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
    cache = RowCache(capacity)
    plain = PlainCache(capacity)
    for wanted in history:
        before = dict(plain.slots)
        evicted = plain.admit(wanted)
        admission = cache.admit(asked(wanted))
        after = slots_of(cache)
        assert after == plain.slots
        assert list(after) == sorted(after)
        assert admission.slots.tolist() == [after[row] for row in wanted]
        assert admission.new.tolist() == [row not in before for row in wanted]
        assert dict(
            zip(admission.evicted.tolist(), admission.evicted_slots.tolist(), strict=True)
        ) == {row: before[row] for row in evicted}
        assert len(cache) == len(after) <= max(capacity, len(wanted))
        assert cache.counts[list(after.values())].tolist() == [plain.counts[row] for row in after]
        assert cache.find(asked([*after, UNIVERSE])).tolist() == [*after.values(), -1]


@given(capacity=capacities, history=requests, cut=st.integers(0, 25))
@examples(60)
def test_a_resumed_cache_goes_on_as_the_other_end_does(
    capacity: int, history: list[list[int]], cut: int
) -> None:
    one = RowCache(capacity)
    other = RowCache(capacity)
    for number, wanted in enumerate(history):
        if number == cut:
            saved = other.state_dict()
            frozen = {
                name: value.clone()
                for name, value in saved.items()
                if isinstance(value, torch.Tensor)
            }
            other = RowCache(capacity)
            other.load_state_dict(saved)
        if number % 4 == 3:
            one.counts >>= 1
            other.counts >>= 1
        ours = one.admit(asked(wanted))
        theirs = other.admit(asked(wanted))
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine.tolist() == yours.tolist()
    ours = one.state_dict()
    theirs = other.state_dict()
    assert ours.pop("requests") == theirs.pop("requests") == len(history)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if cut < len(history):
        assert all(torch.equal(saved[name], value) for name, value in frozen.items()), (
            "a saved state must not change"
        )


@pytest.mark.parametrize("last_used", [2**31, 2**31 + 5])
def test_very_many_requests(last_used: int) -> None:
    cache = RowCache(2)
    cache.admit(asked([1, 2]))
    state = cache.state_dict()
    cache.load_state_dict(
        {**state, "requests": last_used, "last_used": state["last_used"] + last_used - 1}
    )
    cache.admit(asked([2]))
    assert cache.admit(asked([3])).evicted.tolist() == [1]


def test_many_rows_are_found_where_they_were_put() -> None:
    """Rows far apart and next to each other, while most of a cache comes and goes."""
    cache = RowCache(3000)
    generator = np.random.default_rng(0)
    where: dict[int, int] = {}
    for _ in range(60):
        near = generator.integers(0, 2000, 400)
        far = generator.integers(0, 2**40, 400)
        wanted = np.unique(np.concatenate([near, far, generator.choice(list(where) or [0], 300)]))
        admission = cache.admit(wanted)
        assert all(
            where.pop(row) == slot
            for row, slot in zip(*map(np.ndarray.tolist, admission[2:4]), strict=True)
        )
        for row, slot, new in zip(*map(np.ndarray.tolist, (wanted, *admission[:2])), strict=True):
            assert (row not in where) if new else (where[row] == slot)
            where[row] = slot
        assert slots_of(cache) == where


PLACES = 30
DIM = 3
histories = st.lists(
    st.sets(st.integers(0, PLACES - 1), max_size=10).map(sorted), min_size=1, max_size=15
)


PEERS = {0: PLACES, 2: PLACES}


def initial(peer: int, places: np.ndarray) -> Tensor:
    return torch.from_numpy(places)[:, None] * 10.0 + torch.arange(DIM) + 0.5 + 1000 * peer


def remembered(
    capacity: int, with_residual: bool = True, dtype: torch.dtype = torch.float32
) -> RowStore:
    return RowStore(capacity, PEERS, 3, 2, initial, torch.empty(0, DIM, dtype=dtype), with_residual)


def places_of(rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


Named = tuple[int, int]  # a row: peer and place
named_histories = st.lists(
    st.sets(st.tuples(st.sampled_from(sorted(PEERS)), st.integers(0, 9)), max_size=10).map(sorted),
    min_size=1,
    max_size=15,
)


def by_peer(wanted: list[Named]) -> dict[int, np.ndarray]:
    return {peer: places_of([place for one, place in wanted if one == peer]) for peer in PEERS}


@given(
    capacity=st.integers(1, 12),
    history=named_histories,
    resumed_at=st.none() | st.integers(0, 14),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@examples(60)
def test_the_same_as_dicts(
    capacity: int, history: list[list[Named]], resumed_at: int | None, dtype: torch.dtype
) -> None:
    """One room for the rows of all peers; an owner forgets what it is told of; and never more room
    than due.
    """
    rows = remembered(capacity, dtype=dtype)
    mirror = remembered(UNBOUNDED, with_residual=False, dtype=dtype)
    copies: dict[Named, Tensor] = {}
    residuals: dict[Named, Tensor] = {}
    last_used: dict[Named, int] = {}
    largest = 0
    number = 1.0
    for step, wanted in enumerate(history):
        if step == resumed_at:
            state = rows.state_dict()
            rows = remembered(capacity, dtype=dtype)
            rows.load_state_dict(state)
            assert len(rows.copies) == rows.cache.num_slots
        slots, evicted = rows.admit(by_peer(wanted))
        for peer, (places, residual) in evicted.items():
            assert places.tolist() == sorted(places.tolist())
            assert (residual.shape, residual.dtype) == ((len(places), DIM), dtype)
            for place, left in zip(places.tolist(), residual, strict=True):
                assert torch.equal(left, residuals.pop((peer, place)))
                del copies[peer, place], last_used[peer, place]
            mirror.release(peer, places)
        same, nothing = mirror.admit(by_peer(wanted))
        assert all(not places.size for places, _ in nothing.values())
        # The least recently requested rows have gone, and only if there was no room.
        gone = [
            key
            for places in evicted
            for key in [(places, place) for place in evicted[places].places.tolist()]
        ]
        assert not gone or len(copies.keys() | set(wanted)) == max(capacity, len(wanted))
        for peer, own in by_peer(wanted).items():
            for place, slot, other in zip(
                own.tolist(), slots[peer].tolist(), same[peer].tolist(), strict=True
            ):
                key = (peer, place)
                assert torch.equal(
                    rows.copies[slot],
                    copies.get(key, initial(peer, places_of([place]))[0].to(dtype)),
                )
                assert torch.equal(
                    rows.residual[slot], residuals.get(key, torch.zeros(DIM, dtype=dtype))
                )
                if key not in copies:
                    assert torch.equal(
                        mirror.copies[other], initial(peer, places_of([place]))[0].to(dtype)
                    )
                copies[key], residuals[key] = (
                    torch.full((DIM,), one, dtype=dtype) for one in (number, -number)
                )
                rows.copies[slot] = copies[key]
                rows.residual[slot] = residuals[key]
                number += 1
                last_used[key] = step
        largest = max(largest, len(wanted))
        for store in (rows, mirror):
            there = [
                (peer, place) for peer in PEERS for place in store.cache.contents(peer)[0].tolist()
            ]
            assert there == sorted(copies)
        assert (
            rows.cache.num_slots <= len(rows.copies) == len(rows.residual) <= max(capacity, largest)
        )
        assert mirror.residual.shape[1] == 0


def test_the_oldest_rows_of_all_peers_go_first() -> None:
    rows = remembered(3)
    for peer, place in ((0, 7), (2, 7), (0, 1), (2, 7)):
        rows.admit({one: places_of([place] if one == peer else []) for one in PEERS})
    _, evicted = rows.admit({0: places_of([9]), 2: places_of([0])})
    assert {peer: gone.places.tolist() for peer, gone in evicted.items()} == {0: [1, 7], 2: []}


def test_an_owner_refuses_to_forget_what_it_does_not_have() -> None:
    mirror = remembered(UNBOUNDED, with_residual=False)
    mirror.admit({0: places_of([1]), 2: places_of([])})
    with pytest.raises(PayloadError, match="Rank 2 has evicted rows that it had not: 1 rows"):
        mirror.release(2, places_of([1]))


def test_memory_doubles_up_to_the_capacity() -> None:
    rows = remembered(20)
    rooms = []
    for row in range(PLACES):
        slots, _ = rows.admit({0: places_of([row]), 2: places_of([])})
        assert len(rows.copies) == len(rows.residual) == rows.cache.num_slots == min(row + 1, 20)
        assert not rows.residual[slots[0]].any()
        rows.copies[slots[0]] = rows.residual[slots[0]] = float(row)
        rooms.append(rows.copies.untyped_storage().nbytes() // rows.copies[:1].nbytes)
        last = torch.arange(max(row - 19, 0), row + 1).float()
        assert torch.equal(rows.residual[:, 0].sort().values, last)
    assert sorted(set(rooms)) == [1, 2, 4, 8, 16, 20]
    assert rooms == sorted(rooms)


@pytest.mark.parametrize("with_residual", [True, False])
def test_a_saved_state_is_frozen_and_whole(with_residual: bool) -> None:
    rows = remembered(8, with_residual)
    for wanted in ([1, 4, 9], [4], [2, 4]):
        slots, _ = rows.admit({0: places_of(wanted)})
        rows.copies[slots[0]] += 1
        if with_residual:
            rows.residual[slots[0]] -= 2
    rows.thresholds[2, 1] = 0.25
    state = rows.state_dict()
    assert len(state["copies"]) == 4, "room that was made ahead is not saved"
    kept = {name: state[name].clone() for name in ("thresholds", "copies", "residual")}
    resumed = remembered(8, with_residual)
    resumed.load_state_dict(state)
    for one in (rows, resumed):
        one.copies.zero_()
        one.thresholds[:] = 7
        one.admit({2: places_of([12, 13])})
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    resumed.load_state_dict(state)
    assert resumed.thresholds.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.25]]
    assert torch.equal(resumed.copies, kept["copies"])
    assert torch.equal(resumed.residual, kept["residual"])


def bytes_in(thing: Any, seen: set[int]) -> int:
    """Bytes of all tensors and arrays, however deep, each once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, np.ndarray):
        return thing.nbytes if thing.base is None else 0
    if isinstance(thing, dict):
        return sum(bytes_in(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple) or type(thing).__name__ == "deque":
        return sum(bytes_in(value, seen) for value in thing)
    return (
        bytes_in(vars(thing), seen)
        if type(thing).__name__ in ("RowStore", "RowCache", "RequestCode")
        else 0
    )


def memory_beside_own_rows(rows: int, dim: int, batch: int) -> tuple[float, float, bool]:
    """What this rank remembers, in shares of rows; and beside that a share's bytes of rows, and
    whether it is full.
    """
    tables = ShardedEmbeddingBags([rows] * 4, dim)
    with mock.patch.object(store_module, "LEAST_BYTES", 0):
        tables.materialize()
        room = tables.room()
    share = 4 * rows / dist.get_world_size() * dim * 4
    largest = 0.0
    for step in range(40):
        numbers = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tables(torch.randint(0, rows, (batch, 4), generator=numbers)).sum().backward()
        tables.weight.grad = None
        largest = max(largest, bytes_in([tables.own_copies, tables.peer_copies], set()) / share)
    return largest, room, len(tables.own_copies.cache)


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_does_not_grow_with_the_ranks(ranks: Any, world_size: int) -> None:
    """Copies, residuals, mirrors and the index of both ends, in shares of this rank's own rows."""
    for shares, room, held in ranks(world_size).run(memory_beside_own_rows, 6000, 16, 300):
        assert room == held  # it is full
        assert 1 < shares <= 2


def test_the_default_room() -> None:
    assert default_room(10**6, 16, 64) == 2 * 10**6 * 64 // bytes_a_row(16)
    assert default_room(10, 16, 64) == (64 << 20) // bytes_a_row(16)


def request_twice(cache_rows: int, pool_first: bool, backward: bool) -> list[float]:
    tables = ShardedEmbeddingBags(
        [40], DIM, cache_rows=cache_rows, density=1.0, value_format="fp32"
    )
    tables.materialize()
    first = tables.request(torch.arange(10).view(-1, 1))
    pooled = first.pooled() if pool_first else None
    second = tables.request(torch.arange(30, 40).view(-1, 1)).pooled()
    pooled = first.pooled() if pooled is None else pooled
    if backward:
        (pooled - second).sum().backward()
    return tables.weight.grad.to_dense().sum(dim=0).tolist()


@pytest.mark.parametrize("pool_first", [True, False])
def test_rows_must_stay_until_their_backward(ranks: Any, pool_first: bool) -> None:
    found = ranks(2).run(request_twice, 20, pool_first, True)
    assert sum(torch.tensor(found)).tolist() == [0.0] * DIM
    # Pooling them would write into the copies of other rows.
    with pytest.raises(
        RankFailure, match=r"between a request and its backward.*`cache_rows` \(5\).*Raise it"
    ):
        ranks(2).run(request_twice, 5, pool_first, pool_first)


@given(
    data=st.data(),
    slots=st.lists(st.integers(0, 9), unique=True, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@examples(60)
def test_add_entries(data: st.DataObject, slots: list[int], dtype: torch.dtype) -> None:
    rows = torch.arange(10.0 * DIM, dtype=dtype).view(10, DIM)
    expected = rows.clone()
    positions = (
        data.draw(st.lists(st.integers(0, max(len(slots) * DIM - 1, 0)), unique=True))
        if slots
        else []
    )
    values = [index + 0.25 for index in range(len(positions))]
    for position, value in zip(positions, values, strict=True):
        expected[slots[position // DIM], position % DIM] += value
    numbers = torch.tensor(positions, dtype=torch.int64)
    add_entries(
        rows,
        torch.tensor([DIM * (slot - row) for row, slot in enumerate(slots)], dtype=torch.int64),
        numbers,
        torch.tensor(values, dtype=torch.float32),
    )
    assert torch.equal(rows, expected)


def copies_of(pooled: list[int]) -> list[Tensor]:
    """This rank's copies of the others, and the others' copies of its rows, after looks-up pooled
    so many times.
    """
    tables = ShardedEmbeddingBags([40, 30], DIM, density=0.3, cache_rows=100)
    tables.materialize()
    optimizer = torch.optim.SGD(tables.parameters(), 1.0)
    for step, times in enumerate(pooled):
        lookup = tables.request(torch.arange(step, 20 + step).view(-1, 2))
        outputs = [lookup.pooled() for _ in range(times)]
        if outputs:
            sum(output.square().sum() for output in outputs).backward()
            assert all(torch.equal(output, outputs[0]) for output in outputs)
            optimizer.step()
            optimizer.zero_grad()
    state = tables.compression_state()
    return [state[part]["copies"] for part in ("held", "mirrors")]


def test_both_ends_have_the_same_copies_however_often_a_look_up_is_pooled(ranks: Any) -> None:
    """Oracle: the owner's copies of what the other rank has, bitwise."""
    (held_0, mirrors_0), (held_1, mirrors_1) = ranks(2).run(copies_of, [1, 2, 0, 1, 3, 0])
    assert torch.equal(held_0, mirrors_1)
    assert torch.equal(held_1, mirrors_0)
    assert held_0.abs().sum() > 0
