import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.wire.bitmap import Bitmap, shortest_code
from lightning_dct.wire.positions import PositionCode
from strategies_for_hypothesis import examples


@given(universe=st.integers(0, 300), data=st.data())
@examples(150)
def test_round_trip_and_bytes(universe: int, data: st.DataObject) -> None:
    positions = sorted(data.draw(st.sets(st.integers(0, universe - 1)))) if universe else []
    code = Bitmap(universe)
    message = code.encode(torch.tensor(positions, dtype=torch.int64))
    expected = [sum(1 << (p - 8 * at) for p in positions if p // 8 == at) for at in range(-(-universe // 8))]
    assert message.tolist() == expected
    assert message.numel() == code.num_bytes
    assert code.decode(message, len(positions)).tolist() == positions
    with pytest.raises(ValueError, match="marked where the header says"):
        code.decode(message, len(positions) + 1)


@given(universe=st.integers(1, 5000), data=st.data())
@examples(150)
def test_the_shortest_is_the_shortest(universe: int, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(0, universe))
    code = shortest_code(universe, capacity)
    assert code.num_bytes == min(Bitmap(universe).num_bytes, PositionCode(universe, capacity).num_bytes)


@pytest.mark.parametrize(("share", "kind"), [(0.05, PositionCode), (0.2, PositionCode), (0.3, Bitmap), (1.0, Bitmap)])
def test_a_bitmap_wins_above_a_quarter(share: float, kind: type) -> None:
    assert isinstance(shortest_code(100_000, int(share * 100_000)), kind)
