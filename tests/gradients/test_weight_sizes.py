"""How large weights are, against plain sorting and repeating, and how seldom they are looked at."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.gradients.weight_sizes import WeightSizes, middle_size


@given(
    st.lists(st.tuples(st.sampled_from((0.0, 0.001, 0.5, 0.75, 3.0, 1e3)), st.integers(1, 9)), min_size=1, max_size=8)
)
def test_middle_size(groups: list[tuple[float, int]]) -> None:
    """Oracle: the size of its tensor written down once for each entry, sorted; the lower one of the middle two."""
    tensors = [torch.full((count,), value) for value, count in groups]
    one_an_entry = sorted(value for value, count in groups for _ in range(count))
    assert middle_size(tensors) == pytest.approx(one_an_entry[(len(one_an_entry) - 1) // 2], rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_root_mean_square(dtype: torch.dtype) -> None:
    """Oracle: the formula in fp64."""
    tensor = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = float(tensor.double().square().mean().sqrt())
    assert middle_size([tensor]) == pytest.approx(expected, rel=0.01 if tensor.element_size() == 2 else 1e-6)


def ones(factor: float) -> dict[str, Tensor]:
    return {"weight": torch.full((4,), factor), "bias": torch.zeros(1)}


def test_measured_now_and_then() -> None:
    """Oracle: weights that are as large as the step is late."""
    sizes = WeightSizes(every=10)
    seen = [sizes.of(ones(float(step)), step) for step in (3, 4, 12, 13, 14, 40, 41)]
    assert seen == [3.0, 3.0, 3.0, 13.0, 13.0, 40.0, 40.0]


def test_groups_by_themselves() -> None:
    """Oracle: each group's own size; none for no tensors."""
    sizes = WeightSizes(every=10)
    assert [sizes.of({"a": torch.ones(4)}, 0), sizes.of({"b": torch.zeros(4)}, 1), sizes.of({}, 2)] == [1.0, 0.0, 0.0]


def test_goes_on_after_a_restart() -> None:
    """Oracle: the one that was not interrupted."""
    before, after = WeightSizes(every=10), WeightSizes(every=10)
    before.of(ones(1.0), 5)
    after.load_state_dict(before.state_dict())
    assert [after.of(ones(2.0), step) for step in (6, 14, 15)] == [before.of(ones(2.0), step) for step in (6, 14, 15)]
    assert after.of(ones(3.0), 16) == 2.0
