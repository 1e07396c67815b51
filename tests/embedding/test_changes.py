import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.compress.threshold import SMALLEST_THRESHOLD, nudge
from lightning_dct.embedding import messages as changes_module
from lightning_dct.embedding.messages import (
    Message,
    SentRows,
    decode_whole,
    encode_whole,
    message_about,
    whole_num_bytes,
)
from lightning_dct.reference import Settings, send_rows
from lightning_dct.wire.payload import unpack
from lightning_dct.wire.positions import PayloadError
from strategies_for_hypothesis import FORMATS, examples

NUM_TABLES = 4
Case = tuple[Message, Tensor, Settings]


def read(message: Message, payload: Tensor) -> tuple[Tensor, Tensor]:
    unpacked = unpack(message.layout, payload)
    return unpacked.positions, unpacked.values


def compress_changes(accumulated: Tensor, message: Message, thresholds: np.ndarray) -> SentRows:
    """All of it added to nothing."""
    return changes_module.compress_changes(torch.zeros_like(accumulated), accumulated, message, thresholds)


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
    """A message about up to twelve rows of four tables, what has changed of them, and the reference's settings."""
    tables = sorted(draw(st.lists(st.integers(0, NUM_TABLES - 1), max_size=12)))
    dim = draw(st.integers(1, 5))
    settings = Settings(draw(densities), draw(st.sampled_from(FORMATS)))
    message = message_about(np.array(tables, dtype=np.int64), dim, settings.density, settings.value_format)
    rows = draw(st.lists(elements, min_size=len(tables) * dim, max_size=len(tables) * dim))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return message, torch.tensor(rows, dtype=dtype).view(len(tables), dim), settings


def some_thresholds(data: st.DataObject) -> np.ndarray:
    drawn = st.lists(st.sampled_from([0.0, 0.25, 0.5, 2.0, 1e10]), min_size=NUM_TABLES, max_size=NUM_TABLES)
    return np.array(data.draw(drawn), dtype=np.float64)


@given(case=changes() | changes(broken_numbers), data=st.data())
@examples(250)
def test_equals_the_reference(case: Case, data: st.DataObject) -> None:
    """What is sent and the next thresholds, bit for bit; and what is left is what was there, less what is sent."""
    message, accumulated, settings = case
    ours, before = some_thresholds(data), accumulated.clone()
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
    dense = torch.zeros_like(accumulated).reshape(-1).index_copy_(0, sent.positions, sent.received.to(was.dtype))
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


@pytest.mark.parametrize("value_format", FORMATS)
def test_nothing_lost_over_many_steps(value_format: str) -> None:
    """What was added equals what arrived plus what is held back, and with few bits too all of it arrives in the end."""
    message = message_about(np.array([0, 0, 0, 1, 1, 3], dtype=np.int64), 4, 0.2, value_format)
    thresholds, generator = np.zeros(NUM_TABLES), torch.Generator().manual_seed(1)
    held, arrived, added = (torch.zeros(6, 4, dtype=torch.float64) for _ in range(3))
    for step in range(100):
        change = torch.randn(6, 4, generator=generator, dtype=torch.float64) if step < 20 else torch.zeros(6, 4)
        held, added = held + change, added + change
        sent = compress_changes(held, message, thresholds)
        held.view(-1)[sent.positions] = sent.left
        positions, values = read(message, sent.payload)
        arrived.view(-1)[positions] += values
        torch.testing.assert_close(held + arrived, added, rtol=0, atol=1e-12)
    assert float(held.abs().max()) < 1e-3 * float(added.abs().max())


def test_where_everything_goes_zeros_stay() -> None:
    """1bit would read them as the mean magnitude of the others."""
    message = message_about(np.zeros(1, dtype=np.int64), 4, 1.0, "1bit")
    sent = compress_changes(torch.tensor([[1.0, 0.0, -0.0, -3.0]]), message, np.zeros(1))
    assert sent.positions.tolist() == [0, 3]
    assert sent.received.tolist() == [2.0, -2.0]


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


def unpacked(message: Message, sent: SentRows, payload: Tensor) -> None:
    try:
        positions, values = read(message, payload)
    except PayloadError:
        return
    places = positions.tolist()
    assert places == sorted(set(places))
    assert all(0 <= place < sum(message.layout.tensor_sizes) for place in places)
    assert values.numel() == positions.numel() <= message.layout.capacity


@given(case=changes(), data=st.data())
@examples(80)
def test_corrupt_messages(case: Case, data: st.DataObject) -> None:
    message, accumulated, _ = case
    sent = compress_changes(accumulated, message, np.zeros(NUM_TABLES))
    flips = st.tuples(st.integers(0, sent.payload.numel() - 1), st.integers(1, 255))
    corrupt = sent.payload.clone()
    for place, flip in data.draw(st.lists(flips, min_size=1, max_size=3)):
        corrupt[place] ^= flip
    unpacked(message, sent, corrupt)
    for other in (sent.payload[:-1], torch.cat([sent.payload, sent.payload[:1]])):
        with pytest.raises(PayloadError, match="bytes"):
            unpack(message.layout, other)


def test_a_message_about_other_rows_is_refused() -> None:
    message = message_about(np.array([0, 0, 1], dtype=np.int64), 2, 0.5, "2bit")
    other = message_about(np.array([0, 1, 1], dtype=np.int64), 2, 0.5, "2bit")
    sent = compress_changes(torch.ones(3, 2), message, np.zeros(2))
    assert message.layout.num_bytes == other.layout.num_bytes
    with pytest.raises(PayloadError, match="other tensor sizes"):
        unpack(other.layout, sent.payload)


def test_no_rows() -> None:
    message = message_about(np.empty(0, dtype=np.int64), 4, 0.05, "2bit")
    assert message.tables == []
    sent = compress_changes(torch.empty(0, 4), message, np.ones(2))
    assert sent.payload.numel() == message.layout.num_bytes
    positions, values = read(message, sent.payload)
    assert positions.numel() == values.numel() == 0


@examples(100)
@given(st.lists(st.lists(st.floats(-4, 4, width=16), min_size=3, max_size=3), max_size=6), st.sampled_from(FORMATS))
def test_what_is_left_of_evicted_rows_is_rounded_once(rows: list[list[float]], value_format: str) -> None:
    """Oracle: exact in fp32, 8 bits of mantissa in bf16, and else 254 steps over a row, an eleventh longer at most."""
    left = torch.tensor(rows).view(-1, 3)
    payload = encode_whole(left, value_format)
    assert payload.numel() == whole_num_bytes(len(rows), 3, value_format)
    read = decode_whole(payload, len(rows), 3, value_format)
    assert (read.dtype, read.shape) == (torch.float32, left.shape)
    largest = left.abs().amax(dim=1, keepdim=True) if rows else left[:, :1]
    bound = {"fp32": 0 * largest, "bf16": left.abs() / 2**8}.get(value_format, largest * 12 / 11 / 254 + 2e-9)
    assert ((read - left).abs() <= bound).all()
