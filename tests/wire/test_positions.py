import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.kernels.bits import flags_num_bytes, num_bytes, unpack_bits
from lightning_dct.wire.positions import PayloadError, PositionCode
from strategies_for_hypothesis import examples, flags_at


def code_with(low_bits: int, universe: int, capacity: int) -> PositionCode:
    code = PositionCode(universe, capacity)
    vars(code)["low_bits"] = low_bits  # where cached_property keeps it
    return code


def round_trip(code: PositionCode, positions: list[int]) -> list[int]:
    message = code.encode(torch.tensor(positions, dtype=torch.int64))
    assert message.dtype == torch.uint8
    assert message.numel() == code.num_bytes
    return code.decode(message, len(positions)).tolist()


@st.composite
def codes_and_positions(draw: st.DrawFn) -> tuple[PositionCode, list[int]]:
    universe = draw(st.integers(1, 5000))
    positions = draw(st.sets(st.integers(0, universe - 1), max_size=60))
    capacity = draw(st.integers(len(positions), universe))
    return PositionCode(universe, capacity), sorted(positions)


@given(case=codes_and_positions())
@examples(60)
def test_messages_read_back(case: tuple[PositionCode, list[int]]) -> None:
    code, positions = case
    assert round_trip(code, positions) == positions


@pytest.mark.parametrize("universe", [1, 2, 3, 7, 8, 9, 64, 1000, 4999, 5000])
def test_round_trip_at_the_edges(universe: int) -> None:
    for capacity in sorted(
        {1, 2, universe // 100, universe // 2, universe - 1, universe} & set(range(1, universe + 1))
    ):
        code = PositionCode(universe, capacity)
        first = list(range(capacity))
        last = list(range(universe - capacity, universe))
        for positions in ([], [0], [universe - 1], first, last, first[:-1], last[1:]):
            assert round_trip(code, positions) == positions


def test_no_room_and_no_universe() -> None:
    assert round_trip(PositionCode(100, 0), []) == []
    assert round_trip(PositionCode(0, 0), []) == []


def test_example_of_the_docstring() -> None:
    code = code_with(low_bits=2, universe=20, capacity=4)
    bits = code.encode_bits(torch.tensor([1, 6, 7, 13])).tolist()
    # The flags, with none above the last position's; the four lowest bits; the four next ones.
    assert "".join(map(str, bits)) == "1011001" + "00" + "1011" + "0110"


@given(universe=st.integers(1, 5000), data=st.data())
@examples(60)
def test_low_bits_make_the_message_smallest_but_for_padding(
    universe: int, data: st.DataObject
) -> None:
    capacity = data.draw(st.integers(0, universe))
    sizes = [
        num_bytes(capacity + ((universe - 1) >> bits) + 1 + bits * capacity)
        for bits in range(universe.bit_length() + 1)
    ]
    code = PositionCode(universe, capacity)
    # Each row of bits may end in the middle of a byte.
    assert code.num_bytes == min(*sizes, num_bytes(universe))


@pytest.mark.parametrize(
    ("density", "documented_bits"), [(0.01, 8.6), (0.001, 2 + math.log2(1000))]
)
def test_size_at_ten_million_entries(density: float, documented_bits: float) -> None:
    universe = 10_000_000
    capacity = int(density * universe)
    code = PositionCode(universe, capacity)
    assert 8 * code.num_bytes / capacity == pytest.approx(documented_bits, rel=0.05)
    positions = sorted(random.Random(0).sample(range(universe), capacity))
    assert round_trip(code, positions) == positions


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_decode_rejects_a_wrong_count(count: int) -> None:
    code = PositionCode(100, 10)
    message = code.encode(torch.tensor([5, 50]))
    with pytest.raises(ValueError, match=f"2 positions are marked, but the header says {count}"):
        code.decode(message, count)


@pytest.mark.parametrize("positions", [[19], [3, 19]])
def test_decode_rejects_positions_beyond_the_universe(positions: list[int]) -> None:
    code = code_with(low_bits=2, universe=19, capacity=4)  # 19 can be written all the same
    with pytest.raises(ValueError, match="below 19"):
        code.decode(code.encode(torch.tensor(positions)), len(positions))


@pytest.mark.parametrize("positions", [[5, 5], [6, 5], [0, 1, 9, 8]])
def test_decode_rejects_positions_that_do_not_ascend(positions: list[int]) -> None:
    code = code_with(low_bits=3, universe=40, capacity=4)
    with pytest.raises(ValueError, match="not ascending"):
        code.decode(code.encode(torch.tensor(positions)), len(positions))


@given(universe=st.integers(0, 300), data=st.data())
@examples(60)
def test_bitmap_round_trip_and_bytes(universe: int, data: st.DataObject) -> None:
    positions = sorted(data.draw(st.sets(st.integers(0, universe - 1)))) if universe else []
    code = PositionCode(universe, universe)
    message = code.encode(torch.tensor(positions, dtype=torch.int64))
    expected = [
        sum(1 << (p - 8 * at) for p in positions if p // 8 == at) for at in range(-(-universe // 8))
    ]
    assert message.tolist() == expected
    assert message.numel() == code.num_bytes
    assert code.decode(message, len(positions)).tolist() == positions
    with pytest.raises(ValueError, match="marked, but the header says"):
        code.decode(message, len(positions) + 1)


@pytest.mark.parametrize(
    ("share", "is_bitmap"), [(0.05, False), (0.2, False), (0.3, True), (1.0, True)]
)
def test_a_bitmap_wins_above_a_quarter(share: float, is_bitmap: bool) -> None:
    assert PositionCode(100_000, int(share * 100_000)).is_bitmap == is_bitmap


@pytest.mark.parametrize("kernel", ["torch", "numba"])
@given(data=st.data(), universe=st.integers(1, 3000))
@examples(60)
def test_flags_give_the_same_message(kernel: str, data: st.DataObject, universe: int) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, universe - 1), max_size=200)))
    code = PositionCode(universe, data.draw(st.integers(len(chosen), universe)))
    flags = flags_at(torch.tensor(chosen).long(), universe)
    message = code.encode_flags(flags, kernel)
    assert message.tolist() == code.encode(torch.tensor(chosen).long()).tolist()
    read = torch.zeros_like(flags)
    assert code.decode_flags(message, len(chosen), read, [universe], kernel) == [len(chosen)]
    assert read.tolist() == flags.tolist()
    for count in (len(chosen) + 1, len(chosen) - 1):
        with pytest.raises(PayloadError, match="the positions are corrupt"):
            code.decode_flags(message, count, torch.zeros_like(flags), [universe], kernel)


def test_a_bitmap_has_nothing_behind_its_end() -> None:
    code = PositionCode(13, 13)
    message = code.encode(torch.tensor([2, 9]))
    message[1] ^= 0b1000_0010  # instead of 9 the flag of 15
    with pytest.raises(PayloadError, match="1 positions are marked, but the header says 2"):
        code.decode_flags(message, 2, torch.zeros(8, dtype=torch.uint8), [13], "auto")


@pytest.mark.parametrize("kernel", ["torch", "numba"])
@given(data=st.data(), universe=st.integers(1, 400), capacity=st.integers(0, 100))
@examples(100)
def test_any_message_is_read_alike_or_refused(
    kernel: str, data: st.DataObject, universe: int, capacity: int
) -> None:
    code = PositionCode(universe, min(capacity, universe))
    message = torch.tensor(
        list(data.draw(st.binary(min_size=code.num_bytes, max_size=code.num_bytes)))
    ).byte()
    count = data.draw(st.integers(0, code.capacity))
    flags = message.new_zeros(flags_num_bytes(universe))
    try:
        expected = code.decode(message, count)
    except PayloadError:
        with pytest.raises(PayloadError):
            code.decode_flags(message, count, flags, [universe], kernel)
    else:
        code.decode_flags(message, count, flags, [universe], kernel)
        assert unpack_bits(flags, universe).nonzero().squeeze(1).tolist() == expected.tolist()


def test_more_positions_than_the_capacity_are_refused() -> None:
    with pytest.raises(ValueError, match="More than 3 positions"):
        PositionCode(1000, 3).encode_flags(flags_at(torch.arange(1000), 1000), "auto")
