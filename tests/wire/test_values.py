import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.wire.values import BITS_PER_VALUE, decode_values, encode_values
from strategies_for_hypothesis import FORMATS, examples, floats

LARGEST = torch.finfo(torch.float32).max
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
NUM_TENSORS = 3
SCALED = ("2bit", "1bit")
entries = st.lists(st.tuples(st.integers(0, NUM_TENSORS - 1), floats), max_size=40).map(
    lambda case: sorted(case, key=lambda entry: entry[0])
)


def round_trip(
    values: Tensor, index: Tensor, value_format: str, num_tensors: int = NUM_TENSORS
) -> tuple[Tensor, Tensor]:
    counts = torch.bincount(index, minlength=num_tensors).tolist()
    data, scales = encode_values(values, counts, value_format, "torch")
    assert data.dtype == torch.uint8
    assert data.numel() == math.ceil(BITS_PER_VALUE[value_format] * values.numel() / 8)
    assert scales.shape == (num_tensors if value_format in SCALED else 0,)
    decoded = decode_values(data, counts, scales, value_format, kernel="torch")
    assert decoded.dtype == torch.float32
    return decoded, scales


def one_tensor(values: list[float], value_format: str) -> Tensor:
    tensor = torch.tensor(values)
    return round_trip(tensor, torch.zeros(len(values), dtype=torch.int64), value_format, 1)[0]


def as_tensors(case: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    index = torch.tensor([tensor for tensor, _ in case], dtype=torch.int64)
    return torch.tensor([value for _, value in case], dtype=torch.float32), index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value_format", FORMATS)
def test_values_of_any_dtype_whatever_the_default(value_format: str, dtype: torch.dtype) -> None:
    """Lightning changes the default in steps of ``precision="bf16-true"``.

    Oracle: the same values of fp32.
    """
    values = torch.tensor([1.5, -0.25, 3.0, -2.0, 0.5])
    torch.set_default_dtype(dtype)
    try:
        data, scales = encode_values(values.to(dtype), [2, 3], value_format)
    finally:
        torch.set_default_dtype(torch.float32)
    expected, of_each = encode_values(values, [2, 3], value_format, "torch")
    assert data.tolist() == expected.tolist()
    assert scales.dtype == torch.float32
    assert scales.tolist() == of_each.tolist()


# Of the value itself, of the largest of its tensor, and the finest denormals.
ERRORS = {"fp32": (0, 0, 0), "bf16": (2.0**-8, 0, 2.0**-134), "2bit": (0, 1.0, 2.0**-149)}


@pytest.mark.parametrize("value_format", ERRORS)
@given(case=entries)
@examples(60)
def test_error(value_format: str, case: list[tuple[int, float]]) -> None:
    """What the formats promise; every bit of them is in test_reference.py."""
    values, index = as_tensors(case)
    relative, of_largest, tiny = ERRORS[value_format]
    largest = (
        torch.zeros(NUM_TENSORS).scatter_reduce_(0, index, values.abs(), "amax").double()[index]
    )
    error = (round_trip(values, index, value_format)[0].double() - values.double()).abs()
    assert bool((error <= relative * values.double().abs() + of_largest * largest + tiny).all())


def test_2bit_byte_by_byte() -> None:
    values = torch.tensor([3.0, -1.5, -3.0, 1.5, 1.5, 2.0, -2.0])
    data, scales = encode_values(values, [5, 2], "2bit")
    # Positive values have the lower bit, and those of at least the mean of 2.1 the upper one, four
    # to a byte.
    assert data.tolist() == [3 | 0 << 2 | 2 << 4 | 1 << 6, 1 | 1 << 2 | 0 << 4]
    assert scales.tolist() == [1.5, 2.0]
    assert one_tensor(values.tolist()[:5], "2bit").tolist() == values.tolist()[:5]


@given(st.lists(st.floats(0.125, 1000, width=32), min_size=1, max_size=40))
@examples(60)
def test_two_levels_are_no_worse_than_one(magnitudes: list[float]) -> None:
    """Oracle: the squared error of the mean magnitude for all."""
    values = torch.tensor(magnitudes).double()
    error = (one_tensor(magnitudes, "2bit").double() - values).square().sum()
    assert error <= (values - values.mean()).square().sum() * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("value_format", FORMATS)
def test_nan_and_infinity_reach_the_reader(value_format: str, broken: float) -> None:
    values = torch.tensor([1.0, broken, -2.0, 3.0, 0.5])
    index = torch.tensor([0, 0, 0, 1, 2])
    decoded = round_trip(values, index, value_format)[0]
    assert decoded[1].isnan() if math.isnan(broken) else decoded[1] == broken
    others = [0, 2] if value_format not in SCALED else []
    assert bool(decoded[[*others, 3, 4]].isfinite().all())
    if value_format in SCALED:
        assert not bool(decoded[[0, 2]].isfinite().any())


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("largest", [LARGEST, -LARGEST, LARGEST * 0.999, LARGEST_BF16])
def test_large_finite_values_stay_finite(value_format: str, largest: float) -> None:
    decoded = one_tensor([largest, 1.0, largest], value_format)
    assert bool(decoded.isfinite().all())
    assert decoded[0] == pytest.approx(
        largest, rel=1.0 if value_format in ("1bit", "2bit") else 2.0**-8
    )


def test_bf16_overflow_ends_at_the_largest_bfloat16() -> None:
    assert one_tensor([LARGEST, -LARGEST], "bf16").tolist() == [LARGEST_BF16, -LARGEST_BF16]


@pytest.mark.parametrize("value_format", FORMATS)
def test_denormals(value_format: str) -> None:
    tiny = [1e-40, -3e-40, 2.0**-149]
    decoded = one_tensor(tiny, value_format)
    if value_format == "fp32":
        assert decoded.tolist() == torch.tensor(tiny).tolist()
    elif value_format == "1bit":
        assert decoded.abs().tolist() == pytest.approx([(1e-40 + 3e-40) / 3] * 3, rel=1e-3)
    elif value_format == "2bit":
        assert decoded.abs().tolist() == pytest.approx([1.4e-40, 2.8e-40, 1.4e-40], rel=1e-3)
    else:
        # Half of bfloat16's finest denormal.
        assert decoded.double().tolist() == pytest.approx(tiny, abs=2.0**-134)


@pytest.mark.parametrize("value_format", FORMATS)
def test_nothing_to_write(value_format: str) -> None:
    decoded, scales = round_trip(torch.empty(0), torch.empty(0, dtype=torch.int64), value_format)
    assert decoded.numel() == 0
    assert not scales.any()


@pytest.mark.parametrize("value_format", FORMATS)
def test_the_reader_gets_fp32_whatever_is_the_default(value_format: str) -> None:
    data, scales = encode_values(torch.tensor([0.75, -1.5, 3.0]), [3], value_format)
    expected = decode_values(data, [3], scales, value_format)
    torch.set_default_dtype(torch.float64)
    try:
        found = decode_values(data, [3], scales, value_format, kernel="torch")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
