import zlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.wire.payload import PayloadLayout, unpack_payload
from lightning_dct.wire.positions import PayloadError
from lightning_dct.wire.values import decode_values, encode_values
from strategies_for_hypothesis import examples, filled_layouts, pack_entries

Filled = tuple[PayloadLayout, Tensor, Tensor, Tensor]
LAYOUT = PayloadLayout(
    tensor_sizes=(20, 3, 30), capacities=(4, 0, 6), value_format="bf16", dense_bytes=12
)


def example_payload(layout: PayloadLayout = LAYOUT) -> Tensor:
    whole = torch.arange(layout.dense_bytes, dtype=torch.uint8)
    return pack_entries(
        layout, torch.tensor([0, 7, 23, 52]), torch.tensor([1.0, -2.0, 3.0, -4.0]), whole
    )[0]


def tensor_of(layout: PayloadLayout, position: int) -> int:
    for tensor, size in enumerate(layout.tensor_sizes):
        if position < size:
            return tensor
        position -= size
    raise AssertionError


@given(filled=filled_layouts())
@examples(60)
def test_round_trip(filled: Filled) -> None:
    layout, positions, values, whole = filled
    payload, as_read = pack_entries(layout, positions, values, whole)
    read = unpack_payload(layout, payload)
    assert read.positions.tolist() == positions.tolist()
    assert torch.equal(read.values, as_read)
    assert torch.equal(read.dense, whole)
    # Values as the codec alone would read them, with the tensor of each position found by a loop.
    of_each = Counter(tensor_of(layout, position) for position in positions.tolist())
    counts = [of_each[tensor] for tensor in range(len(layout.tensor_sizes))]
    data, scales = encode_values(values, counts, layout.value_format)
    assert torch.equal(as_read, decode_values(data, counts, scales, layout.value_format))


@given(filled=filled_layouts())
@examples(60)
def test_size_follows_from_the_layout_alone(filled: Filled) -> None:
    layout, positions, values, whole = filled
    payload = pack_entries(layout, positions, values, whole)[0]
    entries = sum(layout.capacities)
    value_bytes = {
        "fp32": 4 * entries,
        "bf16": 2 * entries,
        "2bit": -(-entries // 4),
        "1bit": -(-entries // 8),
    }
    scale_bytes = 4 * len(layout.tensor_sizes) if layout.value_format in ("2bit", "1bit") else 0
    position_bytes = layout.position_code.num_bytes
    exact = 12, scale_bytes, position_bytes, value_bytes[layout.value_format], whole.numel()
    sizes = [end - start for start, end in pairwise(layout.edges)]
    assert all(0 <= size - least < 8 for size, least in zip(sizes, exact, strict=True))
    assert [start % 4 for start in layout.edges] == [0] * 6
    assert [start % 8 for start in layout.edges[4:]] == [0, 0]
    assert payload.dtype == torch.uint8
    assert payload.is_contiguous()
    assert payload.numel() == layout.num_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("value_format", "code"), [("fp32", 0), ("bf16", 1), ("1bit", 3), ("2bit", 5)]
)
def test_header_byte_by_byte(value_format: str, code: int) -> None:
    layout = replace(LAYOUT, value_format=value_format)
    header = example_payload(layout)[:12].tolist()
    assert header[:4] == [0xDC, 3, code, 0]
    assert header[4:8] == [4, 0, 0, 0]
    numbers = (layout.tensor_sizes, layout.capacities, layout.value_format, layout.dense_bytes)
    assert header[8:] == list(zlib.crc32(repr(numbers).encode()).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 0, "begins with 0x0 where 0xdc was expected"),
        (1, 9, "layout version 9, this rank reads 3: install the same lightning_dct"),
        (2, 3, "code 3, this rank's `value_format` has code 1: use the same settings"),
        (3, 1, "fourth byte is 0x1"),
        (4, 11, "claims 11 entries, its layout holds at most 10"),
        (4, 3, "positions are corrupt: 4 positions are marked, but the header says 3"),
        (
            8,
            0,
            "other tensor sizes or densities, or in another step: use the same model and settings",
        ),
    ],
)
def test_what_the_errors_say(offset: int, value: int, message: str) -> None:
    payload = example_payload()
    assert payload[offset] != value
    payload[offset] = value
    with pytest.raises(PayloadError, match=message):
        unpack_payload(LAYOUT, payload)


@given(filled=filled_layouts(), data=st.data())
@examples(60)
def test_cut_or_lengthened_payloads_are_refused(filled: Filled, data: st.DataObject) -> None:
    layout, positions, values, whole = filled
    payload = pack_entries(layout, positions, values, whole)[0]
    kept = data.draw(st.integers(0, payload.numel()) | st.just(payload.numel()))
    added = data.draw(
        st.binary(max_size=9).filter(lambda tail: kept + len(tail) != payload.numel())
    )
    with pytest.raises(
        PayloadError, match=f"has {kept + len(added)} bytes, the layout says {layout.num_bytes}"
    ):
        unpack_payload(
            layout, torch.cat([payload[:kept], torch.tensor(list(added), dtype=torch.uint8)])
        )


def test_layouts_of_equal_size_are_told_apart() -> None:
    other = replace(LAYOUT, tensor_sizes=(30, 3, 20), capacities=(6, 0, 4))
    assert other.num_bytes == LAYOUT.num_bytes
    with pytest.raises(PayloadError, match="other tensor sizes or densities"):
        unpack_payload(other, example_payload())
