"""What an exchange is: the way of one bucket's gradients to the other ranks and back, as a row of collectives."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_dct.gradients.collectives import Link
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
        held: Indices of tensors that this rank's backward did not use: nothing is sent of them.
    """

    buffer: Tensor
    plan: BucketPlan
    held: set[int]


class Exchange(Protocol):
    """How buckets that are compressed are exchanged.

    Attributes:
        everyone: All ranks, for what is not compressed.
        rounds: Collectives a bucket takes, one after the other.
        passes: See :func:`~lightning_dct.gradients.plan.plan_bucket`.
        pieces: What this rank owns of the model, by label.
    """

    everyone: Link
    rounds: int
    passes: float
    pieces: Mapping[str, Piece]

    def send(self, bucket: Bucket, memory: Memory) -> Flow:
        """Exchange a bucket; every rank calls this for the same buckets in the same order."""
        ...

    def close(self) -> None:
        """Destroy the process groups that were made for this exchange."""
        ...


def unused(gradients: Tensor, plan: BucketPlan) -> set[int]:
    """Indices of tensors of which nothing has arrived, so that nothing may be passed on.

    With ``find_unused_parameters`` DistributedDataParallel throws the result away for a parameter that no rank has
    used: what is held back of it has to wait.
    """
    return {index for index, bounds in enumerate(plan.bounds) if not bool(gradients[slice(*bounds)].any())}
