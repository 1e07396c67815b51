"""Messages whose lengths only their senders know."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distributed.training import message_of
from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding.collected import RowCollectives
from lightning_dct.embedding.first_parts import (
    HAS_REST,
    HEAD_BYTES,
    PADDING,
    RECENT,
    FirstParts,
    Room,
    read_head,
    write_head,
)
from lightning_dct.embedding.on_device import DeferredReads
from lightning_dct.traffic import Traffic
from lightning_dct.wire.positions import PayloadError

numbers = st.lists(st.integers(0, 2**35 - 1), max_size=3)


@given(numbers)
def test_heads_are_read_back(given_numbers: list[int]) -> None:
    head = write_head(2, given_numbers)
    assert head[0] == 2
    assert len(head) <= HEAD_BYTES
    assert read_head(head + b"more", len(given_numbers)) == (given_numbers, len(head))


@pytest.mark.parametrize(
    ("head", "says"), [(b"\0\x80", "ends too early"), (b"\0" + 6 * b"\xff", "without an end")]
)
def test_damaged_heads_are_refused(head: bytes, says: str) -> None:
    with pytest.raises(PayloadError, match=says):
        read_head(head, 1)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.integers(0, 5000))
def test_a_room_has_little_padding(lengths: list[int], more: int) -> None:
    """Oracle: the padding that the last messages would have had in it, against its bound."""
    room = Room(0)
    for length in lengths:
        room.note(length)
    last = lengths[-RECENT:]
    size = room.size(more)
    padding = sum(max(size - length, 0) for length in last)
    assert padding <= PADDING * (sum(last) + len(last) * more)
    assert size >= min(last)
    if len(set(last)) == 1:
        assert size == last[0]


def test_a_room_is_as_long_as_the_longest_message_if_that_is_cheap() -> None:
    room = Room(16)
    assert room.size() == 16
    for length in (1000, 1001, 1004, 999):
        room.note(length)
    assert room.size() >= 1004


def sent_with_rooms(lengths: list[list[int]], rooms: list[list[int]]) -> tuple[Any, int, int]:
    """Every rank sends each other so many bytes in such rooms; what arrives and the collectives."""
    exchange = RowCollectives(dist.group.WORLD, torch.device("cpu"))
    traffic = Traffic()
    started = 0
    start = exchange.start

    def counted(*arguments: Any) -> Any:
        nonlocal started
        started += 1
        return start(*arguments)

    exchange.start = counted  # type: ignore[method-assign]
    rank = exchange.rank
    heads = {peer: write_head(1, [lengths[rank][peer]]) for peer in exchange.peers}
    bodies = {peer: [body(rank, peer, lengths)] for peer in exchange.peers}
    expected = {peer: rooms[peer][rank] for peer in exchange.peers}
    rooms_out = {peer: rooms[rank][peer] for peer in exchange.peers}
    reads = DeferredReads()
    transfer = FirstParts(
        exchange, "", heads, bodies, rooms_out, expected, expected, traffic, reads
    )
    arrived = {}
    found = {}
    for peer, head in transfer.wait().items():
        assert head[0] & ~HAS_REST == 1
        [length], size = read_head(head, 1)
        arrived[peer] = size + length
    for peer, message in transfer.complete(arrived).items():
        found[peer] = torch.equal(message[-lengths[peer][rank] :], body(peer, rank, lengths))
    return found, started, traffic.totals.bytes_sent


def body(sender: int, receiver: int, lengths: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(7 * sender + receiver)
    size = (lengths[sender][receiver],)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


FITS = [[0, 20, 90], [200, 0, 1], [14, 33, 0]]


@pytest.mark.parametrize("longer", [0, 1, 500])
def test_what_does_not_fit_comes_in_a_second_collective(ranks: Any, longer: int) -> None:
    """One message of rank 1 is longer than its room, or none."""
    rooms = [[max(HEAD_BYTES, length + 3) for length in row] for row in FITS]
    lengths = [list(row) for row in FITS]
    lengths[1][0] += longer
    for rank, (found, started, sent) in enumerate(ranks(3).run(sent_with_rooms, lengths, rooms)):
        assert found == {peer: True for peer in range(3) if peer != rank}
        assert started == (2 if longer else 1)
        first = sum(rooms[rank]) - rooms[rank][rank]
        assert sent == first + (longer if rank == 1 else 0)


def called_unequally_often() -> str:
    """Rank 0 looks up once more than the others before a backward."""
    tables = ShardedEmbeddingBags([40, 30], 4)
    tables.materialize()
    for _ in range(3):
        tables(torch.tensor([[1, 2], [39, 0]])).sum().backward()

    def step() -> None:
        pooled = tables(torch.tensor([[1, 2], [39, 0]]))
        if dist.get_rank() == 0:
            pooled = pooled + tables(torch.tensor([[3, 4], [5, 6]]))
        pooled.sum().backward()

    return message_of(step)


def test_ranks_at_different_collectives_all_end_with_an_error(ranks: Any) -> None:
    for rank, message in enumerate(ranks(3).run(called_unequally_often)):
        peer = 0 if rank else 1
        assert f"Rank {peer} of the process group and this one have called" in message
        assert "all ranks must look up the tables equally often" in message


def collectives_of_steps(ids_of_steps: list[Tensor], cache_rows: int) -> list[int]:
    tables = ShardedEmbeddingBags([40, 30], 4, cache_rows=cache_rows)
    tables.materialize()
    optimizer = torch.optim.SGD(tables.parameters(), 0.1)
    started = 0
    start = tables.exchange_group.start

    def counted(*arguments: Any) -> Any:
        nonlocal started
        started += 1
        return start(*arguments)

    tables.exchange_group.start = counted  # type: ignore[method-assign]
    counts = []
    for ids in ids_of_steps:
        before = started
        tables(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(started - before)
    return counts


def test_a_step_makes_three_collectives(ranks: Any) -> None:
    same = [torch.arange(20).view(-1, 2)] * 12
    for counts in ranks(2).run(collectives_of_steps, same, 100):
        assert counts[-6:] == 6 * [3]
        assert max(counts) <= 5


def test_a_step_with_evictions_makes_at_most_two_more(ranks: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    varied = [torch.randint(0, 30, (6, 2), generator=generator) for _ in range(20)]
    for counts in ranks(2).run(collectives_of_steps, varied, 5):
        assert 3 in counts
        assert max(counts) <= 5
