"""A bucket: its tensors on this rank, how each of them is sent, and what an exchange has brought."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dct.compress.threshold import entries_at
from lightning_dct.config import DCTConfig
from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.values import BITS_PER_VALUE

# Entries that a device marks at once, which takes it some 24 bytes each. A larger tensor is sent in pieces.
MOST_AT_ONCE = 1 << 24


class OwnedPiece(NamedTuple):
    """Entries ``start`` to ``stop`` of a flattened parameter.

    Attributes:
        label: The parameter's name, followed by the range unless the piece is all of it.
        name: The parameter's name.
        start: Its first entry.
        stop: One after its last.
        owner: The rank it belongs to.
    """

    label: str
    name: str
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class BucketPlan:
    """A bucket's tensors, or pieces of them, and how each is sent; the same on every rank.

    Attributes:
        names: The parameters' names, in the bucket's order.
        sizes: Entries of each.
        targets: Entries of each that an exchange sends; 0 for a tensor sent dense.
        dtype: The gradients' dtype, in which dense tensors are sent.
        value_format: How sent entries are written.
        starts: First entry of each in the flattened bucket, ascending in each payload; None if there are no gaps.
            Positions in a payload do not count gaps.
        parts: The plans of several payloads that this one joins; empty for a plan of one payload.
        whose: The sender of each part, counted within a row of payloads.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    targets: tuple[int, ...]
    dtype: torch.dtype
    value_format: str
    starts: tuple[int, ...] | None = None
    parts: tuple[BucketPlan, ...] = ()
    whose: tuple[int, ...] = ()

    @staticmethod
    def joined(plans: Sequence[BucketPlan], of_one: bool = False) -> BucketPlan:
        """The plan of several payloads of one bucket, one after the other, ``of_one`` rank or of one rank each."""
        parts = [part for plan in plans for part in plan.parts or (plan,)]
        whose = tuple(0 if of_one else rank for rank, plan in enumerate(plans) for _ in plan.parts or (plan,))
        names, sizes, targets = (
            tuple(chain.from_iterable(getattr(part, field) for part in parts))
            for field in ("names", "sizes", "targets")
        )
        starts = tuple(start for part in parts for start, _ in part.bounds)
        return replace(
            parts[0], names=names, sizes=sizes, targets=targets, starts=starts, parts=tuple(parts), whose=whose
        )

    def by_part(self, change: Callable[[BucketPlan], BucketPlan]) -> BucketPlan:
        """This plan after a change, or that of the same parts after it, all of one rank."""
        return BucketPlan.joined([change(part) for part in self.parts], of_one=True) if self.parts else change(self)

    @cached_property
    def in_pieces(self) -> BucketPlan:
        """The same, or the pieces of a large tensor, a payload for each. A piece is sent like a tensor."""
        if len(self.sizes) != 1 or self.sizes[0] <= MOST_AT_ONCE or self.is_dense or self.parts:
            return self
        ((name,), (size,), (target,)), ((begin, _),) = (self.names, self.sizes, self.targets), self.bounds
        pieces = [
            replace(
                self,
                names=(label,),
                sizes=(stop - start,),
                targets=(share_of(target, stop - start, size),),
                starts=(begin + start,),
            )
            for label, start, stop in cut_evenly(name, size)
        ]
        return BucketPlan.joined(pieces, of_one=True)

    @cached_property
    def groups(self) -> tuple[BucketPlan, ...]:
        """Itself, or what a device handles one after the other: as many parts as have few enough entries together."""
        if sum(self.sizes) <= MOST_AT_ONCE or len(self.parts) < 2:
            return (self,)
        return tuple(BucketPlan.joined(group) for group in few_at_once(self.parts, lambda part: sum(part.sizes)))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the payload, or of those of all parts."""
        return sum(part.layout.num_bytes for part in self.parts or (self,))

    @cached_property
    def is_dense(self) -> bool:
        """Whether every tensor is sent dense, by all-reduce."""
        return not any(self.targets)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of each tensor in the flattened bucket."""
        starts = self.starts_in_payload if self.starts is None else self.starts
        return tuple((start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @cached_property
    def compressed(self) -> tuple[int, ...]:
        """Indices of the tensors that are compressed."""
        return tuple(index for index, target in enumerate(self.targets) if target)

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """Indices of the tensors sent dense."""
        return tuple(index for index, target in enumerate(self.targets) if not target)

    @cached_property
    def on_devices(self) -> dict[torch.device, Any]:
        """The constants of this plan that :mod:`~lightning_dct.compress.on_device` has copied to devices."""
        return {}

    @cached_property
    def layout(self) -> PayloadLayout:
        """The payload's layout, for a plan without parts."""
        dense_bytes = self.dtype.itemsize * sum(self.sizes[index] for index in self.dense)
        return PayloadLayout(self.sizes, self.targets, self.value_format, dense_bytes)

    @cached_property
    def starts_in_payload(self) -> tuple[int, ...]:
        """The first index of each tensor in a payload."""
        return (0, *accumulate(self.sizes[:-1]))[: len(self.sizes)]

    @cached_property
    def residual_dtype(self) -> torch.dtype:
        """At least fp32, because residuals are summed over many steps."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


Item = TypeVar("Item")


def cut_evenly(name: str, size: int, pieces: int = 1) -> list[tuple[str, int, int]]:
    """Label, first entry and end of each of ``pieces`` of a tensor, or of more that are small enough to be handled."""
    count = max(pieces, -(-size // MOST_AT_ONCE), 1)
    edges = [size * number // count for number in range(count + 1)]
    return [(name if count == 1 else f"{name}[{start}:{stop}]", start, stop) for start, stop in pairwise(edges)]


def share_of(target: int, entries: int, size: int) -> int:
    """The part of a tensor's target for a piece of it, rounded up. With FSDP a rank's shard may be empty."""
    return -(-target * entries // max(size, 1))


def few_at_once(items: Sequence[Item], entries_of: Callable[[Item], int]) -> list[list[Item]]:
    """Items in their order, in lists of one or of so many that they have at most ``MOST_AT_ONCE`` entries together."""
    lists: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        entries = entries_of(item)
        if lists[-1] and filled + entries > MOST_AT_ONCE:
            lists.append([])
            filled = 0
        lists[-1].append(item)
        filled += entries
    return lists


def plan_bucket(
    names: Sequence[str],
    sizes: Sequence[int],
    densities: Sequence[float],
    dtype: torch.dtype,
    value_format: str,
    min_tensor_size: int,
    link_traversals: float,
) -> BucketPlan:
    """Decide for each tensor of a bucket how it is sent.

    A tensor is sent dense when it is smaller than ``min_tensor_size``, when all of its entries are sent, or when an
    all-reduce moves fewer bytes. A decision depends on its tensor alone, so the bucket in which
    DistributedDataParallel puts the tensor does not matter.

    ``names``, ``sizes`` and ``densities`` (the share of entries to send, in (0, 1]) have an item for each tensor.
    ``dtype`` is the gradients'. ``link_traversals`` says how often each link carries a rank's payload: for an
    all-gather the world size. An all-reduced tensor counts as two. 1 means that there are no other ranks.
    """
    targets = []
    for size, density in zip(sizes, densities, strict=True):
        target = entries_at(density, size)
        if size < min_tensor_size or target >= size or link_traversals == 1:
            targets.append(0)
            continue
        bits_compressed = link_traversals * target * (BITS_PER_VALUE[value_format] + 2 + math.log2(size / target))
        targets.append(target if bits_compressed < 2 * size * dtype.itemsize * 8 else 0)
    return BucketPlan(tuple(names), tuple(sizes), tuple(targets), dtype, value_format)


class Plans:
    """The plans of buckets under the current settings; each is made once."""

    def __init__(self, config: DCTConfig, link_traversals: float) -> None:
        self.config = config
        self._link_traversals = link_traversals
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...], torch.dtype, float], BucketPlan] = {}

    def change(self, config: DCTConfig) -> None:
        """Use other settings from now on."""
        if config != self.config:
            self.config, self._known = config, {}

    def of(self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, share: float = 1.0) -> BucketPlan:
        """The plan of some tensors at a share of their densities; a density of 1 stays 1."""
        key = tuple(names), tuple(sizes), dtype, share
        if key not in self._known:
            full = [self.config.density_of(name) for name in names]
            densities = [1.0 if density == 1.0 else share * density for density in full]
            settings = self.config.value_format, self.config.min_tensor_size
            self._known[key] = plan_bucket(names, sizes, densities, dtype, *settings, self._link_traversals)
        return self._known[key]


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

    def parts(self, bounds: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """The views of ``news`` (none if there are none) and of ``bases`` within bounds, each of which lies in one."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for start, stop in bounds:
            index = min(bisect_right(self.starts, start), len(self.bases)) - 1
            begin = self.starts[index]
            for tensors, views in zip((self.news, self.bases), found, strict=True):
                if tensors:
                    whole = tensors[index]
                    views.append(whole if stop - start == whole.numel() else whole[start - begin : stop - begin])
        return found

    def entries(self, bounds: tuple[int, int], indices: Tensor | None) -> Tensor:
        """``a`` within bounds, or some of its entries."""
        (new,), (base,) = self.parts([bounds])
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
    """

    payload: Tensor
    num_entries: int | Tensor
    num_dense: int


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


def real_numel(tensor: Tensor) -> int:
    """Real numbers of a tensor on this rank: a complex entry is two."""
    return local_of(tensor).numel() * (2 if tensor.is_complex() else 1)


def local_of(tensor: Tensor) -> Tensor:
    """A tensor's part on this rank, in the same memory: the shard of a ``DTensor``, else the tensor itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's real numbers."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
