"""What ranks do in the tests of sharded tables."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embedding.reference import Emulation, bags_of
from lightning_dct import ShardedEmbeddingBags
from lightning_dct.reference import Settings

TABLE_ROWS = [40, 3, 17, 200, 5, 1]
DIM = 4


def generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(number * 1009**place for place, number in enumerate(numbers)))


def one_hot(step: int, rank: int, samples: int, table_rows: list[int] = TABLE_ROWS) -> tuple[Tensor, None]:
    """Ids that repeat a lot, other ones on every rank."""
    draws = torch.rand(samples, len(table_rows), generator=generator(step, rank, 1))
    return (draws**3 * torch.tensor(table_rows)).long(), None


def multi_hot(step: int, rank: int, samples: int, table_rows: list[int] = TABLE_ROWS) -> tuple[Tensor, Tensor]:
    """Bags of 0 to 3 rows, table after table."""
    lengths = torch.randint(0, 4, (len(table_rows), samples), generator=generator(step, rank, 2))
    draws = torch.rand(int(lengths.sum()), generator=generator(step, rank, 3))
    sizes = torch.tensor(table_rows).repeat_interleave(lengths.sum(dim=1))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    return (draws**2 * sizes).long(), offsets


INPUTS = {"one-hot": one_hot, "multi-hot": multi_hot}


def samples_of(step: int, rank: int) -> int:
    """Batches differ in length between ranks and steps, and may be empty."""
    return [5, 3, 4, 0, 6][(step + rank) % 5]


def targets(step: int, rank: int, samples: int) -> Tensor:
    return torch.randn(samples, len(TABLE_ROWS), DIM, generator=generator(step, rank, 4))


def loss_of(pooled: Tensor, target: Tensor) -> Tensor:
    return (pooled - target).square().sum() * 0.1


def train_sharded(steps: int, kind: str, pooling: str, **settings: Any) -> dict[str, Any]:
    """Train tables with SGD, beside the reference; gives the largest differences, and how far rows have moved."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = ShardedEmbeddingBags(TABLE_ROWS, DIM, seed=3, pooling=pooling, **settings)
    tables.materialize()
    learning_rate = 0.25  # a product with it is exact: then it does not matter where an optimizer rounds
    optimizer = torch.optim.SGD([tables.weight], lr=learning_rate)
    emulation = Emulation(TABLE_ROWS, DIM, tables.placement, Settings(**settings), 3)
    worst = {"pooled": 0.0, "rows": 0.0, "gradient": 0.0}
    for step in range(steps):
        tables.advance(step)
        counts = {peer: samples_of(step, peer) for peer in range(world_size)}
        inputs = {peer: INPUTS[kind](step, peer, counts[peer]) for peer in range(world_size)}
        bags = {peer: bags_of(*inputs[peer], len(TABLE_ROWS)) for peer in range(world_size)}
        expected = emulation.forward(step, bags, pooling)
        pooled = tables(*inputs[rank])
        worst["pooled"] = max(worst["pooled"], _difference(pooled, expected[rank]))
        gradients = {}
        for peer in range(world_size):
            leaf = expected[peer].clone().requires_grad_()
            loss_of(leaf, targets(step, peer, counts[peer])).backward()
            gradients[peer] = leaf.grad
        dense = emulation.backward(bags, gradients, pooling)
        optimizer.zero_grad()
        loss_of(pooled, targets(step, rank, counts[rank])).backward()
        assert tables.weight.grad is not None
        assert tables.weight.grad.is_sparse
        worst["gradient"] = max(worst["gradient"], _difference(tables.weight.grad.to_dense(), owned(tables, dense)))
        optimizer.step()
        for table, gradient in zip(emulation.tables, dense, strict=True):
            table -= learning_rate * gradient
        worst["rows"] = max(worst["rows"], _difference(tables.weight, owned(tables, emulation.tables)))
    moved = _difference(tables.weight, tables.initial(rank, torch.arange(len(tables.weight)).numpy()))
    return {**worst, "moved": moved}


def owned(tables: ShardedEmbeddingBags, whole: list[Tensor]) -> Tensor:
    """This rank's rows of whole tables."""
    ranges = tables.placement.ranges(tables.exchange_group.rank)
    return torch.cat([whole[table][start:stop] for table, start, stop, _ in ranges] or [torch.empty(0, DIM)])


def _difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    return float((one.detach() - other).abs().max()) if one.numel() else 0.0
