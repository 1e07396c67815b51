import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_dct.activations import codec
from lightning_dct.activations.codec import (
    ActivationLayout,
    decode_backward,
    decode_forward,
    encode_backward,
    encode_forward,
)
from lightning_dct.activations.split_point import ROW_FORMATS, SplitPoint
from lightning_dct.wire.positions import PayloadError
from lightning_dct.wire.rows import LEVELS
from rows_by_loop import scales_by_loop
from strategies_for_hypothesis import examples

shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)
numbers = st.floats(width=16, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, 1.0, -1.0, 1e-40]
)


@pytest.fixture(autouse=True, params=["torch", "fastest"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(codec, "compiled", lambda device_type, loops: None)


@st.composite
def layouts(draw: st.DrawFn) -> ActivationLayout:
    density = draw(st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 1.0]))
    formats = [draw(st.sampled_from(ROW_FORMATS)) for _ in range(2)]
    split = SplitPoint(density, forward_format=formats[0], backward_format=formats[1])  # type: ignore[arg-type]
    return split.layout(draw(shapes))


@st.composite
def layouts_and_entries(draw: st.DrawFn) -> tuple[ActivationLayout, Tensor, Tensor | None]:
    layout = draw(layouts())
    dense = torch.tensor(
        draw(st.lists(numbers, min_size=layout.numel, max_size=layout.numel)), dtype=torch.float32
    )
    positions = None
    if not layout.sends_everything:
        chosen = draw(st.sets(st.integers(0, layout.numel - 1), max_size=layout.capacity))
        positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    return layout, dense.view(layout.shape), positions


def decoded_by_loop(
    dense: Tensor, positions: Tensor | None, row_length: int, value_format: str
) -> list[float]:
    """What arrives, to nearest, by the docstring of the rows."""
    flat = dense.reshape(-1).tolist()
    sent = list(range(len(flat))) if positions is None else positions.tolist()
    out = [0.0] * len(flat)
    if value_format in LEVELS:
        rows = sorted({place // row_length for place in sent})
        largest = [
            max(abs(flat[place]) for place in sent if place // row_length == row) for row in rows
        ]
        scales = (
            dict(zip(rows, scales_by_loop(largest, LEVELS[value_format]), strict=True))
            if rows
            else {}
        )
    for place in sent:
        if value_format == "fp32":
            out[place] = flat[place]
        elif value_format == "bf16":
            out[place] = torch.tensor(flat[place]).bfloat16().item()
        else:
            scale = np.float32(scales[place // row_length])
            step = round(float(np.float32(flat[place]) / scale)) if scale else 0
            out[place] = float(
                scale * np.float32(max(-LEVELS[value_format], min(LEVELS[value_format], step)))
            )
    return out


@given(case=layouts_and_entries())
@examples(200)
def test_round_trip_by_loop(case: tuple[ActivationLayout, Tensor, Tensor | None]) -> None:
    layout, dense, positions = case
    encoded = encode_forward(layout, dense, positions)
    assert encoded.shape == (layout.forward_bytes,)
    received, places = decode_forward(layout, encoded)
    assert received.shape == layout.shape
    assert received.reshape(-1).tolist() == decoded_by_loop(
        dense, positions, layout.row_length, layout.forward_format
    )
    assert (places is None) == (positions is None)
    if positions is not None and places is not None:
        assert places.tolist() == positions.tolist()

    gradient = dense.flip(0) if dense.dim() else dense * 2
    payload = encode_backward(layout, gradient, places)
    assert payload.shape == (layout.backward_bytes,)
    assert 0 <= 4 * layout.on_the_wire[0] - payload.numel() < 4
    assert 4 * layout.on_the_wire[0] + layout.on_the_wire[1] >= encoded.numel()
    returned = decode_backward(layout, payload, positions)
    assert returned.shape == layout.shape
    expected = decoded_by_loop(gradient, positions, layout.row_length, layout.backward_format)
    assert returned.reshape(-1).tolist() == expected


@pytest.mark.parametrize("value_format", ROW_FORMATS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_entries_arrive_broken_and_alone_in_their_row(
    value_format: str, broken: float
) -> None:
    split = SplitPoint(density=0.25, forward_format=value_format, backward_format=value_format)
    activations = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    activations[3, 5] = broken
    activations.requires_grad_()
    received = split(activations)
    assert not received[3, 5].isfinite()
    others = [row for row in range(8) if row != 3]
    assert bool(received[others].isfinite().all())
    received.backward(torch.full((8, 16), broken))
    assert activations.grad is not None
    # What few bits make of an entry may be zero; which are sent does not depend on them.
    sent = SplitPoint(density=0.25, forward_format="fp32")(activations) != 0
    assert torch.equal(~activations.grad.isfinite(), sent)


def test_a_compiled_network_rounds_alike() -> None:
    """Oracle: the network that is not compiled.

    What is before and after the border is compiled, once for all steps.
    """
    gradients = []
    counters.clear()
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        split = SplitPoint(density=1.0, forward_format="int8", backward_format="int4")
        first = nn.Linear(8, 5)
        last = nn.Linear(5, 2)

        def network(
            inputs: Tensor, first: Any = first, split: Any = split, last: Any = last
        ) -> Any:
            return last(split(first(inputs)))

        called = torch.compile(network, backend="eager") if compiled else network
        for step in range(3):
            split.advance(step)
            called(torch.randn(3, 8)).sum().backward()
        gradients.append(first.weight.grad)
    assert torch.equal(*gradients)
    assert counters["stats"]["unique_graphs"] == 2


def test_largest_half_precision_numbers_stay_finite() -> None:
    activations = torch.full((2, 4), 65504.0, dtype=torch.float16)
    for value_format in ROW_FORMATS:
        split = SplitPoint(density=1.0, forward_format=value_format, backward_format=value_format)
        assert bool(split(activations).isfinite().all())


def test_sizes_for_a_transformer() -> None:
    """[2048, 768] at 5%: how many times fewer bytes than dense fp32."""
    for value_format, forward, backward in [
        ("bf16", 28.7, 39.9),
        ("int8", 44.2, 77.9),
        ("int4", 61.1, 152.0),
    ]:
        split = SplitPoint(0.05, forward_format=value_format, backward_format=value_format)  # type: ignore[arg-type]
        layout = split.layout((2048, 768))
        assert 4 * layout.numel / layout.forward_bytes > forward
        assert 4 * layout.numel / layout.backward_bytes > backward


def test_everything_needs_no_positions_and_few_entries_few_scales() -> None:
    everything = SplitPoint(density=1.0, forward_format="int4").layout((64, 16))
    assert everything.forward_bytes == 12 + 4 + 64 + 8 * 64
    few = SplitPoint(density=0.01, forward_format="int4").layout((64, 16))
    assert few.forward_bytes - few.values_begin == 4 + 11 + 6
    assert SplitPoint(density=0.5).layout((64, 16)).values_begin == 12 + 64 * 16 // 8


# Payloads that cannot be what another rank meant to send.


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_lengths_are_named(change: int) -> None:
    layout = SplitPoint(density=0.1).layout((10, 10))
    positions = torch.arange(5)
    encoded = encode_forward(layout, torch.randn(10, 10), positions)
    gradient = encode_backward(layout, torch.randn(10, 10), positions)

    def resized(payload: Tensor) -> Tensor:
        return torch.cat([payload, payload[:1]]) if change > 0 else payload[:-1]

    with pytest.raises(PayloadError, match="payload has"):
        decode_forward(layout, resized(encoded))
    with pytest.raises(PayloadError, match="payload has"):
        decode_backward(layout, resized(gradient), positions)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0xDC, "begins with 0xdc"),
        (1, 9, "layout version 9"),
        (2, 1, "value format has code 1"),
        (4, 200, "claims 200 entries"),
        (4, 4, "positions are marked, but the header says 4"),
        (8, 77, "other tensor sizes"),
    ],
)
def test_wrong_headers_are_named(at: int, value: int, message: str) -> None:
    layout = SplitPoint(density=0.1).layout((10, 10))
    encoded = encode_forward(layout, torch.randn(10, 10), torch.arange(5))
    encoded[at] = value
    with pytest.raises(PayloadError, match=message):
        decode_forward(layout, encoded)
