"""Rows of equal length: the compiled loop against the operations in torch, to the last bit."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.activations import codec
from lightning_dct.activations.codec import (
    ActivationLayout,
    decode_backward,
    decode_forward,
    encode_backward,
    encode_forward,
)
from lightning_dct.kernels import compiled, numba_rows
from lightning_dct.wire.rows import LEVELS
from strategies_for_hypothesis import examples

LARGEST = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-20, 1.0, LARGEST, -LARGEST, 0.999 * LARGEST]
BROKEN = [math.nan, math.inf, -math.inf]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def bits(tensor: Tensor) -> Tensor:
    """The bytes themselves, which tell negative zeros and NaNs apart."""
    return tensor.reshape(-1).view(torch.uint8)


def both_ways(layout: ActivationLayout, dense: Tensor, seed: int | None) -> list[Tensor]:
    """The payloads of both directions, and what is read from them."""
    forward = encode_forward(layout, dense, None, seed)
    backward = encode_backward(layout, dense, None, seed)
    received = decode_forward(layout, forward, dense.dtype)[0]
    return [forward, received, backward, decode_backward(layout, backward, None, dense.dtype)]


def assert_same(dense: Tensor, formats: tuple[str, str], seed: int | None) -> None:
    layout = ActivationLayout(tuple(dense.shape), dense.numel(), *formats)
    ours = both_ways(layout, dense, seed)
    with mock.patch.object(codec, "compiled", return_value=None):
        theirs = both_ways(layout, dense, seed)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(bits(one), bits(other))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 17, 52, 65]), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 3.0, 25.0]))
    rows = (
        torch.randn([*shape[:-1], 1], generator=generator).mul_(spread).exp_()
        if shape
        else torch.ones(())
    )
    flat = (torch.randn(shape, generator=generator) * rows).reshape(-1)
    for value in (
        draw(st.lists(st.sampled_from(SPECIAL) | st.sampled_from(BROKEN), max_size=6))
        if flat.numel()
        else []
    ):
        flat[draw(st.integers(0, flat.numel() - 1))] = value
    dense = flat.view(shape).to(draw(st.sampled_from(DTYPES)))
    return dense.transpose(0, -1) if dense.dim() and draw(st.booleans()) else dense


@given(
    dense=tensors(),
    formats=st.tuples(st.sampled_from(sorted(LEVELS)), st.sampled_from(sorted(LEVELS))),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
@examples(400)
def test_equals_torch_to_the_last_bit(
    dense: Tensor, formats: tuple[str, str], seed: int | None
) -> None:
    assert_same(dense, formats, seed)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("value", [*SPECIAL, *BROKEN])
def test_tensors_of_one_value(value: float, seed: int | None) -> None:
    """Scales at the ends of their range, and rows without one."""
    assert_same(torch.full((3, 5), value), ("int8", "int4"), seed)


def test_a_transposed_tensor_compiles_nothing_new() -> None:
    assert_same(torch.randn(3, 5), ("int8", "int4"), None)
    compiled = len(numba_rows._encode.signatures)
    assert_same(torch.randn(5, 3).t(), ("int8", "int4"), None)
    assert len(numba_rows._encode.signatures) == compiled


def test_more_numbers_than_one_chunk_of_noise() -> None:
    assert_same(torch.randn(700, 101), ("int8", "int4"), 3)


@given(payload=st.binary(min_size=4 + 5 + 8, max_size=4 + 5 + 8))
@examples(200)
def test_any_bytes_are_read_alike(payload: bytes) -> None:
    """Negative, infinite and NaN scales, and codes that nobody writes."""
    layout = ActivationLayout((5, 3), 15, "int8", "int4")
    data = torch.tensor(list(payload), dtype=torch.uint8)
    ours = decode_backward(layout, data, None)
    with mock.patch.object(codec, "compiled", return_value=None):
        theirs = decode_backward(layout, data, None)
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert torch.equal(ours.signbit() & ours.isfinite(), theirs.signbit() & theirs.isfinite())


def test_places_that_32_bits_do_not_hold() -> None:
    """Oracle: torch's places, which are int32."""
    places = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5]
    keys = (123456789, 3987654321)
    low, high = (torch.tensor(key).to(torch.int32) for key in keys)
    hashed = codec._hashed(codec._hashed(torch.tensor(places).to(torch.int32) ^ low) + high)
    expected = (hashed & 0xFFFFFF) * 2.0**-24
    assert [
        numba_rows._noise(place, *map(np.uint32, keys)) for place in places
    ] == expected.tolist()


def test_only_a_cpu_has_this_kernel() -> None:
    assert compiled("cpu", loops="numba_rows") is numba_rows
    assert compiled("cuda", loops="numba_rows") is None
