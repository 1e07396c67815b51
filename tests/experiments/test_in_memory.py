"""Ranks in one process: their collectives give what those of real ranks give, and none waits for
ever.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from replicated.in_memory import Abandoned, Ranks


def collectives_of(rank: int, group: Any = None) -> list[Tensor]:
    """What one of two ranks gets from each collective."""
    mine = torch.tensor([0.1, 0.7]) * (rank + 1)
    total = mine.clone()
    dist.all_reduce(total, group=group)
    largest = torch.tensor([rank, -rank])
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
    joined = torch.empty(4)
    later = dist.all_gather_single(joined, mine, group=group, async_op=True)
    work.wait()
    later.wait()
    listed = [torch.empty(2), torch.empty(2)]
    dist.all_gather(listed, mine, group=group)
    # A rank sends one number to the first and three to the second.
    parted = torch.empty(2 if rank == 0 else 6)
    sent = torch.arange(4.0) + 10 * rank
    dist.all_to_all_single(parted, sent, 2 * [len(parted) // 2], [1, 3], group=group)
    first = mine.clone()
    dist.broadcast(first, group=group, group_src=1)
    return [total, largest, joined, *listed, parted, first]


def of_real_rank() -> list[Tensor]:
    return collectives_of(dist.get_rank())


def test_collectives_are_those_of_real_ranks(ranks: Any) -> None:
    """Oracle: gloo."""
    in_memory = Ranks(2)
    found: dict[int, list[Tensor]] = {}

    def call(rank: int) -> None:
        found[rank] = collectives_of(rank, in_memory.groups[rank])

    in_memory.run(call)
    for rank, real in enumerate(ranks(2).run(of_real_rank)):
        assert all(map(torch.equal, found[rank], real)), rank


def test_one_rank_runs_at_a_time_until_it_waits() -> None:
    ranks = Ranks(3)
    events: list[tuple[int, str]] = []

    def call(rank: int) -> None:
        events.append((rank, "begins"))
        work = dist.all_reduce(torch.zeros(1), group=ranks.groups[rank], async_op=True)
        events.append((rank, "has started"))
        work.wait()
        events.append((rank, "ends"))

    for _ in range(2):
        ranks.run(call)
    until_it_waits = [(rank, event) for rank in range(3) for event in ("begins", "has started")]
    # The last one to come waits for none.
    assert events == 2 * [*until_it_waits, (2, "ends"), (1, "ends"), (0, "ends")]


def test_a_collective_ends_in_a_later_run() -> None:
    ranks = Ranks(2)
    own = [torch.ones(1) for _ in range(2)]
    works: dict[int, Any] = {}

    def start(rank: int) -> None:
        works[rank] = dist.all_reduce(own[rank], group=ranks.groups[rank], async_op=True)

    ranks.run(start)
    ranks.run(lambda rank: works[rank].wait())
    assert torch.cat(own).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda group: None, "that the others do not call: all-reduce of sums"),
        (
            lambda group: dist.broadcast(torch.zeros(1), group=group, group_src=0),
            "rank 1 calls broadcast from 0, and another one all-reduce of sums",
        ),
    ],
)
def test_ranks_that_do_not_call_the_same_end_with_an_error(second: Any, message: str) -> None:
    ranks = Ranks(2)
    seen: list[Exception] = []

    def call(rank: int) -> None:
        if rank == 1:
            second(ranks.groups[1])
            return
        try:
            dist.all_reduce(torch.zeros(1), group=ranks.groups[0])
        except Abandoned as error:
            seen.append(error)
            raise

    with pytest.raises(RuntimeError, match=message):
        ranks.run(call)
    assert len(seen) == 1
