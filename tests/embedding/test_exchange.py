import copy
import gc
import io
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed.training import message_of
from lightning_dct import CheckpointError, ShardedEmbeddingBags
from lightning_dct.embedding.collected import RowCollectives
from lightning_dct.traffic import Traffic

CPU = torch.device("cpu")


def payload(rank: int, peer: int) -> torch.Tensor:
    """``rank`` sends ``peer`` as many bytes as their numbers say, none to some."""
    return torch.full(((rank * 3 + peer) % 4 * 5,), rank * 10 + peer, dtype=torch.uint8)


@pytest.mark.parametrize("grad", [True, False])
def test_tables_of_a_single_process_send_nothing(grad: bool) -> None:
    tables = ShardedEmbeddingBags([7, 2], 4)
    tables.materialize()
    with torch.set_grad_enabled(grad):
        pooled = tables(torch.tensor([[6, 0], [1, 1]]))
    if grad:
        pooled.sum().backward()
    tables.finish_evaluation()
    for traffic in (tables.traffic, tables.evaluation_traffic):
        assert (traffic.totals.bytes_sent, traffic.totals.bytes_dense, traffic.totals.entries) == (
            0,
            0,
            0,
        )


def test_a_damaged_number_of_ranks_is_refused_and_not_counted_up_to() -> None:
    tables = ShardedEmbeddingBags([7, 2], 4)
    tables.materialize()
    state = tables.compression_state()
    state["placement"]["world_size"] = 1 << 62
    with pytest.raises(CheckpointError, match="the number of ranks"):
        tables.load_compression_state([state])


def exchanged() -> tuple[list[list[int]], int, list[list[int]], int]:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    exchange = RowCollectives(dist.group.WORLD, CPU)
    announcing = Traffic()
    sending = Traffic()
    told = np.array([[100 * rank + peer, -1, 2**31 - 1] for peer in range(world_size)])
    heard = exchange.announce(told, announcing, least=-1)
    sizes = {peer: payload(peer, rank).numel() for peer in range(world_size)}
    parts = exchange.start(
        {peer: payload(rank, peer) for peer in range(world_size)}, sizes, sending
    )()
    return (
        heard.tolist(),
        announcing.totals.bytes_sent,
        [p.tolist() for p in parts],
        sending.totals.bytes_sent,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_hears_what_it_was_told_and_counts_what_it_sends_to_others(
    ranks: Any, world_size: int
) -> None:
    world = range(world_size)
    for rank, (heard, announced, parts, sent) in enumerate(ranks(world_size).run(exchanged)):
        assert heard == [[100 * peer + rank, -1, 2**31 - 1] for peer in world]
        assert announced == (world_size - 1) * 3 * 4
        assert parts == [payload(peer, rank).tolist() for peer in world]
        assert sent == sum(payload(rank, peer).numel() for peer in world if peer != rank)


def looked_up_where_one_rank_owns_nothing() -> tuple[list[int], float]:
    tables = ShardedEmbeddingBags([2, 1], 4, density=1.0, value_format="fp32", initial_bound=0.0)
    tables.materialize()
    for _ in range(2):  # a first request and one about rows that are known
        tables(torch.tensor([[1, 0], [0, 0]])).sum().backward()
        with torch.no_grad():
            tables(torch.tensor([[1, 0]]))
    tables.finish_evaluation()
    # Each rank looks table 0's rows up once and table 1's twice, in two steps.
    return list(tables.placement.owned_rows), float(tables.weight.grad.to_dense().sum())


def test_a_rank_that_owns_no_rows(ranks: Any) -> None:
    found = ranks(3).run(looked_up_where_one_rank_owns_nothing)
    for rank, (owned, gradient) in enumerate(found):
        assert sorted(owned) == [0, 1, 2]
        assert gradient == [0, 16, 16][owned[rank]]


def groups_before_with_and_after_tables() -> list[int]:
    def count() -> int:
        gc.collect()
        return len(dist.distributed_c10d._world.pg_map)

    counts = [count()]
    tables = ShardedEmbeddingBags([5, 3], 4)
    tables.materialize()
    tables(torch.tensor([[1, 0]])).sum().backward()
    counts.append(count())
    del tables
    return [*counts, count()]


def test_the_group_of_tables_ends_with_them(ranks: Any) -> None:
    for before, during, after in ranks(2).run(groups_before_with_and_after_tables):
        assert (during, after) == (before + 1, before)


def copied_and_pickled_with_a_lookup_under_way() -> tuple[bool, str]:
    tables = ShardedEmbeddingBags([5, 30], 4, density=1.0, value_format="fp32")
    tables.materialize()
    ids = torch.tensor([[1, 0], [4, 7]])
    started = tables.request(ids)
    gradients = []
    for lookup in (copy.deepcopy(tables).request(ids), started):
        lookup.pooled().sum().backward()
        gradients.append(lookup._module.weight.grad.to_dense())
    return torch.equal(*gradients), message_of(torch.save, tables, io.BytesIO())


def test_tables_are_copied_and_not_pickled(ranks: Any) -> None:
    """Oracle: the original's gradient; a file cannot hold a process group, and so says what can be
    saved.
    """
    for is_same, refusal in ranks(2).run(copied_and_pickled_with_a_lookup_under_way):
        assert is_same
        assert "state_dict()" in refusal


def events_of_a_step() -> tuple[list[str], int]:
    tables = ShardedEmbeddingBags([400], 4, cache_rows=8)
    tables.materialize()
    exchange = tables.exchange_group
    start = tables.exchange_group.start
    events = []
    evicted = 0
    for step in range(3):  # the third request finds caches that are full
        events = []

        def watched(
            payloads: Any, sizes: Any, traffic: Traffic, name: str, events: Any = events
        ) -> Any:
            nonlocal evicted
            if name == "gradients":
                of_evicted = [parts for one in tables.evicted for parts in one.sent.values()]
                evicted = sum(part.numel() for part in chain(*of_evicted))
                assert evicted < sum(part.numel() for part in chain(*payloads.values()))
            events.append(f"send {name}")
            wait = start(payloads, sizes, traffic, name)

            def watched_wait() -> list[torch.Tensor]:
                events.append(f"wait for {name}")
                return wait()

            return watched_wait

        exchange.start = watched  # type: ignore[method-assign]
        pooled = tables(torch.arange(40).view(-1, 1) * 10 + step)
        events.append("compute")
        pooled.sum().backward()
    return events, evicted


def test_no_computation_waits_for_what_evicted_rows_have_left(ranks: Any) -> None:
    """It travels with the gradients. What is left of ids may follow them."""
    before = ["send ids", "wait for ids", "send rows", "wait for rows", "compute"]
    after = ["send gradients", "wait for gradients"]
    for events, evicted in ranks(2).run(events_of_a_step):
        assert events in (before + after, before[:2] + before + after)
        assert evicted > 0
