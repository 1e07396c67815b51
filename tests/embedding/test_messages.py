"""Requests for rows, and messages about their changes."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from differences import assert_same
from lightning_dct.compress.threshold import nudge
from lightning_dct.embedding import messages as changes_module
from lightning_dct.embedding import on_device
from lightning_dct.embedding.messages import (
    HALVE_EVERY,
    REGROUP_EVERY,
    Message,
    RequestCode,
    RowSums,
    decode_whole,
    encode_whole,
    message_about,
    whole_num_bytes,
)
from lightning_dct.embedding.store import RowStore
from lightning_dct.kernels import cpu_kernel, positions_of
from lightning_dct.kernels.bits import pack_bits, unpack_bits
from lightning_dct.kernels.plain import SMALLEST_THRESHOLD
from lightning_dct.reference import Settings, send_rows
from lightning_dct.wire.payload import HEADER, unpack_payload
from lightning_dct.wire.positions import PayloadError, PositionCode
from strategies_for_hypothesis import FORMATS, examples

UNIVERSE = 300
# More look-ups than any request here has.
MOST = UNIVERSE


def places_of(rows: list[int] | range) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


class Remembered(RowStore):
    """A store for one peer, whose code it has at hand."""

    def __init__(self, universe: int, capacity: int) -> None:
        empty = torch.empty(0, 1)
        super().__init__(
            capacity,
            {0: universe},
            1,
            1,
            lambda _, places: torch.zeros(len(places), 1),
            empty,
            with_residual=False,
        )
        self.code = self.codes[0]

    def request(self, wanted: Any) -> None:
        self.admit({0: places_of(wanted)})
        self.learn()


def remembered(universe: int, capacity: int) -> Remembered:
    return Remembered(universe, capacity)


@st.composite
def learnt(draw: st.DrawFn) -> RequestCode:
    """A code that has learnt some rows, a few of them with a count of 0."""
    counts = draw(st.dictionaries(st.integers(0, UNIVERSE - 1), st.integers(0, 70), max_size=60))
    code = RequestCode(UNIVERSE)
    rows = sorted(counts)
    code.learn(places_of(rows), places_of([counts[row] for row in rows]))
    return code


# Some near the beginning, so that learnt rows are often among them, and anywhere; or nearly all
# there are.
wanted_places = st.one_of(
    st.sets(st.integers(0, 40) | st.integers(0, UNIVERSE - 1), max_size=60),
    st.sets(st.integers(0, UNIVERSE - 1), max_size=20).map(
        lambda left_out: set(range(UNIVERSE)) - left_out
    ),
).map(sorted)


@given(code=learnt(), wanted=wanted_places)
@examples(60)
def test_size_is_that_of_its_groups(code: RequestCode, wanted: list[int]) -> None:
    """The counts' bits, then for each group that is neither absent nor complete the shorter of two
    codes.

    And what is asked for is read back.
    """
    state = code.state_dict()
    group_of = dict(zip(state["rows"].tolist(), state["groups"].tolist(), strict=True))
    number = max(group_of.values(), default=-1) + 1
    groups = [[row for row, group in group_of.items() if group == which] for which in range(number)]
    asked = [sum(row in wanted for row in members) for members in groups]
    expected = 0
    for size, count in [
        *zip(map(len, groups), asked, strict=True),
        (UNIVERSE, len(wanted) - sum(asked)),
    ]:
        expected += len(f"{size:b}") if size else 0
        if 0 < count < size:
            expected += min(size, PositionCode(size, count).num_bits)
    data = code.encode(places_of(wanted))
    assert (data.dtype, data.numel()) == (torch.uint8, math.ceil(expected / 8))
    assert code.decode(data, len(wanted)).tolist() == wanted


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
    # Counts alone, up to 6, 12, 22, 10 (asked for once, 2-3, 4-7 and 8-9 times) and 50 ("all
    # rows").
    assert data.numel() == math.ceil((3 + 4 + 5 + 4 + 6) / 8)
    assert code.decode(data, 50).tolist() == list(range(50))


@given(data=st.data(), capacity=st.integers(1, 60))
@examples(25)
def test_both_ends_know_the_same_code_whatever_was_asked(
    data: st.DataObject, capacity: int
) -> None:
    user = remembered(100, capacity)
    owner = remembered(100, capacity)
    rows = st.sets(st.integers(0, 9) | st.integers(0, 99), max_size=30).map(sorted)
    for number, wanted in enumerate(data.draw(st.lists(rows, min_size=1, max_size=20))):
        read = owner.code.decode(user.code.encode(places_of(wanted)), len(wanted))
        assert read.tolist() == wanted
        user.request(wanted)
        owner.request(read)
        if number % 5 == 4:  # one end is saved and resumed
            state = owner.state_dict()
            owner = remembered(100, capacity)
            owner.load_state_dict(state)
    assert_same(user.code.state_dict(), owner.code.state_dict())


def test_both_ends_regroup_and_halve_at_the_same_request() -> None:
    user = remembered(40, 30)
    owner = remembered(40, 30)
    random = np.random.default_rng(0)
    learnt_at = []
    groups = user.code.state_dict()["groups"].tolist()
    for number in range(1, HALVE_EVERY + 2 * REGROUP_EVERY + 1):
        wanted = np.flatnonzero(random.random(40) < 1 / np.arange(1, 41))
        read = owner.code.decode(user.code.encode(wanted), len(wanted))
        assert read.tolist() == wanted.tolist()
        user.request(wanted)
        owner.request(read)
        if user.code.state_dict()["groups"].tolist() != groups:
            groups = user.code.state_dict()["groups"].tolist()
            learnt_at.append(number)
    assert all(number % REGROUP_EVERY == 0 or number & (number - 1) == 0 for number in learnt_at)
    # The first row is in every request: 1024 at the halving, 512 after it.
    assert user.cache.counts[user.find(0, places_of([0]))] == HALVE_EVERY // 2 + 2 * REGROUP_EVERY


@given(code=learnt(), wanted=wanted_places, data=st.data())
@examples(60)
def test_cut_and_lengthened_requests_are_refused(
    code: RequestCode, wanted: list[int], data: st.DataObject
) -> None:
    message = code.encode(places_of(wanted))
    shorter = message[: data.draw(st.integers(0, message.numel() - 1))]
    longer = torch.cat(
        [
            message,
            torch.tensor(list(data.draw(st.binary(min_size=1, max_size=9))), dtype=torch.uint8),
        ]
    )
    for other in (shorter, longer):
        with pytest.raises(PayloadError):
            code.decode(other, MOST)


def test_a_row_asked_for_twice_is_refused() -> None:
    code = RequestCode(100)
    other = RequestCode(100)
    code.learn(places_of([7, 9]), places_of([1, 1]))
    # Among "all rows".
    once = unpack_bits(other.encode(places_of([7])), 7 + PositionCode(100, 1).num_bits)
    # And both of the group.
    message = pack_bits(torch.cat([torch.tensor([0, 1], dtype=torch.uint8), once]))
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
        code.decode(
            torch.cat([message[:1], torch.full((message.numel() - 1,), 255, dtype=torch.uint8)]),
            MOST,
        )
    with pytest.raises(PayloadError, match="claims 2 of them, for 1 look-ups"):
        code.decode(message, 1)


def test_uneven_requests_take_little_more_than_their_entropy() -> None:
    universe = 50_000
    lookups = 4000
    random = np.random.default_rng(0)
    shares = 1 / np.arange(1, universe + 1) ** 1.1
    shares = random.permutation(shares / shares.sum())
    # Each row is in a request or not, nearly independently of the others.
    chances = np.clip(1 - (1 - shares) ** lookups, 1e-15, 1 - 1e-15)
    entropy = float(-(chances * np.log2(chances) + (1 - chances) * np.log2(1 - chances)).sum()) / 8
    rows = remembered(universe, universe)
    ours = []
    plain = []
    for number in range(136):
        wanted = np.unique(random.choice(universe, lookups, p=shares))
        if number >= 128:
            ours.append(rows.code.encode(wanted).numel())
            plain.append(PositionCode(universe, wanted.size).num_bytes)
        rows.request(wanted)
    assert entropy < np.mean(ours) < 1.22 * entropy
    assert np.mean(ours) < 0.77 * np.mean(plain)


NUM_TABLES = 4
Case = tuple[Message, Tensor, Settings]


def read(message: Message, payload: Tensor) -> tuple[Tensor, Tensor]:
    unpacked = unpack_payload(message.layout, payload)
    return unpacked.positions, unpacked.values


class Sent(NamedTuple):
    payload: Tensor
    positions: Tensor
    received: Tensor
    left: Tensor  # at these positions


def compress_changes(accumulated: Tensor, message: Message, thresholds: np.ndarray) -> Sent:
    """All of it added to nothing, which lies in every second row of a larger tensor, from the last
    on. What is left takes its place.
    """
    number, dim = accumulated.shape
    larger = torch.zeros(2 * number, dim, dtype=accumulated.dtype)
    at = 2 * number - 1 - 2 * torch.arange(number)
    sums = RowSums(larger, at, accumulated.flip(0), torch.arange(number).flip(0), is_kept=True)
    sent = changes_module.compress_changes(sums, message, thresholds)
    assert torch.equal(larger[at], accumulated.where(accumulated.isfinite(), 0.0))
    assert not larger[at - 1].any()
    positions = positions_of(sent.flags, sent.values.numel())
    values = sent.values.clone()
    left = values - sent.received.to(values.dtype)
    expected = larger[at]
    some = left.isfinite()
    expected.view(-1)[positions[some]] = left[some]
    cpu_kernel().keep_rest(larger, at, sent.flags, values, sent.received)
    assert torch.equal(larger[at], expected)
    copies = torch.zeros_like(larger)
    differences = RowSums(accumulated, torch.arange(number), copies, at, scale=-1.0)
    for is_selected in (False, True):
        assert_same(differences.of(0, number, is_selected), accumulated.reshape(-1))
    return Sent(sent.payload, positions, sent.received, left)


# Mostly comparable numbers, with ties and zeros; now and then very large and very small ones.
numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 0.25, -0.25, 1.0, 1e-3]),
    st.floats(-4, 4, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
)
broken_numbers = st.one_of(numbers, st.sampled_from([math.nan, math.inf, -math.inf]))
densities = st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.9, 1.0])


@st.composite
def changes(draw: st.DrawFn, elements: st.SearchStrategy[float] = numbers) -> Case:
    """A message about up to twelve rows of four tables, what has changed of them, and the
    reference's settings.
    """
    tables = sorted(draw(st.lists(st.integers(0, NUM_TABLES - 1), max_size=12)))
    dim = draw(st.integers(1, 5))
    settings = Settings(draw(densities), draw(st.sampled_from(FORMATS)))
    message = message_about(
        np.array(tables, dtype=np.int64), dim, settings.density, settings.value_format
    )
    rows = draw(st.lists(elements, min_size=len(tables) * dim, max_size=len(tables) * dim))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return message, torch.tensor(rows, dtype=dtype).view(len(tables), dim), settings


def some_thresholds(data: st.DataObject) -> np.ndarray:
    drawn = st.lists(
        st.sampled_from([0.0, 0.25, 0.5, 2.0, 1e10]), min_size=NUM_TABLES, max_size=NUM_TABLES
    )
    return np.array(data.draw(drawn), dtype=np.float64)


@given(case=changes() | changes(broken_numbers), data=st.data())
@examples(250)
def test_equals_the_reference(case: Case, data: st.DataObject) -> None:
    """What is sent and the next thresholds, bit for bit; and what is left is what was there, less
    what is sent.
    """
    message, accumulated, settings = case
    ours = some_thresholds(data)
    before = accumulated.clone()
    theirs = ours.copy()
    sent = compress_changes(accumulated, message, ours)
    thresholds = theirs[message.tables].tolist()
    parts = list(accumulated.reshape(-1).split(message.layout.tensor_sizes))
    expected = send_rows(parts, thresholds, settings)
    theirs[message.tables] = thresholds
    assert ours.tolist() == theirs.tolist()
    assert np.isfinite(ours).all()
    assert torch.equal(accumulated.nan_to_num(), before.nan_to_num())
    was = accumulated.reshape(-1)[sent.positions]
    dense = (
        torch.zeros_like(accumulated)
        .reshape(-1)
        .index_copy_(0, sent.positions, sent.received.to(was.dtype))
    )
    assert torch.equal(dense.nan_to_num(7.0), torch.cat([dense[:0], *expected]).nan_to_num(7.0))
    assert not (was == 0).any()
    assert torch.equal(sent.left.nan_to_num(), (was - sent.received.to(was.dtype)).nan_to_num())
    assert torch.equal(sent.left.isfinite(), was.isfinite())
    # Something must tell the other end of a broken table.
    assert bool(accumulated.isfinite().all() == was.isfinite().all())
    # The other end reads what this one says it reads, bit for bit.
    positions, values = read(message, sent.payload)
    assert torch.equal(positions, sent.positions)
    assert torch.equal(values.nan_to_num(7.0), sent.received.nan_to_num(7.0))


@st.composite
def several_changes(draw: st.DrawFn) -> tuple[list[Message], Tensor]:
    """Messages of one form about changes of some rows each, and these."""
    dim = draw(st.integers(1, 5))
    density = draw(densities)
    value_format = draw(st.sampled_from(FORMATS))
    tables = st.lists(st.integers(0, NUM_TABLES - 1), max_size=12).map(sorted)
    of_messages = draw(st.lists(tables, min_size=1, max_size=4))
    size = dim * sum(map(len, of_messages))
    entries = draw(st.lists(numbers, min_size=size, max_size=size))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    forms = [
        message_about(np.array(one, dtype=np.int64), dim, density, value_format)
        for one in of_messages
    ]
    return forms, torch.tensor(entries, dtype=dtype).view(-1, dim)


@given(case=several_changes(), data=st.data())
@examples(100)
def test_a_device_sends_and_reads_what_a_cpu_does(
    case: tuple[list[Message], Tensor], data: st.DataObject
) -> None:
    """Oracle: the bytes and entries of each message by itself, in the other form. That of a device
    runs on any, here on the CPU.
    """
    forms, accumulated = case
    before = [some_thresholds(data) for _ in forms]
    starts = np.cumsum([0, *(message.num_rows for message in forms)]).tolist()
    sent = []
    limits = []
    for message, thresholds, rows in zip(
        forms, before, map(slice, starts, starts[1:]), strict=False
    ):
        limits.append(np.maximum(thresholds, SMALLEST_THRESHOLD * (thresholds > 0)))
        limits[-1] = limits[-1][message.tables]
        is_full = np.equal(message.layout.tensor_sizes, message.layout.capacities)
        limits[-1][is_full.astype(bool)] = SMALLEST_THRESHOLD
        sent.append(compress_changes(accumulated[rows], message, thresholds.copy()))
    together = on_device.Forms(forms, accumulated.device)
    reads = on_device.DeferredReads()
    selected = together.select(
        reads, torch.zeros_like(accumulated), accumulated, np.concatenate(limits), 1.0
    )
    assert torch.equal(selected.sums, accumulated)
    assert selected.is_finite
    packed = together.pack(selected)
    dim = accumulated.shape[1]
    shifted = [one.positions + start * dim for one, start in zip(sent, starts, strict=False)]
    assert torch.equal(packed.positions, torch.cat(shifted))
    assert torch.equal(packed.received, torch.cat([one.received for one in sent]))
    assert torch.equal(packed.left, torch.cat([one.left for one in sent]))
    payloads = [torch.cat([*map(as_tensor, parts)]) for parts in packed.payloads]
    assert all(map(torch.equal, payloads, [one.payload for one in sent]))
    headers = [bytes(payload[: HEADER.size].tolist()) for payload in payloads]
    for known in (headers, [None] * len(forms)):
        positions, values = together.unpack(reads, payloads, known, ["a rank"] * len(forms))
        reads.now()
        assert torch.equal(positions, packed.positions)
        assert torch.equal(values, packed.received)


def as_tensor(piece: Tensor | bytes) -> Tensor:
    return piece if isinstance(piece, Tensor) else torch.tensor([*piece], dtype=torch.uint8)


@pytest.mark.parametrize("value_format", FORMATS)
def test_a_device_codes_whole_rows_as_a_cpu_does(value_format: str) -> None:
    """Oracle: the bytes of each message by itself."""
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(3)
    rows[4] = 0
    counts = [2, 0, 7]
    chosen = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0, 1]).bool()
    of = torch.tensor([0] * 2 + [2] * 7)
    within = torch.tensor([*range(2), *range(7)])
    for mask in (None, chosen):
        coded = on_device.encode_whole(rows, of, within, counts, value_format, mask)
        kept = torch.arange(9) if mask is None else chosen.nonzero().view(-1)
        sizes = torch.bincount(of[kept], minlength=3).tolist()
        parts = [torch.cat(parts) for parts in coded.some(kept).pieces(sizes)]
        own = rows[kept].split(sizes)
        assert all(map(torch.equal, parts, [encode_whole(part, value_format) for part in own]))
        read = on_device.decode_whole(parts, sizes, 3, value_format)
        assert torch.equal(read, coded.received[kept])


def test_a_device_refuses_what_a_cpu_does() -> None:
    """Positions that the header does not say, and such as do not ascend or are too large; the rank
    that has sent them is named, whatever the others have sent.
    """
    codes = [PositionCode(1000, 6), PositionCode(20, 15), PositionCode(1000, 2)]
    starts = np.cumsum([1, *(code.num_bytes for code in codes)]).tolist()
    together = on_device.Codes(codes, [8 * start for start in starts[:-1]])
    positions = [torch.arange(6) * 3, torch.arange(6) * 3, torch.tensor([4, 5])]
    bits = [code.encode_bits(part) for code, part in zip(codes, positions, strict=True)]
    sources = ["rank 0", "rank 2", "rank 3"]

    def read(counts: list[int], given: list[Tensor]) -> Tensor:
        reads = on_device.DeferredReads()
        data = torch.cat([torch.zeros(1, dtype=torch.uint8), *map(pack_bits, given)])
        found = together.read(reads, data, counts, [0, 1000, 1020], sources)
        assert bool(((found.positions >= 0) & (found.positions < 2020)).all())
        reads.now()
        return found.positions

    offsets = torch.tensor([0] * 6 + [1000] * 6 + [1020] * 2)
    assert torch.equal(read([6, 6, 2], bits), torch.cat(positions) + offsets)
    for counts, wrong in (([5, 6, 2], 0), ([6, 7, 2], 1), ([6, 6, 1], 2)):
        with pytest.raises(PayloadError, match=f"{sources[wrong]}: .* are marked"):
            read(counts, bits)
    code = codes[2]
    swapped = bits[2].clone()
    planes = swapped[code.num_flags :].view(code.low_bits, 2)
    swapped[code.num_flags :] = planes.flip(1).flatten()
    with pytest.raises(PayloadError, match=r"rank 3: .* not ascending below 1000"):
        read([6, 6, 2], [*bits[:2], swapped])
    large = code.encode_bits(torch.tensor([4, 999]))
    large[code.num_flags :].view(code.low_bits, 2)[:, 1] = 1
    with pytest.raises(PayloadError, match=r"rank 3: .* not ascending below 1000"):
        read([6, 6, 2], [*bits[:2], large])


def test_broken_entries_select_no_threshold() -> None:
    message = message_about(np.zeros(2, dtype=np.int64), 5, 0.1, "fp32")
    thresholds = np.array([0.5])
    accumulated = torch.tensor([[math.nan] * 3 + [7.0, 8.0], [9.0] * 5])
    assert compress_changes(accumulated, message, thresholds).positions.tolist() == [0]
    assert thresholds[0] == nudge(0.5, 3, 1, 10, changes_module.GUARD_AIM)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("density", [0.05, 0.07, 0.5, 1.0])
def test_the_size_follows_from_the_rows(value_format: str, density: float) -> None:
    tables = np.array([0] * 25 + [2] * 3 + [3], dtype=np.int64)
    message = message_about(tables, 4, density, value_format)
    assert message.tables == [0, 2, 3]
    assert message.layout.tensor_sizes == (100, 12, 4)
    rooms = {0.05: (5, 1, 1), 0.07: (7, 1, 1), 0.5: (50, 6, 2), 1.0: (100, 12, 4)}
    assert message.layout.capacities == rooms[density]
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1e-20, 1.0, 1e20):
        accumulated = scale * torch.randn(29, 4, generator=generator)
        sent = compress_changes(accumulated, message, np.zeros(NUM_TABLES))
        assert sent.payload.numel() == message.layout.num_bytes
        assert sent.positions.numel() == (sum(rooms[density]) if scale else 0)


def test_the_largest_by_their_own_tables_threshold_go() -> None:
    message = message_about(np.array([0, 1], dtype=np.int64), 4, 0.5, "fp32")
    accumulated = torch.tensor([[100.0, 130.0, -110.0, 120.0], [0.3, -0.01, 0.2, 0.1]])
    sent = compress_changes(accumulated, message, np.array([100.0, 0.1]))
    assert sent.positions.tolist() == [1, 3, 4, 6]  # 1.3, 1.2 and 3, 2 times their thresholds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_go_whatever_the_threshold(dtype: torch.dtype) -> None:
    """Over the smallest threshold their ratio is beyond fp32."""
    message = message_about(np.zeros(1, dtype=np.int64), 4, 0.25, "fp32")
    accumulated = torch.tensor([[4.0, 1e30, 5.0, 3e38]], dtype=dtype)
    sent = compress_changes(accumulated, message, np.array([SMALLEST_THRESHOLD]))
    assert sent.positions.tolist() == [3]


@examples(100)
@given(
    st.lists(st.lists(st.floats(-4, 4, width=16), min_size=3, max_size=3), max_size=6),
    st.sampled_from(FORMATS),
)
def test_what_is_left_of_evicted_rows_is_rounded_once(
    rows: list[list[float]], value_format: str
) -> None:
    """Oracle: exact in fp32, 8 bits of mantissa in bf16, and else 254 steps over a row, an eleventh
    longer at most.
    """
    left = torch.tensor(rows).view(-1, 3)
    payload = encode_whole(left, value_format)
    assert payload.numel() == whole_num_bytes(len(rows), 3, value_format)
    read = decode_whole(payload, len(rows), 3, value_format)
    assert (read.dtype, read.shape) == (torch.float32, left.shape)
    largest = left.abs().amax(dim=1, keepdim=True) if rows else left[:, :1]
    bound = {"fp32": 0 * largest, "bf16": left.abs() / 2**8}.get(
        value_format, largest * 12 / 11 / 254 + 2e-9
    )
    assert ((read - left).abs() <= bound).all()
