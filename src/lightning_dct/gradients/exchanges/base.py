"""What an exchange is: the way of one bucket's gradients to the other ranks and back, as a row of collectives.

Buckets in which nothing is compressed, and sparse gradients, go the same way under all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.gradients.collectives import Link, all_reduce_mean, all_reduce_mean_sparse
from lightning_dct.gradients.compression import Compressed
from lightning_dct.gradients.memory import Memory
from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.gradients.sharding import Piece

# The way of one bucket: starts a collective, yields what is to be waited for, is resumed when it is there, and so on.
# Returns the bucket with the mean in it.
Flow = Generator[dist.Work, None, Tensor]


class Bucket(NamedTuple):
    """One bucket of gradients.

    Attributes:
        buffer: Shape ``[n]``: the flattened gradients of this rank. Overwritten.
        plan: What becomes of each tensor.
        deferred: Indices of tensors that this rank's backward did not use: nothing is sent of them.
    """

    buffer: Tensor
    plan: BucketPlan
    deferred: set[int]


class Exchange(Protocol):
    """How buckets that are compressed are exchanged.

    Attributes:
        everyone: All ranks, for what is not compressed.
        rounds: Collectives a bucket takes, one after the other.
        link_traversals: See :func:`~lightning_dct.gradients.plan.plan_bucket`.
        pieces: What this rank owns of the model, by label.
        co_owners: Ranks that own the same pieces, of other sums; None where there is one sum, or none is owned.
    """

    everyone: Link
    rounds: int
    link_traversals: float
    pieces: Mapping[str, Piece]
    co_owners: Link | None

    def send(self, bucket: Bucket, memory: Memory) -> Flow:
        """Exchange a bucket; every rank calls this for the same buckets in the same order."""
        ...

    def close(self) -> None:
        """Destroy the process groups that were made for this exchange."""
        ...


def send_sparse(gradient: Tensor, everyone: Link) -> Flow:
    """Exchange a sparse gradient, all of it."""
    yield all_reduce_mean_sparse(gradient, everyone)
    return gradient


def send_dense(bucket: Bucket, memory: Memory, everyone: Link, dtype: torch.dtype) -> Flow:
    """Exchange a bucket in which nothing is compressed, with all that was held back of it, in a dtype."""
    memory.send_out(bucket.buffer, bucket.plan, bucket.deferred, owned=True)
    everyone.traffic.add(entries=bucket.buffer.numel(), entries_sent=bucket.buffer.numel())
    sent = bucket.buffer.to(dtype)
    yield all_reduce_mean(sent, everyone)
    return bucket.buffer if sent is bucket.buffer else bucket.buffer.copy_(sent)


def count_entries(due: int, sent: Compressed, link: Link, memory: Memory) -> None:
    """Count the entries of a bucket.

    Args:
        due: How many it has.
        sent: What goes of it. How many entries that is counts later where a GPU has still to tell.
        link: Where it is counted.
        memory: Keeps what GPUs have still to tell.
    """
    link.traffic.add(entries=due)
    if isinstance(sent.num_entries, Tensor):
        memory.awaited.when_known(sent.num_entries.view(1), lambda counts: link.traffic.add(entries_sent=counts[0]))
    else:
        link.traffic.add(entries_sent=sent.num_entries)


def unused_tensors(gradients: Tensor, plan: BucketPlan) -> set[int]:
    """Indices of tensors of which nothing has arrived, so that nothing may be passed on.

    With ``find_unused_parameters`` DistributedDataParallel throws the result away for a parameter that no rank has
    used: what is held back of it has to wait. This waits for a GPU, once.
    """
    anything = [gradients[slice(*bounds)].any() for bounds in plan.bounds]
    return {index for index, arrived in enumerate(torch.stack(anything).tolist() if anything else []) if not arrived}
