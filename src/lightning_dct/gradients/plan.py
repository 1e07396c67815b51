"""What happens to each tensor of a bucket: how many of its entries are sent, or that it is sent dense."""

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

from lightning_dct.config import DCTConfig
from lightning_dct.wire import BITS_PER_VALUE, PayloadLayout


@dataclass(frozen=True)
class BucketPlan:
    """A bucket's tensors, or pieces of them, and how each is sent; a pure function of the settings and the model.

    Attributes:
        names: The parameters' names, in the bucket's order.
        sizes: Entries of each.
        targets: Entries of each that are sent in an exchange; 0 for a tensor sent dense.
        dtype: The gradients' dtype, in which dense tensors are sent.
        value_format: How sent entries are written.
        starts: Where each lies in the flattened bucket, ascending in each payload; None where they lie without gaps.
            Payloads know nothing of gaps.
        parts: The plans of several payloads that this one joins; empty for a plan of one payload.
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
        """The plan of several plans of one bucket; its payload is theirs, one after the other."""
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
        starts = self._starts_in_payload if self.starts is None else self.starts
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
        """What :mod:`~lightning_dct.gradients.on_device` has copied to devices for this plan."""
        return {}

    @cached_property
    def layout(self) -> PayloadLayout:
        """The payload's shape, for a plan without parts."""
        dense_bytes = self.dtype.itemsize * sum(self.sizes[index] for index in self.dense)
        return PayloadLayout(self.sizes, self.targets, self.value_format, dense_bytes)

    def to_payload(self, positions: Tensor) -> Tensor:
        """Indices into the flattened bucket (int64, any shape) as indices into a payload."""
        return positions if self.starts is None else self._moved(positions, self.starts, self._starts_in_payload)

    def to_bucket(self, positions: Tensor) -> Tensor:
        """Indices into a payload (int64, any shape) as indices into the flattened bucket."""
        return positions if self.starts is None else self._moved(positions, self._starts_in_payload, self.starts)

    @cached_property
    def _starts_in_payload(self) -> tuple[int, ...]:
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
    """Decide for each tensor of a bucket how it is sent.

    A tensor is sent dense when it is smaller than ``min_tensor_size``, when all of its entries are wanted, or when an
    exchange of its entries would move more bytes than an all-reduce. Each decision looks at one tensor, so it does not
    depend on the bucket that DistributedDataParallel puts the tensor in.

    Args:
        names: The parameters' names.
        sizes: Entries of each.
        densities: Share of each one's entries to send, in (0, 1].
        dtype: The gradients' dtype.
        value_format: How sent entries are written.
        min_tensor_size: Smaller tensors are sent dense.
        link_traversals: How often each link carries what a rank sends. An all-reduced tensor counts as two, an
            all-gather as the world size. 1 means that there is nobody to send to.
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


class Plans:
    """Plans of buckets by the present settings; each is made once, until the settings change."""

    def __init__(self, config: DCTConfig, link_traversals: float) -> None:
        self.config = config
        self._link_traversals = link_traversals
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...], torch.dtype, float], BucketPlan] = {}

    def change(self, config: DCTConfig) -> None:
        """Plan by other settings from now on."""
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


def real_numel(tensor: Tensor) -> int:
    """Real numbers of a tensor that lie on this rank: a complex entry is two."""
    return local_of(tensor).numel() * (2 if tensor.is_complex() else 1)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, in the same memory: the shard of a ``DTensor``, else all."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's real numbers."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def target_of(density: float, size: int) -> int:
    """How many entries of a tensor a density sends, at least 1."""
    # 0.07 * 100 is 7.000000000000001 in floating point and should be 7 entries.
    return max(1, math.ceil(density * size * (1 - 1e-12)))
