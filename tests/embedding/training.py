"""What ranks do in the tests of sharded tables."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from embedding.reference import Emulation, bags_of, first_rows
from lightning_dct import ShardedEmbeddingBags
from lightning_dct.reference import Settings

TABLE_ROWS = [40, 3, 17, 200, 5, 1]
DIM = 4


def generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(
        sum(number * 1009**place for place, number in enumerate(numbers))
    )


def one_hot(step: int, rank: int, samples: int, table_rows: list[int]) -> tuple[Tensor, None]:
    """Ids that repeat a lot, other ones on every rank."""
    draws = torch.rand(samples, len(table_rows), generator=generator(step, rank, 1))
    return (draws**3 * torch.tensor(table_rows)).long(), None


def multi_hot(step: int, rank: int, samples: int, table_rows: list[int]) -> tuple[Tensor, Tensor]:
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


def targets(step: int, rank: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=generator(step, rank, 4))


def loss_of(pooled: Tensor, target: Tensor) -> Tensor:
    return (pooled - target).square().sum() * 0.1


def train_beside(
    emulation: Emulation,
    tables: ShardedEmbeddingBags,
    steps: int,
    kind: str,
    sizes: list[int],
    given: Callable[[Tensor, Tensor | None], Any],
    compared: Callable[[list[Tensor]], Iterable[tuple[str, Tensor, Tensor]]],
) -> dict[str, float]:
    """Train tables with SGD beside the reference, and give the largest differences by name.

    ``given`` maps ids and offsets to what the tables get, ``compared`` the reference's gradients to
    more comparisons.
    """
    rank = dist.get_rank()
    world = emulation.world
    learning_rate = 0.25
    # A product with this learning rate is exact: then it does not matter where an optimizer rounds.
    optimizer = torch.optim.SGD([tables.weight], lr=learning_rate)
    worst: dict[str, float] = defaultdict(float)
    for step in range(steps):
        tables.advance(step)
        inputs = {peer: INPUTS[kind](step, peer, samples_of(step, peer), sizes) for peer in world}
        bags = {peer: bags_of(*inputs[peer], len(sizes)) for peer in world}
        expected = emulation.forward(step, bags, tables.tables[0].pooling)
        pooled = tables(*given(*inputs[rank]))
        gradients = {}
        for peer in world:
            leaf = expected[peer].clone().requires_grad_()
            loss_of(leaf, targets(step, peer, leaf)).backward()
            gradients[peer] = leaf.grad
        dense = emulation.backward(bags, gradients, tables.tables[0].pooling)
        optimizer.zero_grad()
        loss_of(pooled, targets(step, rank, pooled)).backward()
        optimizer.step()
        for table, gradient in zip(emulation.tables, dense, strict=True):
            table -= learning_rate * gradient
        for name, one, other in [("pooled", pooled, expected[rank]), *compared(dense)]:
            worst[name] = max(worst[name], difference(one, other))
    return worst


def train_sharded(steps: int, kind: str, pooling: str, **settings: Any) -> dict[str, float]:
    """Train tables of fixed size beside the reference; the largest differences, and how far rows
    have moved.
    """
    tables = ShardedEmbeddingBags(TABLE_ROWS, DIM, seed=3, pooling=pooling, **settings)
    tables.materialize()
    first = first_rows(TABLE_ROWS, DIM, 3)
    ids = [np.arange(rows) for rows in TABLE_ROWS]
    emulation = Emulation(first, ids, tables.placement, Settings(**settings))

    def compared(dense: list[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
        assert tables.weight.grad is not None
        assert tables.weight.grad.is_sparse
        gradient = tables.weight.grad.to_dense()
        return [
            ("gradient", gradient, owned(tables, dense)),
            ("rows", tables.weight, owned(tables, emulation.tables)),
        ]

    worst = train_beside(
        emulation, tables, steps, kind, TABLE_ROWS, lambda *inputs: inputs, compared
    )
    places = torch.arange(len(tables.weight)).numpy()
    return {**worst, "moved": difference(tables.weight, tables.initial(dist.get_rank(), places))}


def owned(tables: ShardedEmbeddingBags, whole: list[Tensor]) -> Tensor:
    """This rank's rows of whole tables."""
    ranges = tables.placement.ranges(tables.exchange_group.rank)
    return torch.cat(
        [whole[table][start:stop] for table, start, stop, _ in ranges] or [torch.empty(0, DIM)]
    )


def difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    return float((one.detach() - other).abs().max()) if one.numel() else 0.0
