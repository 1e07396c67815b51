"""Collectives, of a GPU's payloads over gloo too: what arrives, and the bytes that are counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.harness import Ranks
from lightning_dct.exchange.collectives import (
    SEGMENT,
    HostMemory,
    Link,
    all_gather_payload,
    all_reduce_mean,
    all_reduce_mean_sparse,
    all_to_all,
    spread_payload,
)
from lightning_dct.traffic import Traffic


def test_all_gather_by_its_older_name(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch before 2.13 has only that; the bytes are the same."""
    payload = torch.arange(13, dtype=torch.uint8)
    new = Traffic()
    old = Traffic()
    expected = all_gather_payload(payload, Link(group, new))
    monkeypatch.delattr(dist, "all_gather_single")
    gathered = all_gather_payload(payload, Link(group, old))
    for work, _ in (expected, gathered):
        work.wait()
    assert torch.equal(gathered[1], expected[1])
    assert old.totals == new.totals


class GroupOf:
    def __init__(self, size: int) -> None:
        self.size = lambda: size
        self.rank = lambda: 1


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_bytes_counted_for_more_ranks(monkeypatch: pytest.MonkeyPatch, ranks_per_node: int) -> None:
    """One of the ranks of a node sends to another node; none where all four share one."""
    for collective in ("all_gather_single", "all_reduce", "all_to_all_single"):
        monkeypatch.setattr(dist, collective, lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")

    def counted(send: Callable[[Link], object]) -> int:
        traffic = Traffic()
        send(Link(GroupOf(4), traffic, ranks_per_node))  # type: ignore[arg-type]
        totals = traffic.totals
        between = {1: 1.0, 2: 0.5, 4: 0.0}[ranks_per_node] * (
            totals.bytes_sent + totals.bytes_inside_node
        )
        assert abs(totals.bytes_sent - between) < 1
        if totals.entries:  # sparse
            assert totals.bytes_dense == totals.bytes_sent
        return totals.bytes_sent + totals.bytes_inside_node

    payloads = [torch.zeros(size, dtype=torch.uint8) for size in (3, 5, 7, 11)]
    sparse = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 4), (5, 4), check_invariants=True)
    assert counted(lambda link: all_gather_payload(payloads[1], link)) == 3 * 5
    assert (
        counted(lambda link: all_to_all(torch.cat(payloads), [3, 5, 7, 11], [5] * 4, link))
        == 3 + 7 + 11
    )
    assert counted(lambda link: spread_payload(payloads[1], [3, 5, 7, 11], link)) == 3 * 5
    assert (
        counted(lambda link: all_reduce_mean(torch.zeros(10, dtype=torch.float16), link))
        == 2 * 3 * 20 // 4
    )
    assert counted(lambda link: all_reduce_mean_sparse(sparse, link)) == 3 * (2 * 8 + 8 * 4)


def send_sizes_that_differ() -> list[list[int]]:
    link = Link(dist.group.WORLD, Traffic())
    sizes = [4, 0, 7]
    work, received = all_to_all(
        torch.full((11,), link.rank, dtype=torch.uint8), sizes, 3 * [sizes[link.rank]], link
    )
    work.wait()
    assert received.numel() == 3 * sizes[link.rank]
    first = received.view(3, -1)[:, 0] if link.rank != 1 else received
    work, gathered = spread_payload(first, [3, 0, 3], link)
    work.wait()
    return [payload.tolist() for payload in gathered.split([3, 0, 3])]


def test_payloads_of_different_sizes_arrive(ranks: Any) -> None:
    """Real gloo processes; one of the payloads is empty."""
    assert ranks(3).run(send_sizes_that_differ) == [[[0, 1, 2], [], [0, 1, 2]]] * 3


def gather_in_segments(size: int) -> bool:
    link = Link(dist.group.WORLD, Traffic())
    payloads = torch.randint(
        256, (link.size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    in_flight = [all_gather_payload(payloads[link.rank], link) for _ in range(2)]
    for work, _ in in_flight:
        work.wait()
    assert link.traffic.totals.bytes_sent == 2 * 2 * size
    return all(torch.equal(gathered, payloads) for _, gathered in in_flight)


@pytest.mark.parametrize("size", [SEGMENT, SEGMENT + 1, 2 * SEGMENT + 5])
def test_large_payloads_arrive(ranks: Any, size: int) -> None:
    """Two at a time, on real gloo processes."""
    assert ranks(3).run(gather_in_segments, size) == [True] * 3


def payload_of(rank: int, size: int) -> Tensor:
    return torch.randint(
        256, (size,), generator=torch.Generator().manual_seed(rank), dtype=torch.uint8
    )


def gather_several(size: int) -> list[Tensor]:
    """Several at once over two links, and collectives of the group between them, which come in
    another order.
    """
    group = dist.group.WORLD
    rank = dist.get_rank()
    assert group is not None
    ways = [HostMemory(group) for _ in range(2)]
    total = torch.ones(3)
    started = [
        ways[number % 2].all_gather(payload_of(rank + 10 * number, size)) for number in range(3)
    ]
    dist.all_reduce(total)
    for travel, _ in reversed(started):
        travel.wait()
    assert total.tolist() == [dist.get_world_size()] * 3
    return [gathered for _, gathered in started]


def exchange_parts() -> Tensor:
    """Rank ``r`` sends ``r + t`` bytes to rank ``t``, and none from the first to itself."""
    group = dist.group.WORLD
    rank = dist.get_rank()
    assert group is not None
    ranks = dist.get_world_size()
    sizes = [rank + target for target in range(ranks)]
    travel, received = HostMemory(group).all_to_all(payload_of(rank, sum(sizes)), sizes, sizes)
    travel.wait()
    return received


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather(world_size: int, ranks: Callable[[int], Ranks]) -> None:
    for size in (0, 7, 300_000):
        expected = [
            torch.stack([payload_of(rank + 10 * number, size) for rank in range(world_size)])
            for number in range(3)
        ]
        for found in ranks(world_size).run(gather_several, size):
            assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_to_all(world_size: int, ranks: Callable[[int], Ranks]) -> None:
    sent = [
        payload_of(rank, sum(rank + target for target in range(world_size))).split(
            [rank + target for target in range(world_size)]
        )
        for rank in range(world_size)
    ]
    for rank, found in enumerate(ranks(world_size).run(exchange_parts)):
        assert torch.equal(found, torch.cat([sent[source][rank] for source in range(world_size)]))
