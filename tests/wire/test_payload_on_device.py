"""The way for GPUs, on the CPU: payloads are those of the ordinary way, and what cannot be read is noticed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.wire import PayloadError, PayloadLayout, Slots, pack, pack_on_device, unpack, unpack_on_device
from strategies_for_hypothesis import FORMATS, examples, filled_layouts, layouts


def in_slots(layout: PayloadLayout, positions: Tensor, values: Tensor, slots: int) -> tuple[Slots, Tensor]:
    """Entries in slots with something in the others that must not matter, and each one's tensor."""
    spare = slots - positions.numel()
    ends = torch.tensor(layout.tensor_sizes or (1,)).cumsum(0)
    places = torch.cat([positions, torch.full((spare,), 1, dtype=torch.int64)])
    entries = Slots(places, torch.cat([values, values.new_zeros(spare)]), torch.tensor(positions.numel()))
    return entries, torch.searchsorted(ends, places, right=True)


def assert_the_same(layout: PayloadLayout, positions: Tensor, values: Tensor, whole: Tensor, slots: int) -> None:
    expected, expected_received = pack(layout, positions, values, whole)
    payload, received = pack_on_device(layout, *in_slots(layout, positions, values, slots), whole)
    count = positions.numel()
    assert torch.equal(payload, expected)
    assert torch.equal(received[:count].nan_to_num(), expected_received.nan_to_num())
    assert not received[count:].any()
    read, arrived = unpack(layout, payload), unpack_on_device(layout, payload)
    assert bool(arrived.sound)
    assert int(arrived.entries.num_used) == count
    assert torch.equal(arrived.entries.positions[:count], read.positions)
    assert torch.equal(arrived.entries.values[:count].nan_to_num(), read.values.nan_to_num())
    assert not arrived.entries.values[count:].any()
    assert torch.equal(arrived.whole, whole)


@given(filled=filled_layouts(), data=st.data())
@examples(100)
def test_payloads_are_those_of_the_ordinary_way(
    filled: tuple[PayloadLayout, Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    layout, positions, values, whole = filled
    assert_the_same(*filled, data.draw(st.integers(positions.numel(), layout.capacity)))
    assert_the_same(layout, positions, values.double(), whole, layout.capacity)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 99, 100])
def test_a_large_layout(value_format: str, count: int) -> None:
    layout = PayloadLayout((70_000, 30_000), (70, 30), value_format)
    noise = torch.Generator().manual_seed(count)
    positions = torch.randperm(70_000, generator=noise)[: min(count, 70)]
    positions = torch.cat([positions, 70_000 + torch.randperm(30_000, generator=noise)[: count - positions.numel()]])
    values = torch.randn(count, generator=noise)
    assert_the_same(layout, positions.sort().values, values, torch.empty(0, dtype=torch.uint8), 100)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_infinite_and_nan_values(value_format: str, broken: float) -> None:
    layout = PayloadLayout((50, 50), (3, 3), value_format)
    positions, values = torch.tensor([4, 50, 60]), torch.tensor([broken, 1.0, -2.0])
    assert_the_same(layout, positions, values, torch.empty(0, dtype=torch.uint8), 6)


@given(layout=layouts(), data=st.data())
@examples(150)
def test_whatever_the_bytes_nothing_is_read_out_of_bounds(layout: PayloadLayout, data: st.DataObject) -> None:
    random_bytes = data.draw(st.binary(min_size=layout.num_bytes, max_size=layout.num_bytes))
    payload = torch.tensor(list(random_bytes), dtype=torch.uint8)
    genuine = pack(layout, torch.empty(0).long(), torch.empty(0), torch.zeros(layout.whole_bytes, dtype=torch.uint8))[0]
    # Up to 12 bytes of the header as they should be, so that what comes behind them is looked at as well.
    kept = data.draw(st.sampled_from([0, 4, 12]))
    payload[:kept] = genuine[:kept]
    if kept == 12:
        payload[4] = data.draw(st.integers(0, layout.capacity + 1)) % 256
    assert_same_verdict(layout, payload)


@given(filled=filled_layouts(), data=st.data())
@examples(150)
def test_harmed_payloads_are_noticed_as_in_the_ordinary_way(
    filled: tuple[PayloadLayout, Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    payload = pack(*filled)[0]
    place = data.draw(st.integers(0, payload.numel() - 1))
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    assert_same_verdict(filled[0], payload)


def assert_same_verdict(layout: PayloadLayout, payload: Tensor) -> None:
    arrived = unpack_on_device(layout, payload)
    positions = arrived.entries.positions
    assert positions.numel() == layout.capacity
    assert bool(((positions >= 0) & (positions < max(sum(layout.tensor_sizes), 1))).all())
    try:
        unpack(layout, payload)
    except PayloadError:
        assert not bool(arrived.sound)
    else:
        assert bool(arrived.sound)


def test_a_payload_of_another_size_is_refused_at_once() -> None:
    layout = PayloadLayout((50,), (3,), "bf16")
    with pytest.raises(PayloadError, match="the payload has 5 bytes"):
        unpack_on_device(layout, torch.zeros(5, dtype=torch.uint8))
