"""What the property tests share: how many examples they take, and layouts of payloads with their
entries.
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.kernels.bits import flags_num_bytes, pack_bits
from lightning_dct.wire.payload import PayloadLayout, pack_payload, unpack_values
from lightning_dct.wire.positions import count_flags
from lightning_dct.wire.values import BITS_PER_VALUE

FORMATS = sorted(BITS_PER_VALUE)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def examples(count: int) -> settings:
    """So many, the same in every run, or fewer where the profile has fewer: see conftest.py."""
    return settings(max_examples=min(count, settings.default.max_examples))


@st.composite
def layouts(draw: st.DrawFn) -> PayloadLayout:
    """Up to five small tensors, some of them whole (capacity 0)."""
    sizes = draw(st.lists(st.integers(1, 40), max_size=5))
    capacities = [draw(st.integers(0, size)) for size in sizes]
    dense_bytes = draw(st.sampled_from([2, 4, 8])) * sum(
        n for n, k in zip(sizes, capacities, strict=True) if not k
    )
    return PayloadLayout(
        tuple(sizes), tuple(capacities), draw(st.sampled_from(FORMATS)), dense_bytes
    )


@st.composite
def filled_layouts(draw: st.DrawFn) -> tuple[PayloadLayout, Tensor, Tensor, Tensor]:
    """A layout with positions, values and whole bytes that fit it."""
    layout = draw(layouts())
    positions: list[int] = []
    start = 0
    for size, capacity in zip(layout.tensor_sizes, layout.capacities, strict=True):
        if capacity:
            chosen = draw(st.sets(st.integers(0, size - 1), max_size=capacity))
            positions += [start + position for position in sorted(chosen)]
        start += size
    values = draw(st.lists(floats, min_size=len(positions), max_size=len(positions)))
    whole = draw(st.binary(min_size=layout.dense_bytes, max_size=layout.dense_bytes))
    return (
        layout,
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(list(whole), dtype=torch.uint8),
    )


def flags_at(positions: Tensor, size: int) -> Tensor:
    """The flags of ``size`` entries, which are set at some positions."""
    return pack_bits(
        torch.zeros(8 * flags_num_bytes(size), dtype=torch.uint8).index_fill_(0, positions, 1)
    )


def pack_entries(
    layout: PayloadLayout, positions: Tensor, values: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor]:
    """A payload of the entries at some positions, and what is read of them."""
    flags = flags_at(positions, sum(layout.tensor_sizes))
    counts = count_flags(flags, layout.tensor_sizes, "auto")
    payload = pack_payload(layout, flags, values, counts, whole)
    return payload, unpack_values(layout, payload, counts)
