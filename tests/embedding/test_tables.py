"""Described tables beside torch's own modules: shared tables, poolings, weights, unpooled rows,
initial values.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from embedding.training import generator
from lightning_dct import EmbeddingTable, ShardedEmbeddingBags, ShardedEmbeddings

DIM = 4
ITEMS = EmbeddingTable("items", 40, DIM, pooling="mean", features=("seen", "bought"))
USERS = EmbeddingTable("users", 7, DIM, initial=(0.5, 0.75))
WORDS = EmbeddingTable(
    "words", 23, DIM, initial=nn.init.normal_, features=("title", "text", "query")
)
TABLES = [ITEMS, USERS, WORDS]
TABLE_OF = [0, 0, 1, 2, 2, 2]
EVERYTHING = {"density": 1.0, "value_format": "fp32"}
LEARNING_RATE = 0.25


def whole_tables(tables: ShardedEmbeddingBags) -> list[Tensor]:
    """Every table of all ranks together, on every rank."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tables.weight.detach())
    found = [torch.empty(table.rows, table.dim) for table in tables.tables]
    for rank, part in enumerate(parts):
        for table, start, stop, place in tables.placement.ranges(rank):
            found[table][start:stop] = part[place : place + stop - start]
    return found


def a_batch(step: int, rank: int, unequal: bool) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Ids, offsets, weights, and the number of samples of each feature."""
    samples = [3, 2, 4, 0, 1, 5] if unequal else [4 + (step + rank) % 2] * len(TABLE_OF)
    numbers = generator(step, rank, 11)
    lengths = torch.randint(0, 4, (sum(samples),), generator=numbers)
    sizes = torch.tensor([TABLES[table].rows for table in TABLE_OF])
    table_size = sizes.repeat_interleave(torch.tensor(samples)).repeat_interleave(lengths)
    ids = (torch.rand(int(lengths.sum()), generator=numbers) ** 2 * table_size).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids, offsets, torch.rand(len(ids), generator=numbers) + 0.5, samples


def by_feature(
    batch: tuple[Tensor, Tensor, Tensor, list[int]],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids, lengths and weights of each feature."""
    ids, offsets, weights, samples = batch
    lengths = offsets.diff().split(samples)
    sizes = [int(part.sum()) for part in lengths]
    return list(zip(ids.split(sizes), lengths, weights.split(sizes), strict=True))


def expected_bags(tables: list[Tensor], batch: Any, weighted: bool) -> list[Tensor]:
    """What each feature's bags are, from whole tables, with plain operations of torch."""
    found = []
    for table, (ids, lengths, weights) in zip(TABLE_OF, by_feature(batch), strict=True):
        rows = functional.embedding(ids, tables[table])
        rows = rows * weights.unsqueeze(1) if weighted else rows
        bags = torch.zeros(len(lengths), DIM)
        bags = bags.index_add(0, torch.arange(len(lengths)).repeat_interleave(lengths), rows)
        found.append(
            bags / lengths.clamp(min=1).unsqueeze(1) if TABLES[table].pooling == "mean" else bags
        )
    return found


def targets(parts: list[Tensor], step: int, rank: int) -> list[Tensor]:
    return [
        torch.randn(part.shape, generator=generator(step, rank, place, 5))
        for place, part in enumerate(parts)
    ]


def loss_of(parts: list[Tensor], step: int, rank: int) -> Tensor:
    pairs = zip(parts, targets(parts, step, rank), strict=True)
    return torch.stack([(part - target).square().sum() for part, target in pairs]).sum() * 0.1


def trained(weighted: bool, unequal: bool) -> float:
    """Train beside whole tables on all ranks' batches; the largest difference of outputs, rows and
    gradients.
    """
    world = range(dist.get_world_size())
    rank = dist.get_rank()
    tables = ShardedEmbeddingBags(TABLES, seed=3, **EVERYTHING)
    tables.materialize()
    plain = [nn.Parameter(table) for table in whole_tables(tables)]
    optimizer, oracle = (torch.optim.SGD(of, lr=LEARNING_RATE) for of in ([tables.weight], plain))
    worst = 0.0
    for step in range(3):
        ids, offsets, weights, samples = a_batch(step, rank, unequal)
        learnt = weights.clone().requires_grad_() if weighted else None
        pooled = tables(ids, offsets, learnt, samples if unequal else None)
        parts = list(pooled.split(samples)) if unequal else list(pooled.unbind(1))
        optimizer.zero_grad()
        loss_of(parts, step, rank).backward()
        optimizer.step()
        oracle.zero_grad()
        for peer in world:
            batch = a_batch(step, peer, unequal)
            mine = (batch[0], batch[1], batch[2].requires_grad_(), batch[3])
            bags = expected_bags(plain, mine, weighted)
            (loss_of(bags, step, peer) / len(world)).backward()
            if peer == rank:
                differences = [difference(*pair) for pair in zip(parts, bags, strict=True)]
                if weighted:
                    differences.append(difference(learnt.grad, mine[2].grad * len(world)))
                worst = max(worst, *differences)
        oracle.step()
        worst = max(
            worst, *(difference(*pair) for pair in zip(whole_tables(tables), plain, strict=True))
        )
    return worst


def difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.detach() - other.detach()).abs().max()) if one.numel() else 0.0


@pytest.mark.parametrize(
    ("world_size", "weighted", "unequal"), [(2, False, False), (2, True, True), (3, True, False)]
)
def test_described_tables_train_as_torchs_own(
    ranks: Any, world_size: int, weighted: bool, unequal: bool
) -> None:
    assert max(ranks(world_size).run(trained, weighted, unequal)) < 1e-5


def sequences() -> tuple[float, float, list[int]]:
    """Unpooled rows beside whole tables, and how many rows this rank has requested of each
    owner.
    """
    rank = dist.get_rank()
    tables = ShardedEmbeddings([WORDS], seed=3, **EVERYTHING)
    tables.materialize()
    (words,) = whole_tables(tables)
    ids = torch.tensor([[5, 5, 22], [5, 0, 22 - rank]])
    rows = tables(ids)
    flat = tables(ids.T.reshape(-1), torch.arange(7))
    (rows * torch.arange(24.0).view(2, 3, DIM)).sum().backward()
    worst = max(difference(rows, words[ids]), difference(flat, words[ids.T.reshape(-1)]))
    expected = torch.zeros_like(words)
    for peer in range(dist.get_world_size()):
        theirs = torch.tensor([[5, 5, 22], [5, 0, 22 - peer]]).reshape(-1)
        expected.index_add_(0, theirs, torch.arange(24.0).view(6, DIM) / dist.get_world_size())
    mine = torch.cat([expected[start:stop] for _, start, stop, _ in tables.placement.ranges(rank)])
    return worst, difference(tables.weight.grad.to_dense(), mine), tables.request(ids)._rows.sizes


def test_rows_that_are_not_pooled(ranks: Any) -> None:
    for rank, (rows, gradient, requested) in enumerate(ranks(2).run(sequences)):
        assert rows == 0.0
        assert gradient < 1e-6
        # Three features of one table ask for a row once: 0, 5, 22, and on rank 1 also 21.
        assert sum(requested) == 3 + rank


def initial_rows_of() -> list[Tensor]:
    tables = ShardedEmbeddingBags(TABLES, seed=3)
    tables.materialize()
    return whole_tables(tables)


def test_initial_values_do_not_depend_on_the_ranks(ranks: Any) -> None:
    one = ShardedEmbeddingBags(TABLES, seed=3)
    one.materialize()
    items, users, words = one.weight.detach().split([table.rows for table in TABLES])
    for found in ranks(3).run(initial_rows_of):
        assert all(torch.equal(*pair) for pair in zip(found, (items, users, words), strict=True))
    bound = ITEMS.rows**-0.5
    assert -bound <= items.min() < 0 < items.max() < bound
    assert 0.5 <= users.min() < users.max() < 0.75
    assert 0.8 < words.std() < 1.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_in_another_dtype(dtype: torch.dtype) -> None:
    tables = ShardedEmbeddingBags([EmbeddingTable("one", 5, DIM, dtype=dtype)])
    tables.materialize()
    pooled = tables(torch.tensor([[1], [4]]))
    pooled.sum().backward()
    assert tables.weight.dtype == tables.weight.grad.dtype == pooled.dtype == dtype


def large(**settings: Any) -> EmbeddingTable:
    return EmbeddingTable(**{"name": "large", "rows": 9, "dim": DIM, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: large(name=""), "`name` of an embedding table must be a text"),
        (lambda: large(rows=0), "`rows of table 'large'` must be at least 1"),
        (lambda: large(pooling="max"), "`pooling of table 'large'` must be one of"),
        (lambda: large(dtype=torch.int8), "`dtype` of table 'large'"),
        (lambda: large(features="large"), "`features` of table 'large' must be a list"),
        (lambda: large(initial=-1.0), "`initial` of table 'large' must be a number of at least 0"),
        (lambda: large(initial=(2.0, 1.0)), "the lower one first"),
        (lambda: ShardedEmbeddingBags([large(), large()]), "name 'large' occurs twice"),
        (
            lambda: ShardedEmbeddingBags([large(), ITEMS, large(name="x", dim=5)]),
            "'large'|'items'.*dim=4.*'x'.*dim=5",
        ),
        (lambda: ShardedEmbeddingBags([large()], DIM), "Leave `embedding_dim` out"),
        (lambda: ShardedEmbeddingBags([large()], pooling="sum"), "Leave `pooling` out"),
        (lambda: ShardedEmbeddingBags([large(), 4], DIM), r"`tables\[0\]` must be a whole number"),
        (lambda: ShardedEmbeddingBags([4]), "`embedding_dim` must be a whole number"),
    ],
)
def test_wrong_descriptions(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"per_sample_weights": torch.ones(3)},
            "`per_sample_weights` must be one floating-point number for each of",
        ),
        ({"per_sample_weights": torch.ones(2, dtype=torch.int64)}, "dtype torch.int64"),
        ({"samples": [1]}, "`samples` must have a number for each of the 2 features"),
        ({"samples": [1, 2]}, r"`offsets` \[3 \+ 1\]"),
    ],
)
def test_wrong_inputs(settings: dict[str, Any], message: str) -> None:
    tables = ShardedEmbeddingBags([EmbeddingTable("one", 5, DIM, features=("a", "b"))])
    tables.materialize()
    with pytest.raises(ValueError, match=message):
        tables(torch.tensor([1, 4]), torch.tensor([0, 1, 2]), **settings)
