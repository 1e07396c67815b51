"""Every rank sends its payload to all others, and each adds them up for itself: one round, bytes grow with the ranks.

    rank r      compress -> payload_r          all-gather          sum of all payloads / W

A rank sends ``W - 1`` payloads. Nothing is thresholded twice, so this is the exchange that holds back least.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dct.gradients.collectives import Link, all_gather_payload
from lightning_dct.gradients.exchanges.base import Bucket, Flow, count_entries
from lightning_dct.gradients.memory import Memory
from lightning_dct.gradients.sharding import Piece


class AllGather:
    """The exchange for few ranks.

    Args:
        everyone: The ranks.
    """

    rounds = 1
    pieces: Mapping[str, Piece] = {}
    co_owners: Link | None = None

    def __init__(self, everyone: Link) -> None:
        self.everyone = everyone
        self.link_traversals = all_gather_link_traversals(everyone.size)

    def send(self, bucket: Bucket, memory: Memory) -> Flow:
        """Exchange a bucket."""
        buffer, plan, deferred = bucket
        residual = memory.residual_of(plan, buffer.device)
        compressed = memory.compress(buffer, residual, plan, deferred, memory.gradient_scale)
        count_entries(buffer.numel(), compressed, self.everyone, memory)
        work, payloads = all_gather_payload(compressed.payload, self.everyone)
        yield work
        return memory.decompress(payloads, buffer, plan, 1.0 / (memory.gradient_scale * self.everyone.size))

    def close(self) -> None:
        """Nothing to destroy."""


def all_gather_link_traversals(world_size: int) -> float:
    """A payload passes each link of a ring ``world_size - 1`` times; an all-reduced tensor 2 (W - 1) / W times."""
    return float(world_size)
