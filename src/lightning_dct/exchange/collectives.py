"""The collectives: the only place where this rank sends bytes, and where they are counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.traffic import Traffic, all_gather_bytes, all_reduce_bytes, bytes_between_nodes

# Bytes that gloo sends at a time. On a link of 100 Mbit/s a payload of 700 kB took 60 to 115 ms as a whole, and 60 like
# this. Smaller segments cost more calls.
SEGMENT = 1 << 17


@dataclass(frozen=True)
class Link:
    """Ranks that communicate, and a counter of the bytes they send.

    Attributes:
        group: The ranks.
        traffic: The counter.
        ranks_per_node: How many neighbouring ranks share a node, to count bytes inside a node apart; 1 counts all
            bytes alike.
    """

    group: dist.ProcessGroup
    traffic: Traffic
    ranks_per_node: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
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


class Segments:
    """The collectives of a payload that travels in parts."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all parts."""
        for work in self._works:
            work.wait()


def all_gather_payload(payload: Tensor, link: Link) -> tuple[dist.Work | Segments, Tensor]:
    """Start sending a payload (uint8, ``[size]``, the same size on every rank) to all ranks.

    Return the work to wait for, and the payloads by rank: shape ``[ranks, size]``, uint8.
    """
    link.count(all_gather_bytes(payload.numel(), link.size))
    gathered = payload.new_empty(link.size, payload.numel())
    if payload.is_cuda or payload.numel() <= SEGMENT:
        # Older versions of torch have only the second name, and newer ones deprecate it.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        work = getattr(dist, name)(gathered.view(-1), payload, group=link.group, async_op=True)
        return work, gathered
    parts = zip(payload.split(SEGMENT), gathered.split(SEGMENT, dim=1), strict=True)
    return Segments(
        [dist.all_gather(list(into.unbind()), part, group=link.group, async_op=True) for part, into in parts]
    ), gathered


def all_to_all(payloads: Tensor, sizes: Sequence[int], expected: Sequence[int], link: Link) -> tuple[dist.Work, Tensor]:
    """Start sending each rank its own of payloads (uint8, one after the other), ``sizes[r]`` bytes for rank ``r``.

    Return the work to wait for, and what arrives, uint8: ``expected[r]`` bytes from rank ``r``, in the ranks' order.
    """
    link.count(sum(sizes) - sizes[link.rank])
    received = payloads.new_empty(sum(expected))
    work = dist.all_to_all_single(received, payloads, list(expected), list(sizes), group=link.group, async_op=True)
    return work, received


def spread_payload(payload: Tensor, sizes: Sequence[int], link: Link) -> tuple[dist.Work, Tensor]:
    """The same with one payload of ``sizes[own rank]`` bytes for all ranks, because all-gather needs equal sizes."""
    return all_to_all(payload.repeat(link.size), link.size * [payload.numel()], sizes, link)


def all_reduce_mean(buffer: Tensor, link: Link) -> dist.Work:
    """Start averaging a tensor over all ranks, in place, as DistributedDataParallel does."""
    link.count(all_reduce_bytes(buffer.numel() * buffer.element_size(), link.size))
    # Dividing first keeps fp16 sums from overflowing.
    buffer.div_(link.size)
    return dist.all_reduce(buffer, group=link.group, async_op=True)


def all_reduce_max(numbers: Tensor, link: Link) -> dist.Work:
    """Start taking the largest of all ranks' numbers, in place."""
    link.count(all_reduce_bytes(numbers.nbytes, link.size))
    return dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=link.group, async_op=True)


def extremes(numbers: Tensor, link: Link) -> tuple[list[int], list[int]]:
    """The smallest and the largest of all ranks' numbers, shape ``[n]``, int64."""
    both = torch.cat([numbers, ~numbers])  # the largest complement is that of the smallest
    all_reduce_max(both, link).wait()
    most, least = both.chunk(2)
    return (~least).tolist(), most.tolist()


def broadcast_from_first(payload: Tensor, link: Link) -> None:
    """Replace a tensor by that of the first rank, in place."""
    link.count(payload.nbytes)  # in a chain every rank but the last passes it on
    dist.broadcast(payload, group=link.group, group_src=0)


def all_reduce_mean_sparse(gradient: Tensor, link: Link) -> dist.Work:
    """Start averaging a sparse gradient over all ranks, in place and uncompressed.

    As under plain DDP the backend gathers every rank's indices and rows. So sent and dense bytes are the same.

    Raises:
        ValueError: The backend is NCCL, which cannot do that.
    """
    if "nccl" in dist.get_backend(link.group):
        raise ValueError(
            "NCCL cannot average sparse gradients, such as those of `Embedding(sparse=True)`. Use `compress='updates'`,"
            " which keeps these gradients on their rank, or `sparse=False`, or `process_group_backend='gloo'`."
        )
    indices, values = gradient._indices(), gradient._values()
    num_bytes = indices.numel() * indices.element_size() + values.numel() * values.element_size()
    sent = all_gather_bytes(num_bytes, link.size)
    link.count(sent)
    link.count_dense(sent)
    link.traffic.add(entries_sent=values.numel(), entries=values.numel())
    gradient.div_(link.size)
    return dist.all_reduce(gradient, group=link.group, async_op=True)
