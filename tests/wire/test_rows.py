import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.activations.split_point import ROW_FORMATS
from lightning_dct.wire.rows import (
    LEVELS,
    decode_rows,
    encode_rows,
    row_scales_num_bytes,
    row_values_num_bytes,
)
from rows_by_loop import scales_by_loop
from strategies_for_hypothesis import examples, floats

LARGEST = torch.finfo(torch.float32).max
NUM_ROWS = 3
FORMATS = sorted(ROW_FORMATS)
LOW_BIT = sorted(LEVELS)
entries = st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), floats), max_size=40)


def round_trip(
    values: Tensor,
    rows: Tensor | None,
    value_format: str,
    num_rows: int = NUM_ROWS,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The values as read back, and the scales."""
    data, scale_bytes = encode_rows(values, rows, num_rows, value_format, noise)
    assert data.dtype == scale_bytes.dtype == torch.uint8
    assert data.numel() == row_values_num_bytes(value_format, values.numel())
    assert scale_bytes.numel() == row_scales_num_bytes(value_format, num_rows)
    decoded = decode_rows(data, values.numel(), rows, scale_bytes, value_format)
    assert decoded.dtype == torch.float32
    if value_format not in LEVELS or not num_rows:
        return decoded, torch.empty(0)
    # A step of one in every row shows the scale.
    ones = {"int8": 1, "int4": 9 | 9 << 4}[value_format]
    data = torch.full((num_rows,), ones, dtype=torch.uint8)
    return decoded, decode_rows(data, num_rows, torch.arange(num_rows), scale_bytes, value_format)[
        :num_rows
    ]


def as_rows(case: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([row for row, _ in case], dtype=torch.int64)
    return torch.tensor([value for _, value in case], dtype=torch.float32), rows


@given(case=entries)
@examples(60)
def test_fp32_is_exact_and_bf16_is_nearest(case: list[tuple[int, float]]) -> None:
    values, rows = as_rows(case)
    assert torch.equal(
        round_trip(values, rows, "fp32")[0].view(torch.int32), values.view(torch.int32)
    )
    limit = torch.finfo(torch.bfloat16).max
    assert torch.equal(
        round_trip(values, rows, "bf16")[0], values.to(torch.bfloat16).float().clamp(-limit, limit)
    )


@pytest.mark.parametrize("value_format", LOW_BIT)
@given(case=entries, seed=st.none() | st.integers(0, 99))
@examples(60)
def test_low_bits_by_loop(
    value_format: str, case: list[tuple[int, float]], seed: int | None
) -> None:
    values, rows = as_rows(case)
    levels = LEVELS[value_format]
    noise = (
        None
        if seed is None
        else torch.rand(len(case), generator=torch.Generator().manual_seed(seed))
    )
    decoded, scales = round_trip(values, rows, value_format, noise=noise)
    flat = list(zip(rows.tolist(), values.tolist(), strict=True))
    largest = [
        max((abs(value) for r, value in flat if r == row), default=0.0) for row in range(NUM_ROWS)
    ]
    assert scales.tolist() == scales_by_loop(largest, levels)
    for i, (row, value) in enumerate(flat):
        scale = scales[row].item()
        quotient = float(np.float32(value) / np.float32(scale)) if scale else 0.0
        if noise is None:
            step = round(quotient)
        else:
            step = math.floor(quotient) + (noise[i].item() < quotient - math.floor(quotient))
        step = max(-levels, min(levels, step))
        assert decoded[i].item() == float(np.float32(scale) * np.float32(step))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("equal_rows", [False, True])
def test_nan_and_infinity_reach_the_reader(
    value_format: str, broken: float, equal_rows: bool
) -> None:
    values = torch.tensor([1.0, broken, 3.0, 0.5])
    rows = None if equal_rows else torch.tensor([0, 0, 1, 1])
    for noise in (None, torch.full((4,), 0.5)):
        decoded = round_trip(values, rows, value_format, 2, noise)[0]
        assert not decoded[1].isfinite()
        assert bool(decoded[2:].isfinite().all())
        assert bool(decoded[0].isfinite()) == (value_format not in LOW_BIT)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("largest", [LARGEST, -LARGEST, LARGEST * 0.999, LARGEST * 0.99])
def test_large_finite_values_stay_finite(value_format: str, largest: float) -> None:
    values = torch.tensor([largest, 1.0, largest])
    for noise in (None, torch.full((3,), 1 - 2.0**-24), torch.zeros(3)):
        decoded = round_trip(values, None, value_format, 1, noise)[0]
        assert bool(decoded.isfinite().all())
        assert decoded[0] == pytest.approx(largest, rel=0.16 if value_format == "int4" else 0.02)


@pytest.mark.parametrize("value_format", LOW_BIT)
def test_rows_below_the_smallest_scale_are_rounded_in_expectation(value_format: str) -> None:
    values = torch.tensor([1.0, 2.0**-50])
    rows = torch.arange(2)
    for noise, survives in ((0.0, True), (0.5, False)):
        decoded = round_trip(values, rows, value_format, 2, torch.full((2,), noise))[0]
        assert bool(decoded[1] > 0) == survives


@given(case=st.integers(0, 5).flatmap(lambda n: st.lists(floats, min_size=3 * n, max_size=3 * n)))
@pytest.mark.parametrize("value_format", FORMATS)
@examples(60)
def test_equal_rows_are_rows(value_format: str, case: list[float]) -> None:
    values = torch.tensor(case)
    rows = torch.arange(len(case)) // 3
    noise = torch.rand(len(case), generator=torch.Generator().manual_seed(1))
    ours, theirs = (
        round_trip(values, r, value_format, len(case) // 3, noise) for r in (None, rows)
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_written_like_fp32(value_format: str, dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, -0.25, 3.0, -2.0, 0.125])
    rows = torch.tensor([0, 0, 1, 1, 2])
    ours, theirs = (round_trip(v, rows, value_format)[0] for v in (values.to(dtype), values))
    assert torch.equal(ours, theirs)


def test_int4_bytes() -> None:
    data, scale_bytes = encode_rows(torch.tensor([7.0, -7.0, 1.0]), None, 1, "int4")
    assert scale_bytes.tolist() == [*torch.tensor([1.0]).view(torch.uint8).tolist(), 254]
    assert data.tolist() == [15 | 1 << 4, 9]
    assert decode_rows(
        torch.tensor([0xF0], dtype=torch.uint8), 2, None, scale_bytes, "int4"
    ).tolist() == [-8.0, 7.0]


def test_scales_are_rounded_up_by_an_eleventh_at_most_and_reach_down_31_octaves() -> None:
    largest = torch.exp2(torch.linspace(-31.5, 0, 1000))
    scales = round_trip(largest * 7, torch.arange(1000), "int4", 1000)[1]
    assert bool((scales >= largest).all())
    assert bool((scales <= largest * 2 ** (1 / 8) * (1 + 1e-6)).all())
    below = round_trip(torch.tensor([7.0, 7 * 2.0**-40]), torch.arange(2), "int4", 2)[1]
    assert below.tolist() == [1.0, float(np.float32(2.0 ** (-253 / 8)))]
