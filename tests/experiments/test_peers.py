from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dct.traffic import Traffic, all_reduce_bytes
from peers import (
    CountedDDPStrategy,
    _CountedHook,
    _PowerSGDCount,
    counted_fp16_hook,
    counted_fp32_hook,
    counted_powersgd_hook,
)

STEPS, DENSE_STEPS = 6, 3


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone: nothing is sent, but hooks run and entries are counted."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3, bias=False), nn.Linear(3, 1))


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


@pytest.mark.parametrize(("hook", "ratio"), [(counted_fp32_hook, 1), (counted_fp16_hook, 2)])
def test_a_dense_hook_is_counted_by_its_width(group: dist.ProcessGroup, hook: object, ratio: int) -> None:
    state = _CountedHook(Traffic(), group)
    state.world_size = 4  # The count is pure arithmetic: pretend that there are others.
    run(state, hook)
    entries = sum(parameter.numel() for parameter in network().parameters())
    totals = state.traffic.totals
    assert totals.steps == STEPS
    assert totals.entries_sent == totals.entries == STEPS * entries
    assert totals.bytes_dense == STEPS * all_reduce_bytes(4 * entries, 4)
    assert totals.compression_ratio == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(("setting", "value"), [("synchronisation", "fp8"), ("rank", 0), ("start_step", 1)])
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{setting}="):
        CountedDDPStrategy(**{setting: value})


def test_powersgd_asks_for_one_bucket() -> None:
    assert CountedDDPStrategy("powersgd")._ddp_kwargs["bucket_cap_mb"] == 1000
    assert "bucket_cap_mb" not in CountedDDPStrategy("fp16")._ddp_kwargs
