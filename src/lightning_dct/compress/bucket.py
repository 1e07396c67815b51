"""A bucket on this rank, what is sent of it, and what an exchange has brought."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from lightning_dct.compress.bucket_plan import BucketPlan


class Bucket:
    """The tensors of a bucket on this rank, flattened: what is new, and what it is added to or compared with.

    Attributes:
        news: Gradients, or this rank's own weights; ``[n]`` together.
        bases: Residuals, or the shared weights, of fp32 or fp64.
        scale: Factor on gradients: one over the loss scale of mixed-precision training. None for weights.
        others_keep: Whether others keep what is not sent, so that it does not enter the residuals.
    """

    def __init__(
        self, news: Sequence[Tensor], bases: Sequence[Tensor], scale: float | None, others_keep: bool = False
    ) -> None:
        self.news, self.bases, self.scale, self.others_keep = news, bases, scale, others_keep
        self.starts = [0, *accumulate(map(Tensor.numel, bases))]

    def parts(self, tensors: Sequence[Tensor], bounds: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The views of ``news`` or ``bases`` within bounds, each of which lies in one tensor."""
        found = []
        for start, stop in bounds:
            index = min(bisect_right(self.starts, start), len(tensors)) - 1
            whole, begin = tensors[index], self.starts[index]
            found.append(whole if stop - start == whole.numel() else whole[start - begin : stop - begin])
        return found

    def entries(self, bounds: tuple[int, int], indices: Tensor | None) -> Tensor:
        """``a`` within bounds, or some of its entries."""
        new, base = (self.parts(tensors, [bounds])[0] for tensors in (self.news, self.bases))
        if indices is not None:
            indices = indices.to(base.device)
            new, base = new[indices], base[indices]
        return new - base if self.scale is None else (new.to(base.dtype) * self.scale).add_(base)


class Compressed(NamedTuple):
    """What is sent of a bucket.

    Attributes:
        payload: Shape ``[plan.layout.num_bytes]``, uint8; for a plan with parts, their payloads one after the other.
        num_entries: Compressed entries in the payload; for a GPU a tensor on it, those of each part.
        num_dense: Entries of the tensors sent dense.
        selected: Whether any threshold was selected.
    """

    payload: Tensor
    num_entries: int | Tensor
    num_dense: int
    selected: bool


class SentPayload(NamedTuple):
    """A payload, how it was sent, and whose it is; all of a bucket have the same tensors."""

    payload: Tensor
    plan: BucketPlan
    sender: str = "This rank's own payload"


class Received(NamedTuple):
    """What an exchange has brought of a bucket.

    Attributes:
        payloads: Shape ``[senders, bytes]``, uint8. For a plan with parts a row holds one payload for each part, and
            each payload is from another sender, counted through all rows.
        plan: How each tensor was sent.
        factor: Weight of each sender: one over the world size, times the loss scale of mixed-precision training.
        own: What this rank has sent itself: the number of its row, or a payload that is not among them, of which counts
            what is in the sums; None if it has sent nothing, or nobody asks.
        what: What was sent, for error messages; None for the usual.
    """

    payloads: Tensor
    plan: BucketPlan
    factor: float
    own: int | SentPayload | None
    what: str | None = None
