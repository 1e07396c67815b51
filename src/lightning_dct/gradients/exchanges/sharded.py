"""Every rank sums what it owns and passes on its large entries: two rounds, bytes hardly grow with the ranks.

    rank r      compress, a payload for each owner      all-to-all
    owner o     sum what has arrived for its shard
                compress the sum -> payload_o           all-gather
    rank r      read the shards of all owners / W

A rank sends ``(W - 1) / W`` of its selection, and as much again of the sums it owns: a parameter server's traffic
(Gupta et al., KDD 2021, section 3) with the server spread over the ranks. The second threshold has a residual of its
own, which the owner keeps. All ranks read the same second payloads, so replicas stay bitwise identical.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_dct.gradients.collectives import Link, deliver_payloads, spread_payload
from lightning_dct.gradients.exchanges.base import Bucket, Exchange, Flow, count_entries, unused_tensors
from lightning_dct.gradients.memory import Memory
from lightning_dct.gradients.sharding import Piece, Shards, owned_by

SHARDED_LINK_TRAVERSALS = 2.0


class Sharded(Exchange):
    """The exchange for many ranks; ``pieces`` are those of every parameter, by name, shared out among the ranks."""

    rounds = 2
    link_traversals = SHARDED_LINK_TRAVERSALS

    def __init__(self, everyone: Link, pieces: Mapping[str, tuple[Piece, ...]], defer_unused: bool) -> None:
        self.everyone = everyone
        self.pieces = owned_by(pieces, everyone.rank)
        self._defer_unused = defer_unused
        self._shards = Shards(pieces, everyone.size)

    def send(self, bucket: Bucket, memory: Memory) -> Flow:
        """See :meth:`Exchange.send`."""
        buffer, plan, deferred = bucket
        shards, joined = cut = self._shards.of(plan)
        sizes = [shard.plan.layout.num_bytes for shard in shards]
        residual = memory.residual_of(plan, buffer.device)
        compressed = memory.compress(buffer, residual, joined, cut.of(deferred), memory.gradient_scale)
        count_entries(buffer.numel(), compressed, self.everyone, memory)
        work, received = deliver_payloads(compressed.payload.split(sizes), self.everyone)
        yield work

        own = shards[self.everyone.rank]
        sums = torch.zeros(sum(own.plan.sizes), dtype=plan.residual_dtype, device=buffer.device)
        memory.decompress(received, sums, own.sums, 1.0)
        deferred = unused_tensors(sums, own.sums) if self._defer_unused else set()
        passed_on = memory.compress(sums, memory.owned_of(own.packed, buffer.device), own.sums, deferred, 1.0)
        work, spread = spread_payload(passed_on.payload, sizes, self.everyone)
        yield work

        factor = 1.0 / (memory.gradient_scale * self.everyone.size)
        return memory.decompress(torch.cat(spread).unsqueeze(0), buffer, joined, factor, "Sums")
