"""Divides a model among owners: a small tensor belongs to one rank, a large one is cut into pieces
of equal size.

Owners depend on the model's parameters and the settings alone, and not on DistributedDataParallel's
buckets. So a piece keeps its owner, threshold and residual when buckets are rebuilt and when a run
resumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from lightning_dct.compress.bucket_plan import BucketPlan, OwnedPiece
from lightning_dct.wire.values import BITS_PER_VALUE

# An owner sends so many times as many entries of a sum as a rank, but at most a share of it, in a
# wider format.
SUM_TIMES = 3
SUM_MOST = 0.75
SUM_FORMATS = {"1bit": "2bit"}
# Entries that a piece sends at least. Smaller pieces waste more by rounding up; larger ones spread
# less evenly.
SMALLEST_PIECE = 32


@dataclass(frozen=True)
class Shard:
    """What one rank owns of a bucket.

    Attributes:
        plan: Its pieces, with their bounds in the bucket.
        tensors: For each piece, the index of its tensor in the bucket.
    """

    plan: BucketPlan
    tensors: tuple[int, ...]

    @cached_property
    def packed(self) -> BucketPlan:
        """The plan of these pieces without gaps."""
        return replace(self.plan, starts=None)

    @cached_property
    def sums(self) -> BucketPlan:
        """The plan of the owner's sums, which have thresholds of their own."""
        return sums_of(
            replace(self.packed, names=tuple(f"sum of {name}" for name in self.packed.names))
        )


def sums_of(plan: BucketPlan) -> BucketPlan:
    """The plan of sums over ranks: three times as many entries, and 2 bits instead of one.

    Ranks send different entries, and a sum grows with the number of ranks that have sent it:
    ``docs/history/defaults.md``.
    """
    pairs = zip(plan.sizes, plan.targets, strict=True)
    targets = (max(t, min(SUM_TIMES * t, int(SUM_MOST * size))) if t else 0 for size, t in pairs)
    value_format = SUM_FORMATS.get(plan.value_format, plan.value_format)
    return replace(plan, targets=tuple(targets), value_format=value_format)


def share_out(model: BucketPlan, owners: int) -> dict[str, tuple[OwnedPiece, ...]]:
    """Each tensor's pieces in ascending order, by name: about the same number of bytes is sent for
    each owner.
    """
    weights = [
        _bits(size, target, model) for size, target in zip(model.sizes, model.targets, strict=True)
    ]
    loads = [0] * owners
    pieces: dict[str, tuple[OwnedPiece, ...]] = {}
    # The heaviest first; its pieces go to the owners with the smallest load.
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        name = model.names[index]
        size = model.sizes[index]
        count = max(min(owners, (model.targets[index] or size) // SMALLEST_PIECE), 1)
        edges = [size * number // count for number in range(count + 1)]
        takers = sorted(sorted(range(owners), key=lambda owner: (loads[owner], owner))[:count])
        pieces[name] = tuple(
            OwnedPiece(name if count == 1 else f"{name}[{start}:{stop}]", name, start, stop, owner)
            for owner, (start, stop) in zip(takers, pairwise(edges), strict=True)
        )
        for piece in pieces[name]:
            loads[piece.owner] += weights[index] // count
    return pieces


def _bits(size: int, target: int, model: BucketPlan) -> int:
    """About the bits sent of a tensor, as an integer: hosts may differ in the last bit of a
    float.
    """
    if not target:
        return size * model.dtype.itemsize * 8
    return target * (BITS_PER_VALUE[model.value_format] + (size // target).bit_length() + 1)


class Cut(NamedTuple):
    """A bucket divided among owners: each one's shard, and the plan of all shards together, a
    payload for each.

    ``sums`` is that plan for the sums.
    """

    shards: tuple[Shard, ...]
    plan: BucketPlan
    sums: BucketPlan

    def of(self, tensors: set[int]) -> set[int]:
        """The pieces of some of the bucket's tensors, counted through all shards."""
        owned = chain.from_iterable(shard.tensors for shard in self.shards)
        return {index for index, tensor in enumerate(owned) if tensor in tensors}


def cut(bucket: BucketPlan, pieces: Mapping[str, tuple[OwnedPiece, ...]], owners: int) -> Cut:
    """Divide a bucket among the owners of its pieces; an owner's shard may be empty."""
    rows: list[list[tuple[str, int, int, int, int, tuple[str, int]]]] = [[] for _ in range(owners)]
    for tensor, (name, size, target) in enumerate(
        zip(bucket.names, bucket.sizes, bucket.targets, strict=True)
    ):
        for piece in pieces[name]:
            entries = piece.stop - piece.start
            # Rounded up; with FSDP a rank's shard may be empty.
            part = -(-target * entries // max(size, 1))
            start = bucket.bounds[tensor][0] + piece.start
            origin = (name, piece.start)
            rows[piece.owner].append((piece.label, entries, part, start, tensor, origin))
    shards = []
    for own in rows:
        labels, sizes, targets, starts, tensors, origins = (
            zip(*own, strict=True) if own else ((),) * 6
        )
        plan = replace(
            bucket, names=labels, sizes=sizes, targets=targets, starts=starts, pieces=origins
        )
        shards.append(Shard(plan, tensors))
    plans = [shard.plan for shard in shards]
    return Cut(
        tuple(shards),
        BucketPlan.joined(plans),
        BucketPlan.joined([sums_of(plan) for plan in plans]),
    )


def owned_by(pieces: Mapping[str, tuple[OwnedPiece, ...]], owner: int) -> dict[str, OwnedPiece]:
    """The pieces of one owner, by label."""
    return {
        piece.label: piece for parts in pieces.values() for piece in parts if piece.owner == owner
    }
