"""Every rank sends its payload to all others, and each adds them up: one round, bytes grow with the ranks.

    rank r      compress -> payload_r          all-gather          sum of all payloads / W

A rank sends ``W - 1`` payloads. Each entry passes one threshold only, so residuals are smallest here.
"""

from __future__ import annotations

from lightning_dct.gradients.collectives import Link, all_gather_payload
from lightning_dct.gradients.exchanges.base import Bucket, Exchange, Flow, count_entries
from lightning_dct.gradients.memory import Memory


class AllGather(Exchange):
    """The exchange for few ranks."""

    def __init__(self, everyone: Link) -> None:
        self.everyone = everyone
        self.link_traversals = all_gather_link_traversals(everyone.size)

    def send(self, bucket: Bucket, memory: Memory) -> Flow:
        """See :meth:`Exchange.send`."""
        buffer, plan, deferred = bucket
        residual = memory.residual_of(plan, buffer.device)
        compressed = memory.compress(buffer, residual, plan, deferred, memory.gradient_scale)
        count_entries(buffer.numel(), compressed, self.everyone, memory)
        work, payloads = all_gather_payload(compressed.payload, self.everyone)
        yield work
        return memory.decompress(payloads, buffer, plan, 1.0 / (memory.gradient_scale * self.everyone.size))


def all_gather_link_traversals(world_size: int) -> float:
    """A ring carries a payload ``W - 1`` times over each link; an all-reduced tensor ``2 (W - 1) / W`` times."""
    return float(world_size)
