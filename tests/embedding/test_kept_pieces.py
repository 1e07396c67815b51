"""Which pieces of rows are kept: against loops over rows."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.embedding.kept_pieces import PIECES, KeptPieces

MASKS = st.lists(st.integers(0, 2**PIECES - 1), max_size=70)


def kept_by_loop(masks: list[int]) -> dict[tuple[int, int], int]:
    """Row and piece of each kept piece, with its place among them."""
    kept = [(row, piece) for row, mask in enumerate(masks) for piece in range(PIECES) if mask >> piece & 1]
    return {pair: place for place, pair in enumerate(kept)}


@given(MASKS, st.data())
def test_finds_what_a_loop_finds(masks: list[int], data: st.DataObject) -> None:
    pieces, by_loop = KeptPieces(np.array(masks, dtype=np.uint8)), kept_by_loop(masks)
    places = sorted(data.draw(st.sets(st.integers(0, len(masks) - 1)) if masks else st.just(set())))
    found, at = pieces.find(np.array(places, dtype=np.int64))
    expected = [
        (PIECES * number + piece, by_loop[row, piece])
        for number, row in enumerate(places)
        for piece in range(PIECES)
        if (row, piece) in by_loop
    ]
    assert list(zip(found.tolist(), at.tolist(), strict=True)) == expected
    assert pieces.num_pieces == len(by_loop)
    assert pieces.masks.tolist() == masks


@given(MASKS, st.integers(1, 3))
def test_what_is_packed_expands_to_the_same_rows(masks: list[int], width: int) -> None:
    pieces, by_loop = KeptPieces(np.array(masks, dtype=np.uint8)), kept_by_loop(masks)
    rows = torch.arange(1.0, len(masks) * PIECES * width + 1).view(-1, PIECES, width)
    packed, places = torch.zeros(pieces.num_pieces, width), np.arange(len(masks))
    pieces.pack(packed, places, rows)
    for (row, piece), place in by_loop.items():
        assert torch.equal(packed[place], rows[row, piece])
    expanded = pieces.expand(packed, places, torch.zeros_like(rows))
    for row in range(len(masks)):
        for piece in range(PIECES):
            expected = rows[row, piece] if (row, piece) in by_loop else torch.zeros(width)
            assert torch.equal(expanded[row, piece], expected)
