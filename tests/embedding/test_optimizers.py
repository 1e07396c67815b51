import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dct import AdamWithRows, RowWiseAdagrad
from strategies_for_hypothesis import examples

ROWS = 6
DIM = 4
row_lists = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=8), min_size=1, max_size=5)


def sparse(
    rows: list[int], seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A gradient that names rows more than once and in any order."""
    values = scale * torch.randn(
        len(rows), DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, (ROWS, DIM), check_invariants=True
    )


def weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, ROWS * DIM, dtype=dtype).view(ROWS, DIM))


def step_by_loop(
    rows: np.ndarray, sums: np.ndarray, gradient: Tensor, rate: float, eps: float
) -> None:
    named = set(gradient._indices()[0].tolist())
    dense = gradient.to_dense().double().numpy()
    for row in named:
        sums[row] += sum(entry * entry for entry in dense[row]) / DIM
        for column in range(DIM):
            rows[row, column] -= rate * dense[row, column] / (math.sqrt(sums[row]) + eps)


@given(steps=row_lists, rate=st.sampled_from([0.01, 0.5]), eps=st.sampled_from([1e-10, 0.1]))
@examples(60)
def test_against_a_loop(steps: list[list[int]], rate: float, eps: float) -> None:
    parameter = weight(torch.float64)
    optimizer = RowWiseAdagrad([parameter], lr=rate, eps=eps)
    rows = parameter.detach().numpy().copy()
    sums = np.zeros(ROWS)
    for number, named in enumerate(steps):
        before = parameter.detach().clone()
        parameter.grad = sparse(named, number, dtype=torch.float64)
        optimizer.step()
        step_by_loop(rows, sums, parameter.grad, rate, eps)
        np.testing.assert_allclose(parameter.detach().numpy(), rows, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(
            optimizer.state[parameter]["sum"].numpy(), sums, rtol=1e-12, atol=1e-13
        )
        untouched = sorted(set(range(ROWS)) - set(named))
        assert torch.equal(parameter[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_gradients_get_torchs_adagrad(dtype: torch.dtype) -> None:
    ours = weight(dtype)
    theirs = weight(dtype)
    optimizers = (
        RowWiseAdagrad([ours], lr=0.3, eps=1e-6),
        torch.optim.Adagrad([theirs], lr=0.3, eps=1e-6),
    )
    for seed in range(5):
        gradient = torch.randn(
            ROWS, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype
        )
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_resumed_optimizer_goes_on_bit_for_bit(at: int) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = weight()
            self.top = nn.Parameter(torch.ones(3))

    def step(model: Tables, optimizer: RowWiseAdagrad, number: int) -> None:
        model.rows.grad = sparse([number % ROWS, 2, 2], number)
        model.top.grad = torch.full((3,), number + 1.0)
        optimizer.step()

    straight = Tables()
    optimizer = RowWiseAdagrad(straight.parameters(), lr=0.2)
    for number in range(5):
        if number == at:
            resumed = copy.deepcopy(straight)
            saved = copy.deepcopy(optimizer.state_dict())
        step(straight, optimizer, number)
    optimizer = RowWiseAdagrad(resumed.parameters(), lr=9.0)
    optimizer.load_state_dict(saved)
    for number in range(at, 5):
        step(resumed, optimizer, number)
    assert torch.equal(straight.rows, resumed.rows)
    assert torch.equal(straight.top, resumed.top)


def test_a_row_that_arrives_without_a_gradient_stays() -> None:
    parameter = weight()
    before = parameter.detach().clone()
    parameter.grad = sparse([0, 3], 0, scale=0.0)
    RowWiseAdagrad([parameter], lr=1.0).step()
    assert torch.equal(parameter, before)


def test_groups_closures_and_parameters_without_a_gradient() -> None:
    slow, fast, idle = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = RowWiseAdagrad([{"params": [slow, idle]}, {"params": [fast], "lr": 0.5}], lr=0.125)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (slow + fast).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 4.0
    assert (slow.tolist(), fast.tolist(), idle.tolist()) == ([0.875] * 2, [0.5] * 2, [1.0] * 2)
    assert optimizer.step() is None


@pytest.mark.parametrize("setting", ["lr", "eps"])
@pytest.mark.parametrize("value", [-1e-9, math.nan])
def test_settings_out_of_range(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{setting}` must not be negative; got {value!r}"):
        RowWiseAdagrad([weight()], **{setting: value})


def test_adam_with_rows_is_adamw_and_row_wise_adagrad() -> None:
    """Oracle: the two optimizers, one for each kind of parameter."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator), torch.randn(4, 3, generator=generator)
    rows, weights = (nn.Parameter(one.clone()) for one in start)
    own_rows, own_weights = (nn.Parameter(one.clone()) for one in start)
    together = AdamWithRows(
        [{"params": [rows], "lr": 0.3}, {"params": [weights]}], lr=0.01, weight_decay=0.1
    )
    apart = [
        RowWiseAdagrad([own_rows], lr=0.3),
        torch.optim.AdamW([own_weights], lr=0.01, weight_decay=0.1),
    ]
    for _ in range(5):
        ids = torch.randint(0, 6, (3,), generator=generator)
        for table, top in ((rows, weights), (own_rows, own_weights)):
            (nn.functional.embedding(ids, table, sparse=True) @ top).square().sum().backward()
        for one in (together, *apart):
            one.step()
            one.zero_grad()
    assert torch.equal(rows, own_rows)
    assert torch.equal(weights, own_weights)
    assert not torch.equal(weights, start[1])


@pytest.mark.parametrize(
    "settings", [{"lr": -1}, {"eps": -1}, {"betas": (0.9, 1.0)}, {"row_eps": math.nan}]
)
def test_adam_with_rows_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        AdamWithRows([nn.Parameter(torch.ones(1))], **settings)
