"""What is remembered moves with the module, as a strategy moves it when its tables are there
already.
"""

import copy
from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding import lookup
from lightning_dct.embedding.collected import RowCollectives
from lightning_dct.embedding.store import RowStore
from pretended_device import DEVICE, OnDevice, cpu_of, pretended_device
from strategies_for_hypothesis import FORMATS


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors of the tables, however deep, buffers and parameters included."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [tensor for value in thing.values() for tensor in tensors_in(value)]
    if isinstance(thing, list | tuple):
        return [tensor for value in thing for tensor in tensors_in(value)]
    # Collected gradients move when they are delivered.
    kinds = ShardedEmbeddingBags | RowStore | RowCollectives
    return tensors_in(vars(thing)) if isinstance(thing, kinds) else []


def moved_between_request_and_backward() -> tuple[int, int, list[str], list[str]]:
    rank = dist.get_rank()
    tables = ShardedEmbeddingBags([40, 30], 3, cache_rows=4)
    tables.materialize()
    for step in range(3):  # what had to go of the last request waits for a backward
        pooled = tables(
            (torch.arange(10).view(-1, 1) + torch.tensor([10 * step, 3 * step + rank])) % 30
        )
        if step < 2:
            pooled.sum().backward()
    numbers = [tensor.numel() for tensor in tensors_in(tables)]
    tables.to("meta")
    devices = [tensor.device.type for tensor in tensors_in(tables)] + [
        tables.exchange_group.device.type
    ]
    tables.reset_memory()
    anew = [tensor.device.type for tensor in tensors_in(tables)]
    return len(numbers), sum(number > 0 for number in numbers), devices, anew


def moved_after_a_copy() -> tuple[list[set[str]], set[str]]:
    """A callback that averages weights copies the model, and moves it by itself."""
    tables = ShardedEmbeddingBags([40, 30], 3, cache_rows=4)
    tables.materialize()
    tables(torch.arange(10).view(-1, 1) % 30 + torch.tensor([0, 3])).sum().backward()
    copied = copy.deepcopy(tables).to("meta")

    def devices(of: ShardedEmbeddingBags) -> set[str]:
        return {tensor.device.type for tensor in tensors_in(of)} | {of.exchange_group.device.type}

    before = [devices(copied), devices(tables)]
    return before, devices(tables.to("meta"))


def test_a_copy_moves_by_itself(ranks: Any) -> None:
    for before, after in ranks(2).run(moved_after_a_copy):
        assert before == [{"meta"}, {"cpu"}]
        assert after == {"meta"}


def test_everything_remembered_follows_the_module(ranks: Any) -> None:
    for number, filled, devices, anew in ranks(2).run(moved_between_request_and_backward):
        # Rows, for either end copies and residuals, and what evicted rows have left, as bytes for
        # the other rank.
        assert number == 6
        assert filled == 5  # the owner's end has no residuals
        assert set(devices) == set(anew) == {"meta"}


class Steps(NamedTuple):
    """What training on the pretended device has shown."""

    waits: int  # the most in a step
    operations: int  # the most in a step
    waited: Counter[str]  # where, in all steps
    bits: list[Tensor]  # weights, copies and residuals at the end


def train(num_tables: int, is_pretended: bool, value_format: str, is_moving: bool) -> Steps:
    """Train tables on the device or on the CPU: with the same rows in each step, or with new ones,
    of which caches evict some.
    """
    rank = dist.get_rank()
    settings: dict[str, Any] = {"cache_rows": 20 * num_tables} if is_moving else {}
    waits = []
    operations = []
    waited: Counter[str] = Counter()
    with pretended_device() as device:
        tables = ShardedEmbeddingBags(
            [200] * num_tables, 4, density=0.2, value_format=value_format, **settings
        )
        tables.materialize()
        on = OnDevice if is_pretended else torch.clone
        if is_pretended:
            tables.weight = torch.nn.Parameter(OnDevice(tables.weight.detach().clone()))
            tables.exchange_group.device = DEVICE
            tables.reset_memory()

        def step_with(rows: Tensor, mean: Tensor, *_: Any, **settings: Any) -> Tensor:
            at, change = (cpu_of(part) for part in (rows, mean))
            cpu_of(tables.weight.detach()).index_add_(0, at.view(-1), change, alpha=-1.0)
            return torch.zeros_like(tables.weight)

        # A wrapper has no sparse form.
        with (
            patch.object(torch, "sparse_coo_tensor", step_with),
            patch.object(lookup, "_refuse_dense_gradient", lambda module: None),
        ):
            for step in range(8):
                device.waits = 0
                device.operations = 0
                first = 5 * rank + 12 * step * is_moving
                ids = (torch.arange(20).view(-1, 1) + first).expand(-1, num_tables)
                if is_moving:  # in bags of two
                    offsets = torch.arange(0, ids.numel() + 1, 2)
                    pooled = tables(on(ids.t().reshape(-1)), on(offsets))
                else:
                    pooled = tables(on(ids.clone()))
                goal = torch.linspace(-1, 1, pooled.numel()).view(pooled.shape)
                pooled.backward(on(cpu_of(pooled).detach() - goal))
                tables.weight.grad = None
                waits.append(device.waits)
                operations.append(device.operations)
                waited += device.waited
                device.waited.clear()
        tables.reads.now()
    kept = [tables.weight, *(part for rows in tables.remembered for part in tensors_in(rows))]
    # In the first steps there are no thresholds yet, and all rows are new.
    first = 0 if is_moving else 2
    bits = [cpu_of(part.detach()) for part in kept]
    return Steps(max(waits[first:]), max(operations[first:]), waited, bits)


def test_waits_and_operations_do_not_grow_with_ranks_and_tables(ranks: Any) -> None:
    steps = [
        one
        for number, num_tables in ((2, 3), (2, 26), (4, 3))
        for one in ranks(number).run(train, num_tables, True, "1bit", False)
    ]
    assert {one.waits for one in steps} == {7}, [one.waited for one in steps]
    # With those that select thresholds anew.
    assert max(one.operations for one in steps) <= 270


@pytest.mark.parametrize("value_format", FORMATS)
def test_a_device_trains_as_a_cpu_does(ranks: Any, value_format: str) -> None:
    """Oracle: bits of the CPU."""
    found, expected = (ranks(3).run(train, 3, kind, value_format, True) for kind in (True, False))
    for one, of_cpu in zip(found, expected, strict=True):
        assert of_cpu.waits == 0
        assert one.waits <= 9  # what caches have evicted is one more
        assert one.operations <= 560
        assert len(one.bits) == 5
        assert all(map(torch.equal, one.bits, of_cpu.bits))
