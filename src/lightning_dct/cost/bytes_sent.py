"""The bytes that each rank gives to the collectives in an exchange, from the plans alone.

The modules in :mod:`lightning_dct.exchange` draw the collectives of each exchange.
:mod:`lightning_dct.exchange.collectives` counts the same bytes when they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dct.compress.bucket_plan import BucketPlan, Plans, real_dtype, real_numel
from lightning_dct.config import DCTConfig
from lightning_dct.cost.workload import Workload
from lightning_dct.exchange.compressed import link_traversals
from lightning_dct.exchange.factory import NodeLayout, share_model
from lightning_dct.exchange.sharding import Shard, cut
from lightning_dct.traffic import FP32_BYTES, TAG_BYTES, all_gather_bytes, all_reduce_bytes, bytes_between_nodes


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends in a step.

    Attributes:
        between: To ranks on other nodes; all bytes if no node has several ranks, or there is one node.
        inside: To ranks on its own node.
    """

    between: int = 0
    inside: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.between + self.inside

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.between + other.between, self.inside + other.inside)


@dataclass(frozen=True)
class Step:
    """One exchange of the whole model, in the final layout of its buckets.

    Attributes:
        sent: By each rank, in their order.
        entries: Entries of the buckets that are compressed; the others are all-reduced.
        residual_bytes: Of each rank, for its own gradients and for the sums that it owns.
    """

    sent: tuple[SentBytes, ...]
    entries: int
    residual_bytes: tuple[int, ...]


def dense_step(workload: Workload, layout: NodeLayout) -> Step:
    """The all-reduce of all gradients in fp32, the reference of ratios."""
    ranks = len(layout.places)
    sizes = [sum(real_numel(workload.parameters[name]) for name in bucket) for bucket in workload.buckets]
    sent = sum((_ring(all_reduce_bytes(FP32_BYTES * size, ranks), layout) for size in sizes), SentBytes())
    return Step((sent,) * ranks, 0, (0,) * ranks)


def compressed_step(exchange: str, config: DCTConfig, workload: Workload, layout: NodeLayout) -> Step:
    """One of the compressed exchanges of two or more ranks; ``"by_node"`` needs a layout without an obstacle."""
    world_size, local = len(layout.places), layout.ranks_per_node
    traversals, owners = link_traversals(exchange, world_size, local), {"sharded": world_size, "by_node": local}
    plans = Plans(config, traversals)
    among = owners.get(exchange, 0)
    pieces = share_model(config, workload.parameters, traversals, among) if among else {}
    sent, residuals, entries = [SentBytes()] * world_size, [0] * world_size, 0
    for names in workload.buckets_under(config):
        tensors = [workload.parameters[name] for name in names]
        plan = plans.of(names, [*map(real_numel, tensors)], real_dtype(tensors[0]))
        shards = cut(plan, pieces, among).shards if among else ()
        to_owners = _sharded(shards, layout) if exchange == "sharded" and not plan.is_dense else []
        entries += 0 if plan.is_dense else sum(plan.sizes)
        for rank in range(world_size):
            if plan.is_dense:
                itemsize = 2 if config.averages_in_bf16 and plan.dtype == torch.float32 else plan.dtype.itemsize
                sent[rank] += _ring(all_reduce_bytes(sum(plan.sizes) * itemsize, world_size), layout)
                if config.compress == "updates":
                    sent[rank] += _ring(all_reduce_bytes(TAG_BYTES, world_size), layout)
            elif exchange == "all_gather":
                sent[rank] += _ring(all_gather_bytes(plan.num_bytes, world_size), layout)
                residuals[rank] += _residual_bytes(plan)
            elif exchange == "sharded":
                sent[rank] += to_owners[rank]
                residuals[rank] += _residual_bytes(plan) + _residual_bytes(shards[rank].packed)
            else:
                own = shards[rank % local]
                sent[rank] += _by_node(plan, own, layout)
                residuals[rank] += _residual_bytes(own.packed)
    return Step(tuple(sent), entries, tuple(residuals))


def _ring(num_bytes: int, layout: NodeLayout) -> SentBytes:
    between = bytes_between_nodes(num_bytes, len(layout.places), layout.ranks_per_node)
    return SentBytes(between, num_bytes - between)


def _sharded(shards: Sequence[Shard], layout: NodeLayout) -> list[SentBytes]:
    """Each rank sends each owner its part, and then all ranks the compressed sums that it owns."""
    ranks, local = len(shards), layout.ranks_per_node
    owned = [shard.plan.num_bytes for shard in shards]
    owned_by_node = [sum(owned[first : first + local]) for first in range(0, ranks, local)]
    everything, sent = sum(owned), []
    for rank, shard in enumerate(shards):
        sums, on_node = shard.sums.num_bytes, owned_by_node[rank // local]
        inside = on_node - owned[rank] + (local - 1) * sums
        sent.append(SentBytes(everything - on_node + (ranks - local) * sums, inside))
    return sent


def _by_node(plan: BucketPlan, own: Shard, layout: NodeLayout) -> SentBytes:
    """Dense inside the node, one shard's payload between nodes, then the payloads of all nodes inside."""
    nodes, local = len(layout.nodes), layout.ranks_per_node
    payload = own.packed.num_bytes
    inside = all_reduce_bytes(sum(plan.sizes) * plan.dtype.itemsize, local) + all_gather_bytes(nodes * payload, local)
    return SentBytes(all_gather_bytes(payload, nodes), inside)


def _residual_bytes(plan: BucketPlan) -> int:
    return sum(plan.sizes) * plan.residual_dtype.itemsize
