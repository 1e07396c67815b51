"""What is remembered moves with the module, as a strategy moves it when its tables are there
already.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding.collected import RowCollectives
from lightning_dct.embedding.store import RowStore


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
