"""Dense inside a node, compressed between nodes: the ranks of a node are one worker towards the others.

    inside a node       mean of the gradients                            all-reduce, dense
    rank l of a node    compress shard l of it -> payload_l
    between nodes       payloads of shard l, one from each node          all-gather among the ranks l
    inside a node       payloads of all shards                           all-gather, still compressed
    every rank          sum of all payloads / W

The residual belongs to the node: each of its ``L`` ranks keeps a shard. A rank compresses ``1 / L`` of the bucket and
sends ``(N - 1) / L`` payloads between ``N`` nodes. This pays where links inside a node are far faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from lightning_dct.gradients.collectives import Link, all_gather_payload, all_reduce_mean, spread_payload
from lightning_dct.gradients.exchanges.base import Bucket, Exchange, Flow, count_entries, unused_tensors
from lightning_dct.gradients.memory import Memory
from lightning_dct.gradients.sharding import Piece, Shards, owned_by


class ByNode(Exchange):
    """The exchange for several nodes with several ranks each.

    Args:
        everyone: All ranks, with the number of them that share a node.
        inside: The ranks of this node; a group that :meth:`close` destroys.
        between: The ranks with this rank's place in their nodes; likewise.
        pieces: Every parameter's pieces, by name, shared out among the ranks of a node.
        defer_unused: See :class:`~lightning_dct.gradients.GradientSynchronizer`.
    """

    rounds = 3
    sums_first = True

    def __init__(
        self,
        everyone: Link,
        inside: Link,
        between: Link,
        pieces: Mapping[str, tuple[Piece, ...]],
        defer_unused: bool,
    ) -> None:
        self.everyone = everyone
        self.pieces = owned_by(pieces, inside.rank)
        self.link_traversals = by_node_link_traversals(between.size, inside.size)
        self._inside, self._between = inside, between
        self._defer_unused = defer_unused
        self._made = [inside.group, between.group]
        self._shards = Shards(pieces, inside.size)

    def send(self, bucket: Bucket, memory: Memory) -> Flow:
        """See :meth:`Exchange.send`."""
        buffer, plan, deferred = bucket
        shards, joined = self._shards.of(plan)
        # Residuals of this rank alone, left by another exchange, are sent with the dense gradients.
        memory.send_out(buffer, plan, deferred, owned=False)
        for index in deferred:
            buffer[slice(*plan.bounds[index])] = 0.0
        yield all_reduce_mean(buffer, self._inside)

        own = shards[self._inside.rank]
        gradient = torch.cat([buffer.new_empty(0), *(buffer[slice(*bounds)] for bounds in own.plan.bounds)])
        deferred = unused_tensors(gradient, own.packed) if self._defer_unused else set()
        residual = memory.owned_of(own.packed, buffer.device)
        # From the mean over the node's ranks to their sum.
        scale = memory.gradient_scale * self._inside.size
        compressed = memory.compress(gradient, residual, own.packed, deferred, scale)
        count_entries(gradient.numel(), compressed, self.everyone, memory)
        work, gathered = all_gather_payload(compressed.payload, self._between)
        yield work

        nodes = self._between.size
        sizes = [nodes * shard.plan.layout.num_bytes for shard in shards]
        work, spread = spread_payload(gathered.flatten(), sizes, self._inside)
        yield work

        factor = 1.0 / (memory.gradient_scale * self.everyone.size)
        by_shard = [payloads.view(nodes, -1) for payloads in spread]
        return memory.decompress(torch.cat(by_shard, dim=1), buffer, joined, factor)

    def close(self) -> None:
        """Destroy the groups inside and between nodes."""
        while self._made:
            dist.destroy_process_group(self._made.pop())


def by_node_link_traversals(nodes: int, ranks_per_node: int) -> float:
    """An all-gather among the nodes, relative to an all-reduce over all ranks in the order of the nodes."""
    world_size = nodes * ranks_per_node
    return (nodes - 1) * world_size / (world_size - 1)
