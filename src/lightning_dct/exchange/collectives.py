"""The collectives of exchanges, which count what they send; tables and pipelines have their own."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.traffic import Traffic, all_gather_bytes, all_reduce_bytes, bytes_between_nodes

# Bytes that gloo sends at a time. On a link of 100 Mbit/s a payload of 700 kB took 60 to 115 ms as
# a whole, and 60 like this. Smaller segments cost more calls.
SEGMENT = 1 << 17
# Tags of a user's own messages are usually small. All links of a group count together.
FIRST_TAG = 1 << 30
TAGS = 1 << 29
_streams: dict[torch.device, torch.cuda.Stream] = {}
_started: Counter[str] = Counter()


@dataclass(frozen=True)
class Link:
    """Ranks that communicate, and a counter of the bytes they send.

    Attributes:
        group: The ranks.
        traffic: The counter.
        ranks_per_node: How many neighbouring ranks share a node, to count bytes inside a node
            apart; 1 counts all bytes alike.
    """

    group: dist.ProcessGroup
    traffic: Traffic
    ranks_per_node: int = 1

    @cached_property
    def host_memory(self) -> "HostMemory | None":
        """Carries a GPU's payloads over gloo; None over another backend."""
        return HostMemory(self.group) if dist.get_backend(self.group) == "gloo" else None

    @property
    def size(self) -> int:
        """The number of ranks, which changes in elastic groups."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    def count(self, num_bytes: int) -> None:
        """Count what this rank sends in one collective."""
        between = bytes_between_nodes(num_bytes, self.size, self.ranks_per_node)
        self.traffic.add(bytes_sent=between, bytes_inside_node=num_bytes - between)

    def count_dense(self, num_bytes: int) -> None:
        """Count what this rank would send in the dense exchange."""
        self.traffic.add(bytes_dense=bytes_between_nodes(num_bytes, self.size, self.ranks_per_node))


class HostMemory:
    """Carries a GPU's payloads over gloo: through pinned memory of the host, between neighbours of
    a ring.

    gloo's own collectives on tensors of a GPU copy each payload several times, in memory that is
    new each time. Here a stream beside the current one copies the payload to the host, a thread
    waits for that in the host's place, and sends from the very memory. So a bucket's copy, its
    travel, and what GPU and host do next all overlap.

        rank r          row r -> pinned memory
        W - 1 times     row (r - step) -> rank r + 1,  row (r - step - 1) <- rank r - 1
        rank r          all other rows -> GPU

    All ranks start the same in the same order. Tags tell the messages apart from each other and
    from collectives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def all_gather(self, payload: Tensor) -> tuple["Travel", Tensor]:
        """Start sending a payload (uint8, ``[size]``) to all ranks; return what to wait for, and
        payloads by rank.
        """
        ranks = len(self._ranks)
        rank = self._group.rank()
        gathered = payload.new_empty(ranks, payload.numel())
        host = _room(gathered.shape, payload.device)
        copied = _copy_beside(payload, host[rank])
        tag = self._tags(ranks)
        gathered[rank].copy_(payload)

        def travel() -> None:
            copied()
            for step in range(ranks - 1):
                sent = host[(rank - step) % ranks]
                received = host[(rank - step - 1) % ranks]
                self._swap(
                    [(sent, self._ranks[(rank + 1) % ranks])],
                    [(received, self._ranks[rank - 1])],
                    tag + step,
                )

        def arrive() -> None:
            for rows in (slice(0, rank), slice(rank + 1, ranks)):
                gathered[rows].copy_(host[rows], non_blocking=True)

        return Travel(travel, arrive, payload), gathered

    def all_to_all(
        self, payloads: Tensor, sizes: list[int], expected: list[int]
    ) -> tuple["Travel", Tensor]:
        """Start sending each rank its own payload; return what to wait for, and what arrives."""
        rank = self._group.rank()
        received = payloads.new_empty(sum(expected))
        outgoing, incoming = (_room((sum(n),), payloads.device) for n in (sizes, expected))
        copied = _copy_beside(payloads, outgoing)
        tag = self._tags(1)
        sent, arriving = (
            [
                (part, peer)
                for part, peer in zip(memory.split(n), self._ranks, strict=True)
                if part.numel()
            ]
            for memory, n in ((outgoing, sizes), (incoming, expected))
        )

        def travel() -> None:
            copied()
            self._swap(sent, arriving, tag)

        def arrive() -> None:
            received.copy_(incoming, non_blocking=True)
            received.split(expected)[rank].copy_(payloads.split(sizes)[rank])

        return Travel(travel, arrive, payloads), received

    def _tags(self, count: int) -> int:
        _started[name := self._group.group_name] += count
        return FIRST_TAG + (_started[name] - count) % TAGS

    def _swap(
        self, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]], tag: int
    ) -> None:
        own = self._ranks[self._group.rank()]
        works = [
            dist.irecv(memory, source, self._group, tag)
            for memory, source in received
            if source != own
        ]
        works += [
            dist.isend(memory, target, self._group, tag) for memory, target in sent if target != own
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]


class Travel:
    """A payload on its way."""

    def __init__(
        self, travel: Callable[[], object], arrive: Callable[[], None], payload: Tensor
    ) -> None:
        # which the stream beside reads
        self._arrive = arrive
        self._payload = payload
        self._done: Future[object] = Future()

        def run() -> None:
            try:
                self._done.set_result(travel())
            except BaseException as error:
                self._done.set_exception(error)

        # Not joined at the end of the process: a rank may be gone for which it waits.
        Thread(target=run, daemon=True, name="dct-wire").start()

    def wait(self) -> None:
        """Wait until everything is on this host, and start copying it to the GPU."""
        self._done.result()
        self._arrive()


def _room(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _copy_beside(payload: Tensor, memory: Tensor) -> Callable[[], None]:
    """Start copying to host memory on a stream beside the current one, and return a function that
    waits for the end.
    """
    device = payload.device
    if device.type != "cuda":
        memory.copy_(payload)
        return lambda: None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    beside = _streams[device]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        memory.copy_(payload, non_blocking=True)
        return beside.record_event().synchronize


class Segments:
    """The collectives of a payload that travels in parts."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all parts."""
        for work in self._works:
            work.wait()


def all_gather_payload(payload: Tensor, link: Link) -> tuple[dist.Work | Segments | Travel, Tensor]:
    """Start sending a payload (uint8, ``[size]``, the same size on every rank) to all ranks.

    Return the work to wait for, and the payloads by rank: shape ``[ranks, size]``, uint8.
    """
    link.count(all_gather_bytes(payload.numel(), link.size))
    if payload.is_cuda and link.host_memory is not None:
        return link.host_memory.all_gather(payload)
    gathered = payload.new_empty(link.size, payload.numel())
    if payload.is_cuda or payload.numel() <= SEGMENT:
        # Older versions of torch have only the second name, and newer ones deprecate it.
        name = (
            "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        )
        work = getattr(dist, name)(gathered.view(-1), payload, group=link.group, async_op=True)
        return work, gathered
    parts = zip(payload.split(SEGMENT), gathered.split(SEGMENT, dim=1), strict=True)
    return (
        Segments(
            [
                dist.all_gather(list(into.unbind()), part, group=link.group, async_op=True)
                for part, into in parts
            ]
        ),
        gathered,
    )


def all_to_all(
    payloads: Tensor, sizes: Sequence[int], expected: Sequence[int], link: Link
) -> tuple[dist.Work | Travel, Tensor]:
    """Start sending rank ``r`` its ``sizes[r]`` bytes of ``payloads`` (uint8, one payload after the
    other).

    Return the work to wait for, and what arrives, uint8: ``expected[r]`` bytes from rank ``r``, in
    the ranks' order.
    """
    link.count(sum(sizes) - sizes[link.rank])
    if payloads.is_cuda and link.host_memory is not None:
        return link.host_memory.all_to_all(payloads, list(sizes), list(expected))
    received = payloads.new_empty(sum(expected))
    work = dist.all_to_all_single(
        received, payloads, list(expected), list(sizes), group=link.group, async_op=True
    )
    return work, received


def spread_payload(
    payload: Tensor, sizes: Sequence[int], link: Link
) -> tuple[dist.Work | Travel, Tensor]:
    """Start sending one payload of ``sizes[own rank]`` bytes to all ranks; all-gather would need
    equal sizes.
    """
    return all_to_all(payload.repeat(link.size), link.size * [payload.numel()], sizes, link)


def all_reduce_mean(buffer: Tensor, link: Link) -> dist.Work:
    """Start averaging a tensor over all ranks, in place, as DistributedDataParallel does."""
    link.count(all_reduce_bytes(buffer.nbytes, link.size))
    # Dividing first keeps fp16 sums from overflowing.
    buffer.div_(link.size)
    return dist.all_reduce(buffer, group=link.group, async_op=True)


def all_reduce_max(numbers: Tensor, link: Link) -> dist.Work:
    """Start taking the largest of all ranks' numbers, in place."""
    link.count(all_reduce_bytes(numbers.nbytes, link.size))
    return dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=link.group, async_op=True)


def extremes(numbers: Tensor, link: Link) -> tuple[list[int], list[int]]:
    """The smallest and the largest of all ranks' numbers, shape ``[n]``, int64."""
    both = torch.cat([numbers, ~numbers])  # the smallest number has the largest complement
    all_reduce_max(both, link).wait()
    most, least = both.chunk(2)
    return (~least).tolist(), most.tolist()


def broadcast_from_first(payload: Tensor, link: Link) -> None:
    """Replace a tensor by that of the first rank, in place."""
    link.count(payload.nbytes)  # in a chain every rank but the last passes it on
    dist.broadcast(payload, group=link.group, group_src=0)


def all_reduce_mean_sparse(gradient: Tensor, link: Link) -> dist.Work:
    """Start averaging a sparse gradient over all ranks, in place and uncompressed.

    As under plain DDP the backend gathers every rank's indices and rows. So sent and dense bytes
    are the same.

    Raises:
        ValueError: The backend is NCCL, which cannot do that.
    """
    if "nccl" in dist.get_backend(link.group):
        raise ValueError(
            "NCCL cannot average sparse gradients, such as those of `Embedding(sparse=True)`. Use"
            " `compress='updates'`, which keeps these gradients on their rank, or `sparse=False`,"
            " or `process_group_backend='gloo'`."
        )
    values = gradient._values()
    sent = all_gather_bytes(gradient._indices().nbytes + values.nbytes, link.size)
    link.count(sent)
    link.count_dense(sent)
    link.traffic.add(entries_sent=values.numel(), entries=values.numel())
    gradient.div_(link.size)
    return dist.all_reduce(gradient, group=link.group, async_op=True)
