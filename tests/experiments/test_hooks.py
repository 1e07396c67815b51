import gc
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from test_rivals import Regression, flat, rows_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from distributed.harness import Ranks
from distributed.training import trainer_for
from lightning_dct.traffic import Traffic, all_reduce_bytes
from rivals.hooks import (
    CountedDDPStrategy,
    _CountedHook,
    _PowerSGDCount,
    counted_hook,
    counted_powersgd_hook,
)
from rivals.top_k import TopKSynchronizer

STEPS = 6
DENSE_STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3, bias=False), nn.Linear(3, 1)
    )


def run(state: _CountedHook, hook: object) -> None:
    model = DistributedDataParallel(network(), bucket_cap_mb=1000)
    model.register_comm_hook(state, hook)
    for _ in range(STEPS):
        model(torch.randn(8, 40)).sum().backward()


def test_powersgd_is_counted_as_it_counts_itself(group: dist.ProcessGroup) -> None:
    state = _PowerSGDCount(Traffic(), group, rank=4, start_step=DENSE_STEPS)
    run(state, counted_powersgd_hook)
    entries = sum(parameter.numel() for parameter in network().parameters())
    totals = state.traffic.totals
    _, before, after = state.state.compression_stats()
    assert totals.steps == STEPS
    assert totals.entries == STEPS * entries
    assert before == (STEPS - DENSE_STEPS) * entries
    assert after < before
    assert totals.entries_sent == DENSE_STEPS * entries + after


@pytest.mark.parametrize(("dtype", "ratio"), [(None, 1), (torch.float16, 2), (torch.bfloat16, 2)])
def test_a_dense_hook_is_counted_by_its_width(
    group: dist.ProcessGroup, dtype: torch.dtype | None, ratio: int
) -> None:
    state = _CountedHook(Traffic(), group, dtype)
    state.world_size = 4  # The count is pure arithmetic: pretend that there are others.
    run(state, counted_hook)
    entries = sum(parameter.numel() for parameter in network().parameters())
    totals = state.traffic.totals
    assert totals.steps == STEPS
    assert totals.entries_sent == totals.entries == STEPS * entries
    assert totals.bytes_dense == STEPS * all_reduce_bytes(4 * entries, 4)
    assert totals.compression_ratio == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("synchronisation", "fp8"), ("rank", 0), ("start_step", 1), ("density", 0.0)],
)
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{setting}="):
        CountedDDPStrategy(**{setting: value})


def train_two_steps(synchronisation: str, settings: dict[str, float]) -> dict[str, object]:
    """On every rank: what the weights, the residual and the counts are after two steps on the
    rank's own data.
    """
    strategy = CountedDDPStrategy(synchronisation, **settings)
    module = Regression()
    trainer_for(strategy, max_steps=2).fit(
        module, DataLoader(rows_of(dist.get_rank()), batch_size=None)
    )
    gc.collect()
    return {"weights": flat(module), "totals": strategy.traffic.totals}


def test_dense_peers_agree_with_ddp(ranks: Callable[[int], Ranks]) -> None:
    """Oracle: DDP in fp32; top-k of everything is that, two-byte gradients come near it."""
    dense, other = ranks(2).run(train_two_steps, "fp32", {})
    torch.testing.assert_close(other["weights"], dense["weights"], rtol=0, atol=0)
    for synchronisation, settings, tolerance in (
        ("top_k", {"density": 1.0}, 1e-6),
        ("bf16", {}, 1e-2),
    ):
        mine, other = ranks(2).run(train_two_steps, synchronisation, settings)
        torch.testing.assert_close(other["weights"], mine["weights"], rtol=0, atol=0)
        torch.testing.assert_close(mine["weights"], dense["weights"], rtol=0, atol=tolerance)
        assert mine["totals"].steps == 2
        assert mine["totals"].seconds > 0


def test_replicas_without_synchronisation_part(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(train_two_steps, "none", {})
    assert not torch.equal(first["weights"], second["weights"])
    assert first["totals"].bytes_sent == 0


def test_top_k_sends_the_largest_and_keeps_the_rest(group: dist.ProcessGroup) -> None:
    """Oracle: a selection by sorting, tensor by tensor, from the gradients and what was kept of
    them.
    """
    model = DistributedDataParallel(network(), bucket_cap_mb=1000)
    synchronizer = TopKSynchronizer(model.module, 0.1, group, Traffic())
    model.register_comm_hook(None, synchronizer.hook)
    alone = network()
    kept = {name: torch.zeros(parameter.numel()) for name, parameter in alone.named_parameters()}
    for seed in range(STEPS):
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
        for module in (model, alone):
            module.zero_grad()
            module(inputs).square().sum().backward()
        sent = dict(model.module.named_parameters())
        for name, parameter in alone.named_parameters():
            kept[name] += parameter.grad.flatten()
            largest = (
                kept[name].abs().argsort(descending=True)[: math.ceil(0.1 * parameter.numel())]
            )
            expected = torch.zeros_like(kept[name])
            expected[largest] = kept[name][largest]
            kept[name][largest] = 0
            torch.testing.assert_close(sent[name].grad.flatten(), expected, rtol=1e-5, atol=1e-5)
    for name, residual in synchronizer.residuals.state_dict().items():
        torch.testing.assert_close(residual, kept[name], rtol=1e-5, atol=1e-5)
