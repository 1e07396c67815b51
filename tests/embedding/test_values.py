"""The exchange of values on 2, 3 and 4 ranks against whole tables in one process with the same masks."""

import pytest
import torch
import torch.distributed as dist

from embedding.reference import bags_of, first_rows
from embedding.training import DIM, INPUTS, TABLE_ROWS, _difference, loss_of, owned, samples_of, targets
from lightning_dct import ShardedEmbeddingBags, SplitPoint

DENSITY = 0.3


def compare(steps, kind, pooling, value_format, world_learning_rate=0.2):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    split = {"density": DENSITY, "forward_format": value_format, "backward_format": value_format, "refresh_every": 1}
    tables = ShardedEmbeddingBags(TABLE_ROWS, DIM, seed=3, exchange="values", split=split, pooling=pooling)
    tables.materialize()
    whole = first_rows(TABLE_ROWS, DIM, 3)
    owners = [
        torch.from_numpy(tables.placement.locate(torch.full((n,), t).numpy(), torch.arange(n).numpy())[0])
        for t, n in enumerate(TABLE_ROWS)
    ]
    optimizer = torch.optim.SGD([tables.weight], lr=world_learning_rate)
    worst = {"pooled": 0.0, "rows": 0.0}
    # What the owner's split point for a peer's batch does, in this one process.
    splits = {
        (owner, peer): SplitPoint(scope="group", **split, seed=3 + peer)
        for owner in range(world_size)
        for peer in range(world_size)
    }
    for step in range(steps):
        for module in (tables, *splits.values()):
            module.advance(step)
        dense = [torch.zeros_like(table) for table in whole]
        for peer in range(world_size):
            samples = samples_of(step, peer)
            ids, offsets = INPUTS[kind](step, peer, samples)
            bags = bags_of(ids, offsets, len(TABLE_ROWS))
            leaves = [table.clone().requires_grad_() for table in whole]
            total = torch.zeros(samples, len(TABLE_ROWS), DIM)
            for owner in range(world_size):
                part = torch.zeros(samples, len(TABLE_ROWS), DIM)
                here = [table for table in range(len(TABLE_ROWS)) if bool((owners[table] == owner).any())]
                for index, sample in enumerate(bags):
                    for table, rows in enumerate(sample):
                        for row in rows:
                            if int(owners[table][row]) == owner:
                                part[index, table] = part[index, table] + leaves[table][row]
                crossed = torch.zeros_like(part)
                crossed[:, here] = splits[owner, peer](part[:, here])
                total = total + crossed
            if pooling == "mean":
                counts = torch.tensor([[max(len(rows), 1) for rows in sample] for sample in bags])
                total = total / counts.view(samples, len(TABLE_ROWS), 1)
            if total.requires_grad:  # otherwise all bags were empty
                loss_of(total, targets(step, peer, samples)).backward()
            for gradient, leaf in zip(dense, leaves, strict=True):
                if leaf.grad is not None:
                    gradient += leaf.grad / world_size
            if peer == rank:
                expected = total.detach()
                pooled = tables(ids, offsets)
                worst["pooled"] = max(worst["pooled"], _difference(pooled, expected))
                optimizer.zero_grad()
        loss_of(pooled, targets(step, rank, samples_of(step, rank))).backward()
        optimizer.step()
        for table, gradient in zip(whole, dense, strict=True):
            table -= world_learning_rate * gradient
        worst["rows"] = max(worst["rows"], _difference(tables.weight, owned(tables, whole)))
    totals = tables.traffic.totals
    return {**worst, "sent": totals.bytes_sent, "dense": totals.bytes_dense}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["one-hot", "multi-hot"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_the_same_masks_give_the_same_tables(ranks, world_size, kind, pooling):
    for found in ranks(world_size).run(compare, 3, kind, pooling, "fp32"):
        assert found["pooled"] < 1e-6
        assert found["rows"] < 1e-6
        assert found["dense"] > 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("value_format", ["bf16", "int8", "int4"])
def test_every_format_rounds_as_a_split_point_in_one_process(ranks, world_size, value_format):
    # One step: the noise of stochastic rounding is a hash of the data, so one last bit changes all that follows.
    for found in ranks(world_size).run(compare, 1, "one-hot", "sum", value_format):
        assert found["pooled"] < 1e-5
        assert found["rows"] < 1e-5
