"""A bucket: its tensors on this rank, how each of them is sent, and what has been received."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.compress.threshold import entries_at
from lightning_dct.config import DCTConfig
from lightning_dct.kernels.plain import Gains
from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.values import BITS_PER_VALUE

# The flags of each tensor begin at a word of so many, which a GPU writes at once.
WORD = 32


class OwnedPiece(NamedTuple):
    """Entries ``start`` to ``stop`` of a flattened parameter."""

    label: str  # the parameter's name, followed by the range unless the piece is all of it
    name: str  # the parameter's name
    start: int
    stop: int
    owner: int  # the rank it belongs to


class PlannedTensors(NamedTuple):
    """Some of a bucket's tensors, one item of each field a tensor."""

    names: tuple[str, ...]
    targets: tuple[int, ...]  # entries that an exchange sends
    sizes: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]  # where they begin and end in the flattened bucket
    first: tuple[int, ...]  # the number of the first flag, of those that are compressed


@dataclass(frozen=True)
class BucketPlan:
    """A bucket's tensors, or pieces of them, and how each is sent; the same on every rank."""

    names: tuple[str, ...]  # of the parameters, in the bucket's order
    sizes: tuple[int, ...]  # entries of each
    targets: tuple[int, ...]  # entries of each that an exchange sends; 0 for a tensor sent dense
    dtype: torch.dtype  # of the gradients, in which dense tensors are sent
    value_format: str  # how sent entries are written
    # The first entry of each in the flattened bucket, ascending in each payload; None if there are
    # no gaps. Positions in a payload do not count gaps.
    starts: tuple[int, ...] | None = None
    # Of each, the parameter of which it is a piece, and its first entry there; None if they are
    # whole parameters.
    pieces: tuple[tuple[str, int], ...] | None = None
    parts: tuple[
        BucketPlan, ...
    ] = ()  # the plans that this one joins, of one rank's payload each; empty if it is one

    @staticmethod
    def joined(parts: Sequence[BucketPlan]) -> BucketPlan:
        """The plan of several payloads of one bucket, one after the other."""
        names, sizes, targets = (
            tuple(chain.from_iterable(getattr(part, field) for part in parts))
            for field in ("names", "sizes", "targets")
        )
        starts = tuple(start for part in parts for start, _ in part.bounds)
        pieces = tuple(piece for part in parts for piece in part.origins)
        joined = replace(
            parts[0], names=names, sizes=sizes, targets=targets, starts=starts, pieces=pieces
        )
        return replace(joined, parts=tuple(parts))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the payload, or of those of all parts."""
        return sum(part.layout.num_bytes for part in self.parts or (self,))

    def divide(self, payloads: Tensor) -> list[tuple[BucketPlan, Tensor]]:
        """The plan of each part, and its columns of payloads (uint8, ``[..., bytes]``)."""
        if not self.parts:
            return [(self, payloads)]
        sizes = [part.layout.num_bytes for part in self.parts]
        return [*zip(self.parts, payloads.split(sizes, dim=-1), strict=True)]

    @cached_property
    def is_dense(self) -> bool:
        """Whether every tensor is sent dense, by all-reduce."""
        return not any(self.targets)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of each tensor in the flattened bucket."""
        starts = accumulate(self.sizes[:-1], initial=0) if self.starts is None else self.starts
        return tuple((start, start + size) for start, size in zip(starts, self.sizes, strict=False))

    @cached_property
    def origins(self) -> tuple[tuple[str, int], ...]:
        """Of each tensor, its parameter, and its first entry there."""
        return tuple((name, 0) for name in self.names) if self.pieces is None else self.pieces

    @cached_property
    def _known_gains(self) -> dict[Any, tuple[Mapping[str, Gain], Any]]:
        """The latest gains, because they change rarely; and what kernels read of them."""
        return {}

    @cached_property
    def compressed(self) -> tuple[int, ...]:
        """Indices of the tensors that are compressed."""
        return tuple(index for index, target in enumerate(self.targets) if target)

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """Indices of the tensors sent dense."""
        return tuple(index for index, target in enumerate(self.targets) if not target)

    @cached_property
    def tables(self) -> dict[torch.device, Any]:
        """This plan in the memory of GPUs, where :mod:`~lightning_dct.compress.on_gpu` has put
        it.
        """
        return {}

    @cached_property
    def layout(self) -> PayloadLayout:
        """The payload's layout, for a plan without parts."""
        dense_bytes = self.dtype.itemsize * sum(self.sizes[index] for index in self.dense)
        entries = tuple(self.sizes[index] for index in self.compressed)
        sizes = tuple(-(-size // WORD) * WORD for size in entries)
        targets = tuple(filter(None, self.targets))
        return PayloadLayout(sizes, targets, self.value_format, dense_bytes, entries)

    @cached_property
    def flag_bytes(self) -> list[int]:
        """Bytes of the flags of each payload."""
        return [part.layout.flags_num_bytes for part in self.parts or (self,)]

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The number of each compressed tensor's first flag, counted through all payloads."""
        begins = accumulate(self.flag_bytes, initial=0)
        parts = zip(self.parts or (self,), begins, strict=False)
        return tuple(
            start
            for part, begin in parts
            for start in [*accumulate(part.layout.tensor_sizes, initial=8 * begin)][:-1]
        )

    def of_tensors(self, indices: tuple[int, ...]) -> PlannedTensors:
        """What loops read of some tensors."""
        if indices not in self._known_tensors:
            first = dict(zip(self.compressed, self.first, strict=True))
            self._known_tensors[indices] = PlannedTensors(
                tuple([self.names[index] for index in indices]),
                tuple([self.targets[index] for index in indices]),
                tuple([self.sizes[index] for index in indices]),
                tuple([self.bounds[index] for index in indices]),
                tuple([first.get(index, 0) for index in indices]),
            )
        return self._known_tensors[indices]

    @cached_property
    def _known_tensors(self) -> dict[tuple[int, ...], PlannedTensors]:
        return {}

    @cached_property
    def residual_dtype(self) -> torch.dtype:
        """At least fp32, because residuals are summed over many steps."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


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

    A tensor is sent dense when it is smaller than ``min_tensor_size``, when all of its entries are
    sent, or when an all-reduce moves fewer bytes. A decision depends on its tensor alone, so the
    bucket in which DistributedDataParallel puts the tensor does not matter.

    ``names``, ``sizes`` and ``densities`` (the share of entries to send, in (0, 1]) have an item
    for each tensor. ``dtype`` is the gradients'. ``link_traversals`` says how often each link
    carries a rank's payload: for an all-gather the world size. An all-reduced tensor counts as two.
    1 means that there are no other ranks.
    """
    targets = []
    for size, density in zip(sizes, densities, strict=True):
        target = entries_at(density, size)
        if size < min_tensor_size or target >= size or link_traversals == 1:
            targets.append(0)
            continue
        bits_compressed = (
            link_traversals * target * (BITS_PER_VALUE[value_format] + 2 + math.log2(size / target))
        )
        targets.append(target if bits_compressed < 2 * size * dtype.itemsize * 8 else 0)
    return BucketPlan(tuple(names), tuple(sizes), tuple(targets), dtype, value_format)


def gains_of(plan: BucketPlan, gains: Mapping[str, Gain], device: torch.device) -> Gains | None:
    """The gains of a plan's compressed tensors, with factors on a device; None if all are 1."""
    if not gains:
        return None
    known = plan._known_gains.get(device)
    if known is None or known[0] is not gains:
        known = plan._known_gains[device] = gains, _joined(plan, gains, device)
    found: Gains | None = known[1]
    return found


def gains_of_dense(plan: BucketPlan, gains: Mapping[str, Gain], mean: Tensor) -> Tensor | None:
    """The factors on the mean of a plan's dense tensors, one after the other: like that mean, shape
    ``[n]``; None if all are 1.
    """
    if not gains:
        return None
    key = "dense", mean.device
    known = plan._known_gains.get(key)
    if known is None or known[0] is not gains:
        known = plan._known_gains[key] = gains, _joined_dense(plan, gains, mean)
    found: Tensor | None = known[1]
    return found


def _joined(plan: BucketPlan, gains: Mapping[str, Gain], device: torch.device) -> Gains | None:
    factors = [torch.ones(1, dtype=torch.float64)]
    places = []
    end = 1
    origins = [plan.origins[index] for index in plan.compressed]
    if all(name not in gains for name, _ in origins):
        return None
    begins: dict[str, tuple[int, int, int]] = {}
    for index, (name, first) in zip(plan.compressed, origins, strict=True):
        if name not in gains:
            # One row and one column, wider than the tensor, would need a factor for each entry: all
            # factors are 1.
            size = plan.sizes[index]
            factors.append(torch.ones(size, dtype=torch.float64))
            places.append((end, 0, 1, 0))
            end += size
            continue
        if name not in begins:
            gain = gains[name]
            begins[name] = end, end + len(gain.rows), len(gain.columns)
            factors += [gain.rows, gain.columns]
            end += len(gain.rows) + len(gain.columns)
        places.append((*begins[name], first))
    joined = torch.cat(factors).to(plan.residual_dtype)
    return Gains(to_device(joined, device), torch.tensor(places, dtype=torch.int64).T.contiguous())


def _joined_dense(plan: BucketPlan, gains: Mapping[str, Gain], mean: Tensor) -> Tensor | None:
    found = []
    for index in plan.dense:
        size = plan.sizes[index]
        name, first = plan.origins[index]
        if name not in gains:
            found.append(torch.ones(size, dtype=mean.dtype))
            continue
        rows, columns = (factors.to(mean.dtype) for factors in gains[name])
        found.append((rows.unsqueeze(1) * columns).flatten()[first : first + size])
    if all(plan.origins[index][0] not in gains for index in plan.dense):
        return None
    return to_device(torch.cat(found), mean.device)


class Plans:
    """The plans of buckets under the current settings; each is made once."""

    def __init__(self, config: DCTConfig, link_traversals: float) -> None:
        self.config = config
        self._link_traversals = link_traversals
        self._known: dict[
            tuple[tuple[str, ...], tuple[int, ...], torch.dtype, float], BucketPlan
        ] = {}

    def change(self, config: DCTConfig) -> None:
        """Use other settings from now on."""
        if config != self.config:
            self.config = config
            self._known = {}

    def of(
        self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, share: float = 1.0
    ) -> BucketPlan:
        """The plan of some tensors at a share of their densities; a density of 1 stays 1."""
        key = tuple(names), tuple(sizes), dtype, share
        if key not in self._known:
            full = [self.config.density_of(name) for name in names]
            densities = [1.0 if density == 1.0 else share * density for density in full]
            settings = self.config.value_format, self.config.min_tensor_size
            self._known[key] = plan_bucket(
                names, sizes, densities, dtype, *settings, self._link_traversals
            )
        return self._known[key]


@dataclass(eq=False)
class Bucket:
    """The tensors of a bucket on this rank, flattened: what is new, and what it is added to or
    compared with.
    """

    inputs: Sequence[Tensor]  # gradients, or this rank's own weights; `[n]` together
    references: Sequence[Tensor]  # residuals, or the shared weights, of fp32 or fp64
    # Factor on gradients: one over the loss scale of mixed-precision training; None for weights.
    scale: float | None
    # Whether all ranks keep in their own weights what an owner does not send of a sum: then it does
    # not enter the owner's residual.
    ranks_keep_unsent: bool = False

    def __post_init__(self) -> None:
        self.starts = [0, *accumulate(map(Tensor.numel, self.references))]
        self._parts: dict[tuple[tuple[int, int], ...], tuple[list[Tensor], list[Tensor]]] = {}

    def place(self, entry: int) -> tuple[int, int]:
        """The number of the tensor that has an entry, and the entry's number there."""
        index = min(bisect_right(self.starts, entry), len(self.references)) - 1
        return index, entry - self.starts[index]

    def parts(self, bounds: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """The views of ``inputs`` (none if there are none) and of ``references`` within bounds,
        each of which lies in one.
        """
        key = bounds if isinstance(bounds, tuple) else tuple(bounds)
        if key not in self._parts:
            found: tuple[list[Tensor], list[Tensor]] = [], []
            for start, stop in bounds:
                index, first = self.place(start)
                for tensors, views in zip((self.inputs, self.references), found, strict=True):
                    if tensors:
                        whole = tensors[index]
                        size = stop - start
                        views.append(
                            whole if size == whole.numel() else whole[first : first + size]
                        )
            self._parts[key] = found
        return self._parts[key]

    def entries(self, bounds: tuple[int, int], indices: Tensor | None) -> Tensor:
        """The values that are compared with a threshold: all within bounds, or those at some
        indices.
        """
        (new,), (base,) = self.parts([bounds])
        if indices is not None:
            indices = to_device(indices, base.device)
            new = new[indices]
            base = base[indices]
        return new - base if self.scale is None else (new.to(base.dtype) * self.scale).add_(base)


class Gain(NamedTuple):
    """The factors on the mean of one parameter, fp64, on the host: an entry's is that of its row
    times its column's.
    """

    rows: Tensor  # shape `[rows]`
    columns: Tensor  # shape `[columns]`


class ExchangeContext(NamedTuple):
    """What the buckets of one synchronisation have in common."""

    tag: int = 0  # marks the payloads; others are refused: see `wire.payload.tag_of`
    scale: float = 1.0  # factor on gradients that undoes the loss scale of mixed-precision training
    # Share of what is not sent that own weights lose, if entries are read from weights in place.
    dropped: float = 0.0
    # The factors on the mean of each parameter, by name, where they are not 1.
    gains: Mapping[str, Gain] = MappingProxyType({})
    # One gain for all compressed tensors takes the place of theirs, if it is not 1: at most
    # `ranks / senders`, and None for `sqrt(ranks / senders)`.
    gain: float | None = 1.0

    @property
    def gains_of_compressed(self) -> Mapping[str, Gain]:
        """The gains of compressed tensors, where there is not one for all."""
        return self.gains if self.gain == 1.0 else NO_CONTEXT.gains

    def without_gains(self) -> ExchangeContext:
        """This context with all gains 1."""
        return self._replace(gains=NO_CONTEXT.gains, gain=1.0)


NO_CONTEXT = ExchangeContext()


class Received(NamedTuple):
    """The payloads of a bucket that a rank has received, and what it needs to add them.

    For a plan with parts a row of the payloads holds one for each part, and each is from another
    sender, counted through all rows. What this rank has sent itself is the number of its row, or a
    payload that is not among the rows, with a plan of the same compressed tensors: then only
    entries that also appear in the sums count.
    """

    payloads: Tensor  # shape `[rows, bytes]`, uint8
    plan: BucketPlan
    # weight of each sender: one over the world size, times the loss scale of mixed-precision
    # training
    factor: float
    own: int | Received | None  # None if this rank has sent nothing, or it does not matter
    label: str | None = None  # names the payloads in error messages; None for the usual name
    context: ExchangeContext = NO_CONTEXT


def real_numel(tensor: Tensor) -> int:
    """Real numbers of a tensor on this rank: a complex entry is two."""
    return local_of(tensor).numel() * (2 if tensor.is_complex() else 1)


def local_of(tensor: Tensor) -> Tensor:
    """A tensor's part on this rank, in the same memory: the shard of a ``DTensor``, else the tensor
    itself.
    """
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's real numbers."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
