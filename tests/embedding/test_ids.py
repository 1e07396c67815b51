import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.embedding.cache import RememberedRows
from lightning_dct.embedding.messages import HALVE_EVERY, REGROUP_EVERY, RequestCode
from lightning_dct.kernels.bits import pack_bits, unpack_bits
from lightning_dct.wire.positions import PayloadError, PositionCode
from strategies_for_hypothesis import examples

UNIVERSE = 300
# More look-ups than any request here has.
MOST = UNIVERSE


def places_of(rows: list[int] | range) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def remembered(universe: int, capacity: int) -> RememberedRows:
    return RememberedRows(capacity, universe, 1, lambda places: torch.zeros(len(places), 1), torch.empty(0, 1), False)


@st.composite
def learnt(draw: st.DrawFn, universe: int = UNIVERSE) -> RequestCode:
    """A code that has learnt some rows, a few of them with a count of 0."""
    counts = draw(st.dictionaries(st.integers(0, universe - 1), st.integers(0, 70), max_size=60))
    code, rows = RequestCode(universe), sorted(counts)
    code.learn(places_of(rows), places_of([counts[row] for row in rows]))
    return code


# Some near the beginning, so that learnt rows are often among them, and anywhere; or nearly all there are.
wanted_places = st.one_of(
    st.sets(st.integers(0, 40) | st.integers(0, UNIVERSE - 1), max_size=60),
    st.sets(st.integers(0, UNIVERSE - 1), max_size=20).map(lambda left_out: set(range(UNIVERSE)) - left_out),
).map(sorted)


@given(code=learnt(), wanted=wanted_places)
@examples(60)
def test_round_trip(code: RequestCode, wanted: list[int]) -> None:
    data = code.encode(places_of(wanted))
    assert data.dtype == torch.uint8
    assert code.decode(data, len(wanted)).tolist() == wanted


@given(code=learnt(), wanted=wanted_places)
@examples(60)
def test_size_is_that_of_its_groups(code: RequestCode, wanted: list[int]) -> None:
    """The counts' bits, then for each group that is neither absent nor complete the shorter of two codes."""
    state = code.state_dict()
    group_of = dict(zip(state["rows"].tolist(), state["groups"].tolist(), strict=True))
    number = max(group_of.values(), default=-1) + 1
    groups = [[row for row, group in group_of.items() if group == which] for which in range(number)]
    asked = [sum(row in wanted for row in members) for members in groups]
    expected = 0
    for size, count in [*zip(map(len, groups), asked, strict=True), (UNIVERSE, len(wanted) - sum(asked))]:
        expected += len(f"{size:b}") if size else 0
        if 0 < count < size:
            expected += min(size, PositionCode(size, count).num_bits)
    assert code.encode(places_of(wanted)).numel() == math.ceil(expected / 8)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 255, 256, 2**40])
def test_groups_are_the_powers_of_two_below_the_counts(count: int) -> None:
    code = RequestCode(10)
    code.learn(places_of([3, 4]), places_of([0, count]))
    assert code.state_dict()["rows"].tolist() == [4]
    assert code.state_dict()["groups"].tolist() == [count.bit_length() - 1]
    assert code.decode(code.encode(places_of([1, 3, 4])), 3).tolist() == [1, 3, 4]


@pytest.mark.parametrize("universe", [0, 1, 2, 255, 256, 65535, 65536])
def test_nothing_and_everything(universe: int) -> None:
    code = RequestCode(universe)
    width = math.ceil(universe.bit_length() / 8)
    for wanted in ([], range(universe)):
        data = code.encode(places_of(wanted))
        assert data.numel() == width
        assert code.decode(data, len(wanted)).tolist() == list(wanted)
    with pytest.raises(PayloadError, match="takes"):
        code.decode(torch.zeros(width + 1, dtype=torch.uint8), 50)


def test_everything_learnt_and_everything_asked() -> None:
    code = RequestCode(50)
    code.learn(places_of(range(50)), places_of([1 + row % 9 for row in range(50)]))
    data = code.encode(places_of(range(50)))
    # Counts alone, up to 6, 12, 22, 10 (asked for once, 2-3, 4-7 and 8-9 times) and 50 ("all rows").
    assert data.numel() == math.ceil((3 + 4 + 5 + 4 + 6) / 8)
    assert code.decode(data, 50).tolist() == list(range(50))


@given(data=st.data(), capacity=st.integers(1, 60))
@examples(25)
def test_both_ends_know_the_same_code_whatever_was_asked(data: st.DataObject, capacity: int) -> None:
    user, owner = remembered(100, capacity), remembered(100, capacity)
    rows = st.sets(st.integers(0, 9) | st.integers(0, 99), max_size=30).map(sorted)
    for number, wanted in enumerate(data.draw(st.lists(rows, min_size=1, max_size=20))):
        read = owner.code.decode(user.code.encode(places_of(wanted)), len(wanted))
        assert read.tolist() == wanted
        user.admit(places_of(wanted))
        owner.admit(read)
        if number % 5 == 4:  # one end is saved and resumed
            state, owner = owner.state_dict(), remembered(100, capacity)
            owner.load_state_dict(state)
    for name, value in user.code.state_dict().items():
        assert torch.equal(value, owner.code.state_dict()[name])


def test_both_ends_regroup_and_halve_at_the_same_request() -> None:
    user, owner = remembered(40, 30), remembered(40, 30)
    random = np.random.default_rng(0)
    learnt_at, groups = [], user.code.state_dict()["groups"].tolist()
    for number in range(1, HALVE_EVERY + 2 * REGROUP_EVERY + 1):
        wanted = np.flatnonzero(random.random(40) < 1 / np.arange(1, 41))
        read = owner.code.decode(user.code.encode(wanted), len(wanted))
        assert read.tolist() == wanted.tolist()
        user.admit(wanted)
        owner.admit(read)
        if user.code.state_dict()["groups"].tolist() != groups:
            groups = user.code.state_dict()["groups"].tolist()
            learnt_at.append(number)
    assert all(number % REGROUP_EVERY == 0 or number & (number - 1) == 0 for number in learnt_at)
    # The first row is in every request: 1024 at the halving, 512 after it.
    assert user.cache.counts[user.cache.find(places_of([0]))] == HALVE_EVERY // 2 + 2 * REGROUP_EVERY


@given(code=learnt(), wanted=wanted_places, data=st.data())
@examples(60)
def test_cut_and_lengthened_requests_are_refused(code: RequestCode, wanted: list[int], data: st.DataObject) -> None:
    message = code.encode(places_of(wanted))
    shorter = message[: data.draw(st.integers(0, message.numel() - 1))]
    longer = torch.cat([message, torch.tensor(list(data.draw(st.binary(min_size=1, max_size=9))), dtype=torch.uint8)])
    for other in (shorter, longer):
        with pytest.raises(PayloadError):
            code.decode(other, MOST)


def test_a_row_asked_for_twice_is_refused() -> None:
    code, other = RequestCode(100), RequestCode(100)
    code.learn(places_of([7, 9]), places_of([1, 1]))
    once = unpack_bits(other.encode(places_of([7])), 7 + PositionCode(100, 1).num_bits)  # among "all rows"
    message = pack_bits(torch.cat([torch.tensor([0, 1], dtype=torch.uint8), once]))  # and both of the group
    with pytest.raises(PayloadError, match="has a row twice"):
        code.decode(message, MOST)


def test_errors() -> None:
    code = RequestCode(100)
    message = code.encode(places_of([3, 50]))
    with pytest.raises(PayloadError, match="claims more of them than there are"):
        code.decode(torch.tensor([101], dtype=torch.uint8), MOST)
    with pytest.raises(PayloadError, match="ends too early"):
        code.decode(message[:0], MOST)
    with pytest.raises(PayloadError, match="ends too early"):
        code.decode(message[:-1], MOST)
    with pytest.raises(PayloadError, match="positions are corrupt"):
        code.decode(torch.cat([message[:1], torch.full((message.numel() - 1,), 255, dtype=torch.uint8)]), MOST)
    with pytest.raises(PayloadError, match="claims 2 of them, for 1 look-ups"):
        code.decode(message, 1)


def test_uneven_requests_take_little_more_than_their_entropy() -> None:
    universe, lookups = 50_000, 4000
    random = np.random.default_rng(0)
    shares = 1 / np.arange(1, universe + 1) ** 1.1
    shares = random.permutation(shares / shares.sum())
    # Each row is in a request or not, nearly independently of the others.
    chances = np.clip(1 - (1 - shares) ** lookups, 1e-15, 1 - 1e-15)
    entropy = float(-(chances * np.log2(chances) + (1 - chances) * np.log2(1 - chances)).sum()) / 8
    rows, ours, plain = remembered(universe, universe), [], []
    for number in range(136):
        wanted = np.unique(random.choice(universe, lookups, p=shares))
        if number >= 128:
            ours.append(rows.code.encode(wanted).numel())
            plain.append(PositionCode(universe, wanted.size).num_bytes)
        rows.admit(wanted)
    assert entropy < np.mean(ours) < 1.22 * entropy
    assert np.mean(ours) < 0.77 * np.mean(plain)
