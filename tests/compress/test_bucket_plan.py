import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.compress.bucket_plan import BucketPlan, plan_bucket
from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.values import BITS_PER_VALUE
from strategies_for_hypothesis import FORMATS, examples


def plan(sizes: list[int], densities: list[float] | float = 0.01, **settings: Any) -> BucketPlan:
    settings = {
        "dtype": torch.float32,
        "value_format": "bf16",
        "min_tensor_size": 0,
        "link_traversals": 2,
        **settings,
    }
    if isinstance(densities, float):
        densities = [densities] * len(sizes)
    return plan_bucket([f"p{index}" for index in range(len(sizes))], sizes, densities, **settings)


@pytest.mark.parametrize(
    ("density", "size", "target"),
    [(0.07, 100, 7), (0.29, 100, 29), (1e-9, 1000, 1), (0.56, 10**9, 56 * 10**7)],
)
def test_no_entry_more_from_floating_point(density: float, size: int, target: int) -> None:
    assert plan([size], density).targets == (target,)


@given(size=st.integers(200, 10**6), thousandths=st.integers(1, 100))
@examples(60)
def test_target_is_the_ceiling(size: int, thousandths: int) -> None:
    expected = math.ceil(Fraction(thousandths, 1000) * size)
    assert plan([size], thousandths / 1000, value_format="1bit").targets == (expected,)


def test_small_tensors_go_whole() -> None:
    assert plan([127, 128, 129], min_tensor_size=128).targets == (0, 2, 2)


def test_full_density_goes_whole() -> None:
    both = plan([1000, 1000], [1.0, 0.01])
    assert both.targets == (0, 10)
    assert not both.is_dense
    assert plan([1000, 5], 1.0).is_dense


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize(
    ("density", "world_size"), [(0.001, 64), (0.01, 8), (0.1, 3), (0.1, 64), (0.3, 2), (0.7, 2)]
)
def test_goes_whole_when_an_all_reduce_is_cheaper(
    density: float, world_size: int, value_format: str, dtype: torch.dtype
) -> None:
    size = 10_000
    target = math.ceil(density * size - 1e-9)
    # Bits through one rank's link: all-gather W payloads; ring all-reduce 2 tensors (both times (W
    # - 1) / W).
    gathered = world_size * target * (BITS_PER_VALUE[value_format] + 2 + math.log2(size / target))
    reduced = 2 * size * torch.finfo(dtype).bits
    made = plan([size], density, link_traversals=world_size, value_format=value_format, dtype=dtype)
    assert made.targets == (0 if gathered >= reduced else target,)


@given(data=st.data(), world_size=st.integers(1, 9), value_format=st.sampled_from(FORMATS))
@examples(60)
def test_a_tensors_neighbours_do_not_matter(
    data: st.DataObject, world_size: int, value_format: str
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
    densities = data.draw(st.lists(st.floats(1e-4, 1.0), min_size=len(sizes), max_size=len(sizes)))
    rules: dict[str, Any] = {
        "link_traversals": world_size,
        "value_format": value_format,
        "min_tensor_size": 100,
    }
    together = plan(sizes, densities, **rules)
    alone = [
        plan([size], [density], **rules).targets[0]
        for size, density in zip(sizes, densities, strict=True)
    ]
    assert list(together.targets) == alone


def test_bounds_indices_and_layout() -> None:
    made = plan([1000, 10, 500], [0.01, 1.0, 0.02])
    assert made.names == ("p0", "p1", "p2")
    assert made.bounds == ((0, 1000), (1000, 1010), (1010, 1510))
    assert made.compressed == (0, 2)
    assert made.dense == (1,)
    # Each compressed tensor begins at a word of flags.
    assert made.layout == PayloadLayout((1024, 512), (10, 10), "bf16", 4 * 10, (1000, 500))
    assert made.first == (0, 1024)
    words, beyond = made.layout.beyond
    assert [
        [word, f"{mask:032b}".rstrip("0")] for word, mask in zip(words, beyond, strict=True)
    ] == [
        [31, 24 * "1"],
        [47, 12 * "1"],
    ]
    assert plan([1000, 10], [0.01, 1.0], dtype=torch.bfloat16).layout.dense_bytes == 2 * 10


def test_residuals_are_summed_in_at_least_fp32() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    expected = [torch.float32, torch.float32, torch.float32, torch.float64]
    assert [plan([10], dtype=dtype).residual_dtype for dtype in dtypes] == expected
