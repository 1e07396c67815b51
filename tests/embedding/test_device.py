"""What is remembered moves with the module, as a strategy moves it when its tables are there
already.
"""

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding import lookup
from lightning_dct.embedding.collected import RowCollectives
from lightning_dct.embedding.store import RowStore
from pretended_device import DEVICE, OnDevice, cpu_of, pretended_device


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
        # Rows, for either end copies, residuals and what is outdated, and what evicted rows have
        # left, as bytes for the other rank.
        assert number == 8
        assert filled == 7  # the owner's end has no residuals
        assert set(devices) == set(anew) == {"meta"}


def waits_of_a_step(num_tables: int, is_pretended: bool) -> tuple[int, Counter[str], list[Tensor]]:
    """Train tables, on the device or on the CPU; how often the host waits in the last step, where,
    and the gradients of the last step.
    """
    rank = dist.get_rank()
    with pretended_device() as device:
        tables = ShardedEmbeddingBags([30] * num_tables, 4, density=0.2)
        tables.materialize()
        on = OnDevice if is_pretended else torch.clone
        if is_pretended:
            tables.weight = torch.nn.Parameter(OnDevice(tables.weight.detach().clone()))
            tables.exchange_group.device = DEVICE
            tables.reset_memory()
        gradients: list[Tensor] = []

        def keep(rows: Tensor, mean: Tensor, *_: Any, **settings: Any) -> Tensor:
            gradients[:] = [cpu_of(part) for part in (rows, mean)]
            return torch.zeros_like(tables.weight)

        # A wrapper has no sparse form.
        with (
            patch.object(torch, "sparse_coo_tensor", keep),
            patch.object(lookup, "_refuse_dense_gradient", lambda module: None),
        ):
            for _ in range(6):
                device.waits = 0
                device.waited.clear()
                # The same rows in each step: after the first, none is new.
                ids = (torch.arange(10).view(-1, 1) + 5 * rank).expand(-1, num_tables)
                pooled = tables(on(ids.clone()))
                goal = torch.linspace(-1, 1, pooled.numel()).view(pooled.shape)
                pooled.backward(on(cpu_of(pooled).detach() - goal))
                tables.weight.grad = None
        # Now and then the guard selects a table's threshold anew.
        again = sum(count for at, count in device.waited.items() if at.startswith("_kth_largest"))
        return device.waits - again, device.waited, gradients


def test_waits_do_not_grow_with_ranks_and_tables(ranks: Any) -> None:
    few = ranks(2).run(waits_of_a_step, 3, True)
    for found in (
        few,
        ranks(2).run(waits_of_a_step, 26, True),
        ranks(3).run(waits_of_a_step, 3, True),
    ):
        assert len({waits for waits, _, _ in [*few, *found]}) == 1, [each[1] for each in found]
    assert few[0][0] > 0


def test_a_device_trains_as_a_cpu_does(ranks: Any) -> None:
    """Oracle: bits of the CPU."""
    found, expected = (ranks(2).run(waits_of_a_step, 3, kind) for kind in (True, False))
    for (_, _, gradients), (waits, _, of_cpu) in zip(found, expected, strict=True):
        assert waits == 0
        assert all(map(torch.equal, gradients, of_cpu))
