"""The ways for GPUs, on the CPU or on a card: payloads are read as in the ordinary way, and harm is noticed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_dct.wire import payloads_on_device
from lightning_dct.wire.payload import PayloadLayout, unpack
from lightning_dct.wire.payloads_on_device import Bitmaps, Payloads, SideBySide, slots_of
from lightning_dct.wire.positions import PayloadError
from one_card import DEVICE
from strategies_for_hypothesis import FORMATS, examples, filled_layouts, layouts, pack_entries

Filled = tuple[PayloadLayout, Tensor, Tensor, Tensor]


def reads_entries(layouts: Sequence[PayloadLayout]) -> bool:
    """Whether these payloads are read entry by entry."""
    return all(layout.position_code.is_bitmap for layout in layouts) and any(any(o.tensor_sizes) for o in layouts)


def read_bitmaps(layouts: Sequence[PayloadLayout], senders: Tensor) -> tuple[Tensor, Tensor, list[bool]]:
    """The entries of each sender, the dense tensors and the verdict: the same however little is read at once."""
    side, found = Bitmaps(layouts, DEVICE), []
    for at_once in (1 << 22, 8 * 3 * len(layouts), 40 * 3 * len(layouts)):
        pieces: list[Tensor] = []
        with mock.patch.object(payloads_on_device, "AT_ONCE", at_once):
            dense, told = side.unpack(senders.to(DEVICE), pieces.append)
        values = torch.cat(pieces, dim=2).flatten(1).cpu()
        found.append((values, dense.cpu(), are_valid(side, told)))
    for values, dense, valid in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=0, atol=0, equal_nan=True)
        assert (dense.tolist(), valid) == (found[0][1].tolist(), found[0][2])
    return found[0]


def read_side_by_side(side: SideBySide, senders: Tensor) -> Any:
    """On the card where there is one, and the results on the CPU."""
    return tree_map_only(Tensor, Tensor.cpu, side.unpack(senders.to(DEVICE)))


def are_valid(side: Payloads, told: Tensor) -> list[bool]:
    return [verdict.is_valid for verdict in side.verdicts(told.flatten().tolist())]


def assert_the_same(*filled: Filled) -> None:
    """Payloads side by side are read as those are that are read one after the other."""
    every = [layout for layout, *_ in filled]
    payload, whole = torch.cat([pack_entries(*one)[0] for one in filled]), torch.cat([part for *_, part in filled])
    senders = torch.stack([payload, payload.flip(0), payload])
    side = SideBySide(every, DEVICE)
    arrived = read_side_by_side(side, senders)
    valid = are_valid(side, arrived.told)
    assert all(valid[: len(every)])
    assert all(valid[2 * len(every) :])
    begin = slot = 0
    expected = []
    for layout, positions, *_ in filled:
        slots, count = slots_of(layout), positions.numel()
        used, unused = slice(slot, slot + count), slice(slot + count, slot + slots)
        read = unpack(layout, pack_entries(*filled[len(expected)])[0])
        for sender in (0, 2):
            assert torch.equal(arrived.positions[sender, used], begin + read.positions)
            assert torch.equal(arrived.values[sender, used].nan_to_num(), read.values.nan_to_num())
            assert not arrived.values[sender, unused].any()
            assert arrived.in_use[sender, used].all()
            assert not arrived.in_use[sender, unused].any()
        size = sum(layout.tensor_sizes)
        expected.append(torch.zeros(size).index_put_((read.positions,), read.values))
        begin, slot = begin + size, slot + slots
    assert torch.equal(arrived.dense[0], whole)
    if reads_entries(every):
        values, dense, found_valid = read_bitmaps(every, senders)
        assert found_valid == valid
        assert torch.equal(dense, arrived.dense)
        for sender in (0, 2):
            found = [values[sender, start:stop] for start, stop in Bitmaps(every, DEVICE).bounds]
            assert torch.equal(torch.cat([*found, torch.empty(0)]).nan_to_num(), torch.cat(expected).nan_to_num())


@given(filled=st.lists(filled_layouts(), min_size=1, max_size=4))
@examples(60)
def test_payloads_are_read_as_in_the_ordinary_way(filled: list[Filled]) -> None:
    """Of one owner and of several, some of whom own nothing."""
    value_format = filled[0][0].value_format
    alike = [(replace(layout, value_format=value_format), *rest) for layout, *rest in filled]
    assert_the_same(*alike)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 99, 100])
def test_a_large_layout(value_format: str, count: int) -> None:
    layout = PayloadLayout((70_000, 30_000), (70, 30), value_format)
    noise = torch.Generator().manual_seed(count)
    positions = torch.randperm(70_000, generator=noise)[: min(count, 70)]
    positions = torch.cat([positions, 70_000 + torch.randperm(30_000, generator=noise)[: count - positions.numel()]])
    values = torch.randn(count, generator=noise)
    assert_the_same((layout, positions.sort().values, values, torch.empty(0, dtype=torch.uint8)))


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_infinite_and_nan_values(value_format: str, broken: float) -> None:
    layout = PayloadLayout((50, 50), (3, 3), value_format)
    positions, values = torch.tensor([4, 50, 60]), torch.tensor([broken, 1.0, -2.0])
    assert_the_same((layout, positions, values, torch.empty(0, dtype=torch.uint8)))


@given(layout=layouts(), data=st.data())
@examples(60)
def test_whatever_the_bytes_nothing_is_read_out_of_bounds(layout: PayloadLayout, data: st.DataObject) -> None:
    random_bytes = data.draw(st.binary(min_size=layout.num_bytes, max_size=layout.num_bytes))
    payload = torch.tensor(list(random_bytes), dtype=torch.uint8)
    genuine = pack_entries(
        layout, torch.empty(0).long(), torch.empty(0), torch.zeros(layout.dense_bytes, dtype=torch.uint8)
    )[0]
    # Up to 12 bytes of the header as they should be, so that what comes behind them is looked at as well.
    kept = data.draw(st.sampled_from([0, 4, 12]))
    payload[:kept] = genuine[:kept]
    if kept == 12:
        payload[4] = data.draw(st.integers(0, layout.capacity + 1)) % 256
    assert_same_verdict(layout, payload)


@given(filled=filled_layouts(), data=st.data())
@examples(60)
def test_harmed_payloads_are_noticed_as_in_the_ordinary_way(
    filled: tuple[PayloadLayout, Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    payload = pack_entries(*filled)[0]
    place = data.draw(st.integers(0, payload.numel() - 1))
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    assert_same_verdict(filled[0], payload)


def assert_same_verdict(layout: PayloadLayout, payload: Tensor) -> None:
    genuine = pack_entries(
        layout, torch.empty(0).long(), torch.empty(0), torch.zeros(layout.dense_bytes, dtype=torch.uint8)
    )[0]
    # What is wrong with one payload is not said of its neighbours.
    senders = torch.cat([genuine, payload, genuine]).unsqueeze(0)
    side = SideBySide([layout] * 3, DEVICE)
    arrived = read_side_by_side(side, senders)
    valid = are_valid(side, arrived.told)
    alone = SideBySide([layout], DEVICE)
    assert are_valid(alone, read_side_by_side(alone, payload.unsqueeze(0)).told) == valid[1:2]
    assert bool(((arrived.positions >= 0) & (arrived.positions < max(3 * sum(layout.tensor_sizes), 1))).all())
    try:
        unpack(layout, payload)
    except PayloadError:
        assert valid == [True, False, True]
    else:
        assert all(valid)
    if reads_entries([layout]):
        assert read_bitmaps([layout] * 3, senders)[2] == valid


def test_a_payload_of_another_size_is_refused_at_once() -> None:
    layout = PayloadLayout((50,), (3,), "bf16")
    with pytest.raises(PayloadError, match="the payload has 5 bytes"):
        SideBySide([layout], DEVICE).unpack(torch.zeros(1, 5, dtype=torch.uint8))
