"""The three compressed exchanges: all-gather, in two phases, and hierarchical.

``all_gather``: every rank sends its payload to all others. Bytes grow with the number of ranks
``W``, because a rank sends ``W - 1`` payloads. There is only one threshold, so residuals are
smaller than in the other exchanges.

    rank r              compress -> payload_r                         all-gather
    every rank          sum of all payloads / W

``two_phase``: every rank sums the pieces it owns and sends the large entries of the sums. A rank
sends ``(W - 1) / W`` of its selection, and the same share of the sums: the traffic of a parameter
server (Gupta et al., KDD 2021, section 3) that is distributed over the ranks. An owner sends three
times as many entries as a rank, in 2 bits each. It keeps the rest of gradients. With updates, the
ranks keep in their own weights what an owner does not take; otherwise each rank would make that
step again before it arrives. The owner then keeps rounding errors only, and so does a node.

    rank r              compress, a payload for each owner            all-to-all
    owner o             sum the payloads for its shard
                        compress the sum -> payload_o                 all-gather
    every rank          unpack the payloads of all owners / W

``hierarchical``: dense inside a node, compressed between nodes. The ranks of a node act as one
worker, whose residual they share: a rank compresses ``1 / L`` of the bucket and sends ``(N - 1) /
L`` payloads between ``N`` nodes of ``L`` ranks. This pays if links inside a node are much faster.

    inside a node       mean of the gradients                         all-reduce, dense
    rank l of a node    compress shard l of it -> payload_l
    between nodes       payloads of shard l, one from each node       all-gather among the ranks l
    inside a node       payloads of all shards                        all-gather, still compressed
    every rank          sum of all payloads / W

In each of them all ranks sum the same payloads in the same order, so replicas stay bitwise
identical. A tag marks the payloads of a step on their way, so that ranks at different steps end
with an error.
"""

from collections.abc import Mapping
from functools import cache, partial

import torch

from lightning_dct.compress.bucket_plan import (
    Bucket,
    BucketPlan,
    ExchangeContext,
    OwnedPiece,
    Received,
)
from lightning_dct.compress.codec import compress, decompress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.exchange.base import Collectives, Exchange, unused_tensors
from lightning_dct.exchange.collectives import (
    Link,
    all_gather_payload,
    all_reduce_mean,
    all_to_all,
    spread_payload,
)
from lightning_dct.exchange.sharding import cut, owned_by


def link_traversals(exchange: str, world_size: int, ranks_per_node: int = 1) -> float:
    """How often each link of a ring carries a rank's payload, where an all-reduced tensor counts as
    2.

    Links inside nodes do not count for ``"hierarchical"``.
    """
    if exchange == "hierarchical":
        return (world_size // ranks_per_node - 1) * world_size / (world_size - 1)
    return 2.0 if exchange == "two_phase" else float(world_size)


class AllGather(Exchange):
    """The exchange for few ranks."""

    def __init__(self, everyone: Link) -> None:
        self.everyone = everyone
        self.link_traversals = link_traversals("all_gather", everyone.size)

    def send(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        context: ExchangeContext,
    ) -> Collectives:
        """See :meth:`Exchange.send`."""
        payload = self.compress(feedback, bucket, plan, deferred, context, due=sum(plan.sizes))
        work, payloads = all_gather_payload(payload, self.everyone)
        yield work
        factor = 1.0 / ((bucket.scale or 1.0) * self.everyone.size)
        return Received(payloads, plan, factor, own=self.everyone.rank, context=context)


class TwoPhase(Exchange):
    """The exchange for many ranks; ``pieces`` are every parameter's pieces, by name, divided among
    the ranks.
    """

    num_collectives = 2

    def __init__(
        self, everyone: Link, pieces: Mapping[str, tuple[OwnedPiece, ...]], defer_unused: bool
    ) -> None:
        self.everyone = everyone
        self.link_traversals = link_traversals("two_phase", everyone.size)
        self.pieces = owned_by(pieces, everyone.rank)
        self._defer_unused = defer_unused
        self._cut = cache(partial(cut, pieces=pieces, owners=everyone.size))  # each bucket once

    def send(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        context: ExchangeContext,
    ) -> Collectives:
        """See :meth:`Exchange.send`."""
        shards, joined, joined_sums = divided = self._cut(plan)
        sizes = [shard.plan.num_bytes for shard in shards]
        own = shards[self.everyone.rank]
        ranks = self.everyone.size
        payload = self.compress(
            feedback, bucket, joined, divided.of(deferred), context, due=sum(plan.sizes)
        )
        work, received = all_to_all(payload, sizes, ranks * [own.plan.num_bytes], self.everyone)
        yield work

        # Owners multiply by the gains, and what they send counts as it is.
        sums = payload.new_empty(sum(own.plan.sizes), dtype=plan.residual_dtype)
        decompress(
            feedback,
            Received(received.view(ranks, -1), own.packed, 1.0, own=None, context=context),
            sums,
        )
        deferred = unused_tensors(sums, own.sums) if self._defer_unused else set()
        # With updates, the ranks keep in their own weights what is not sent.
        summed = Bucket(
            [sums], [feedback.owned_of(own.packed, sums.device)], 1.0, feedback.of_updates
        )
        sums_payload, _ = compress(feedback, summed, own.sums, deferred, context)
        work, spread = spread_payload(
            sums_payload, [shard.sums.num_bytes for shard in shards], self.everyone
        )
        yield work

        factor = 1.0 / ((bucket.scale or 1.0) * ranks)
        return Received(
            spread.unsqueeze(0),
            joined_sums,
            factor,
            own=Received(payload.unsqueeze(0), joined, 1.0, own=None),
            label="Sums",
            context=context.without_gains(),
        )


class Hierarchical(Exchange):
    """The exchange for several nodes with several ranks each.

    ``inside`` are the ranks of this node, and ``between`` those with this rank's local number on
    all nodes. ``pieces`` are every parameter's, by name, divided among the ranks of a node.
    """

    num_collectives = 3
    sums_first = True

    def __init__(
        self,
        everyone: Link,
        inside: Link,
        between: Link,
        pieces: Mapping[str, tuple[OwnedPiece, ...]],
        defer_unused: bool,
    ) -> None:
        self.everyone = everyone
        self.pieces = owned_by(pieces, inside.rank)
        self.link_traversals = link_traversals("hierarchical", everyone.size, inside.size)
        self._inside = inside
        self._between = between
        self._defer_unused = defer_unused
        self._cut = cache(partial(cut, pieces=pieces, owners=inside.size))

    def send(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        context: ExchangeContext,
    ) -> Collectives:
        """See :meth:`Exchange.send`."""
        (buffer,), scale = bucket.inputs, bucket.scale or 1.0
        shards, joined, _ = self._cut(plan)
        # Residuals of this rank's own gradients, left by another exchange, are sent with the dense
        # gradients.
        feedback.send_out(buffer, plan, deferred, scale, owned=False)
        for index in deferred:
            buffer[slice(*plan.bounds[index])] = 0.0
        yield all_reduce_mean(buffer, self._inside)

        own = shards[self._inside.rank]
        gradient = torch.cat(
            [buffer.new_empty(0), *(buffer[slice(*bounds)] for bounds in own.plan.bounds)]
        )
        deferred = unused_tensors(gradient, own.packed) if self._defer_unused else set()
        residual = feedback.owned_of(own.packed, buffer.device)
        # The sum over the node's ranks, from their mean.
        summed = Bucket([gradient], [residual], scale * self._inside.size, feedback.of_updates)
        payload = self.compress(
            feedback, summed, own.packed, deferred, context, due=gradient.numel()
        )
        work, gathered = all_gather_payload(payload, self._between)
        yield work

        nodes = self._between.size
        sizes = [nodes * shard.plan.num_bytes for shard in shards]
        work, spread = spread_payload(gathered.flatten(), sizes, self._inside)
        yield work

        by_shard = [payloads.view(nodes, -1) for payloads in spread.split(sizes)]
        received = torch.cat(by_shard, dim=1)
        return Received(
            received,
            joined,
            1.0 / (scale * self.everyone.size),
            own=self._between.rank,
            context=context,
        )
