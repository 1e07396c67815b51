"""Clipping by the norm over several ranks, and what a strategy changes for it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_dct import DCTStrategy, clipping
from lightning_dct.clipping import clip_grad_norm, install_clipping


def test_clipping_is_lightnings_own_again_after_teardown() -> None:
    precision = Precision()
    strategy = DCTStrategy(
        CPUAccelerator(),
        precision_plugin=precision,
        cluster_environment=LightningEnvironment(),
        parallel_devices=[],
    )
    install_clipping(precision, None, lambda parameter: True)
    assert {"clip_grad_by_norm", "clip_grad_by_value"} <= vars(precision).keys()
    strategy.teardown()
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & vars(precision).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_equals_torchs(max_norm: float, dtype: torch.dtype) -> None:
    """Oracle: torch.nn.utils.clip_grad_norm_, for dense gradients on one rank."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8)).to(dtype)
    twin = copy.deepcopy(layers)
    for one, other in zip(layers.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    first, *rest = layers.parameters()
    norm = clip_grad_norm([first], max_norm, None, shared=rest)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    torch.testing.assert_close(norm, expected, check_dtype=False)
    for one, other in zip(layers.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_clipping_of_sparse_gradients() -> None:
    """Oracle: the same gradient, dense: row 1 is named twice and counts with its sum."""
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    dense = embedding.weight.grad.to_dense()
    norm = clip_grad_norm([embedding.weight], 0.5, None)
    torch.testing.assert_close(norm, dense.norm())
    torch.testing.assert_close(embedding.weight.grad.to_dense(), dense * 0.5 / dense.norm())


def test_clipping_of_sparse_gradients_by_value() -> None:
    """Oracle: as above. Row 1 has twice one, which is more than the bound."""
    embedding = nn.Embedding(5, 2, sparse=True)
    precision = Precision()
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    dense = embedding.weight.grad.to_dense()
    install_clipping(precision, None, lambda parameter: True)
    precision.clip_grad_by_value(torch.optim.SGD(embedding.parameters(), 0.1), 1.5)
    assert torch.equal(embedding.weight.grad.to_dense(), dense.clamp(-1.5, 1.5))


def test_clipping_without_gradients() -> None:
    assert float(clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0, None)) == 0.0


@pytest.mark.parametrize("has_parameters", [True, False])
def test_clipping_without_gradients_meets_the_others_on_the_device(
    has_parameters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU tensor in a collective among GPUs is an error with NCCL, or a hang; "meta" stands for
    the GPU.
    """
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(clipping.dist, "all_reduce", lambda squares, group: summed.append(squares))
    group = SimpleNamespace(_device_types=[torch.device("meta")])
    own = [nn.Parameter(torch.ones(2, device="meta"))] if has_parameters else []
    clip_grad_norm(own, 1.0, group)  # type: ignore[arg-type]
    assert [squares.device.type for squares in summed] == ["meta"]
