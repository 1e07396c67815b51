"""A GPU's payloads over gloo, here between host memory: they arrive as by a collective of real ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.harness import Ranks
from lightning_dct.exchange.collectives import HostMemory


def payload_of(rank: int, size: int) -> Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(rank), dtype=torch.uint8)


def gather_several(size: int) -> list[Tensor]:
    """Several at once over two links, and collectives of the group between them, which come in another order."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    ways, total = [HostMemory(group) for _ in range(2)], torch.ones(3)
    started = [ways[number % 2].all_gather(payload_of(rank + 10 * number, size)) for number in range(3)]
    dist.all_reduce(total)
    for travel, _ in reversed(started):
        travel.wait()
    assert total.tolist() == [dist.get_world_size()] * 3
    return [gathered for _, gathered in started]


def exchange_parts() -> Tensor:
    """Rank ``r`` sends ``r + t`` bytes to rank ``t``, and none from the first to itself."""
    group, rank = dist.group.WORLD, dist.get_rank()
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
            torch.stack([payload_of(rank + 10 * number, size) for rank in range(world_size)]) for number in range(3)
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
