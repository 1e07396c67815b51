"""What happens to each tensor of a gradient bucket: how many of its entries go, or that it is sent dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dct.wire import BITS_PER_VALUE, PayloadLayout


@dataclass(frozen=True)
class BucketPlan:
    """A bucket's tensors, or pieces of them, and what becomes of each; a pure function of the settings and the model.

    Attributes:
        names: The parameters' names, in the bucket's order.
        sizes: Entries of each.
        targets: Entries of each that are sent a step; 0 for a tensor sent dense.
        dtype: The gradients' dtype, in which dense tensors are sent.
        value_format: How sent entries are written.
        starts: Where each lies in the flattened bucket, ascending in each payload; None when they lie one behind the
            other. Payloads know nothing of gaps.
        parts: Where this is the plan of several payloads, those of their own, by payload; empty where it is of one.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    targets: tuple[int, ...]
    dtype: torch.dtype
    value_format: str
    starts: tuple[int, ...] | None = None
    parts: tuple[BucketPlan, ...] = ()

    @staticmethod
    def joined(parts: Sequence[BucketPlan]) -> BucketPlan:
        """The plan of what several plans say of one bucket; its payload is theirs, one behind the other."""
        names, sizes, targets = (
            tuple(chain.from_iterable(getattr(part, field) for part in parts))
            for field in ("names", "sizes", "targets")
        )
        starts = tuple(start for part in parts for start, _ in part.bounds)
        return replace(parts[0], names=names, sizes=sizes, targets=targets, starts=starts, parts=tuple(parts))

    @cached_property
    def is_dense(self) -> bool:
        """Whether every tensor is sent dense, so that a plain all-reduce does best."""
        return not any(self.targets)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each tensor lies in the flattened bucket: ``(start, stop)``."""
        starts = self._places_in_payload if self.starts is None else self.starts
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
    def layouts(self) -> tuple[PayloadLayout, ...]:
        """The shape of each payload."""
        return tuple(part.layout for part in self.parts or (self,))

    @cached_property
    def on_devices(self) -> dict[torch.device, Any]:
        """What :mod:`~lightning_dct.gradients.on_device` has copied to devices, kept for as long as the plan is."""
        return {}

    @cached_property
    def layout(self) -> PayloadLayout:
        """The payload's shape, of a plan without parts."""
        dense_bytes = self.dtype.itemsize * sum(self.sizes[index] for index in self.dense)
        return PayloadLayout(self.sizes, self.targets, self.value_format, dense_bytes)

    def to_payload(self, positions: Tensor) -> Tensor:
        """Places in the flattened bucket as places in a payload (int64, any shape)."""
        return positions if self.starts is None else self._moved(positions, self.starts, self._places_in_payload)

    def to_bucket(self, positions: Tensor) -> Tensor:
        """Places in a payload as places in the flattened bucket (int64, any shape)."""
        return positions if self.starts is None else self._moved(positions, self._places_in_payload, self.starts)

    @cached_property
    def _places_in_payload(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes[:-1]))[: len(self.sizes)]

    @staticmethod
    def _moved(positions: Tensor, origins: tuple[int, ...], goals: tuple[int, ...]) -> Tensor:
        origin, goal = torch.tensor([origins, goals], dtype=torch.int64, device=positions.device)
        return positions + (goal - origin)[torch.searchsorted(origin, positions, right=True) - 1]

    @property
    def residual_dtype(self) -> torch.dtype:
        """Residuals are summed over many steps: at least fp32."""
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
    """Decide for each tensor of a bucket.

    A tensor is sent dense when it is smaller than ``min_tensor_size``, when all of its entries are wanted, or when
    exchanging its entries would move more bytes than all-reducing the tensor. The decision looks at one tensor at
    a time, so it does not depend on which bucket DistributedDataParallel happens to put the tensor in.

    Args:
        names: The parameters' names.
        sizes: Entries of each.
        densities: Share of each one's entries to send, in (0, 1].
        dtype: The gradients' dtype.
        value_format: How sent entries are written.
        min_tensor_size: Smaller tensors are sent dense.
        link_traversals: How often each link carries what a rank sends; an all-reduced tensor counts as
            two. An all-gather has the world size; 1 means that there is nobody to send to.
    """
    targets = []
    for size, density in zip(sizes, densities, strict=True):
        target = target_of(density, size)
        if size < min_tensor_size or target >= size or link_traversals == 1:
            targets.append(0)
            continue
        bits_compressed = link_traversals * target * (BITS_PER_VALUE[value_format] + 2 + math.log2(size / target))
        targets.append(target if bits_compressed < 2 * size * dtype.itemsize * 8 else 0)
    return BucketPlan(tuple(names), tuple(sizes), tuple(targets), dtype, value_format)


def real_numel(tensor: Tensor) -> int:
    """Real numbers of a tensor that lie on this rank: a complex entry is two."""
    return local_of(tensor).numel() * (2 if tensor.is_complex() else 1)


def local_of(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank, in the same memory: of a ``DTensor`` its shard, of any other all of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's real numbers."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def target_of(density: float, size: int) -> int:
    """How many entries of a tensor a density sends, at least 1."""
    # Less a hair: 0.07 * 100 is 7.000000000000001 in floating point and should be 7 entries.
    return max(1, math.ceil(density * size * (1 - 1e-12)))
