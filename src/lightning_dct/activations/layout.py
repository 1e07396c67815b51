"""The layout of one activation tensor's payloads: groups, capacities, and sizes in bytes."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lightning_dct.activations.settings import SplitSettings
from lightning_dct.wire.positions import PositionCode
from lightning_dct.wire.rows import row_scales_num_bytes, row_values_num_bytes

HEADER_BYTES = 12


@dataclass(frozen=True)
class ActivationLayout:
    """What is sent of a tensor of this shape, the same on both ranks.

    Attributes:
        shape: Shape of the activations.
        before: Product of the dimensions before the one that is cut into groups.
        groups: Groups, each with a threshold of its own.
        group_capacity: Most entries of one group that are sent because they reach its threshold.
        explored: Additional entries, chosen at random.
        forward_format: Of the activations.
        backward_format: Of their gradients.
        column_before: Where each group has columns of its own, the product of the dimensions before the one that is
            cut into groups.
        column_groups: The number of these groups; 1 where a column is an index of the last dimension alone.
    """

    shape: tuple[int, ...]
    before: int
    groups: int
    group_capacity: int
    explored: int
    forward_format: str
    backward_format: str
    column_before: int = 1
    column_groups: int = 1

    @cached_property
    def numel(self) -> int:
        """Entries of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def group_size(self) -> int:
        """Entries of one group."""
        return self.numel // max(self.groups, 1)

    @cached_property
    def capacity(self) -> int:
        """Most entries a payload can hold."""
        return min(self.groups * self.group_capacity + self.explored, self.numel)

    @cached_property
    def sends_everything(self) -> bool:
        """Whether all entries are sent, without positions."""
        return self.capacity == self.numel

    @cached_property
    def row_length(self) -> int:
        """Entries of a row, the last dimension."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def by_column(self) -> tuple[int, int, int, int]:
        """The shape that has columns in dimensions 1 (their group) and 3."""
        rows = self.numel // max(self.column_before * self.column_groups * self.row_length, 1)
        return self.column_before, self.column_groups, rows, self.row_length

    @cached_property
    def scales_capacity(self) -> int:
        """Most rows a payload can hold entries of."""
        return min(self.numel // max(self.row_length, 1), self.capacity)

    @cached_property
    def position_code(self) -> PositionCode | None:
        """How positions are written; None when everything is sent."""
        return None if self.sends_everything else PositionCode(self.numel, self.capacity)

    @cached_property
    def forward_positions_bytes(self) -> int:
        """Size of the forward payload's positions, with the header."""
        return HEADER_BYTES + (self.position_code.num_bytes if self.position_code else 0)

    @cached_property
    def forward_values_bytes(self) -> int:
        """Size of the forward payload's values, with their scales."""
        return self.values_bytes(self.forward_format)

    @cached_property
    def backward_bytes(self) -> int:
        """Size of the backward payload: values and scales, no positions."""
        return self.values_bytes(self.backward_format)

    @cached_property
    def wire_floats(self) -> int:
        """Four-byte words that hold the gradient's values, and as much of the activations' values as fits."""
        return -(-self.backward_bytes // 4)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the same tensor sent dense as fp32, one way."""
        return 4 * self.numel

    @cached_property
    def fingerprint(self) -> int:
        """A number that differs between layouts that differ."""
        return zlib.crc32(repr(self).encode())

    def values_bytes(self, value_format: str) -> int:
        """Bytes of values and scales in a format."""
        return row_scales_num_bytes(value_format, self.scales_capacity) + row_values_num_bytes(
            value_format, self.capacity
        )

    def columns_of(self, positions: Tensor) -> Tensor:
        """The column, below ``column_groups * row_length``, of each place in the flattened tensor; int64 ``[n]``."""
        _, groups, rows, length = self.by_column
        return positions // (rows * length) % groups * length + positions % length

    def by_group(self, tensor: Tensor) -> Tensor:
        """Arrange a tensor of this shape as ``[groups, group_size]``; a view where possible."""
        if self.numel == 0:
            return tensor.reshape(self.groups, 0)
        return tensor.reshape(self.before, self.groups, -1).transpose(0, 1).reshape(self.groups, -1)

    def flat(self, grouped: Tensor) -> Tensor:
        """Undo :meth:`by_group`, to shape ``[numel]``."""
        if self.numel == 0:
            return grouped.reshape(0)
        return grouped.reshape(self.groups, self.before, -1).transpose(0, 1).reshape(-1)


@lru_cache(maxsize=64)
def activation_layout(settings: SplitSettings, shape: torch.Size | tuple[int, ...], density: float) -> ActivationLayout:
    """The layout of a tensor's payloads at a density: the settings' own, or that of a stage of warm-up.

    Raises:
        ValueError: The shape cannot be cut into the groups of the settings.
    """
    shape = tuple(shape)
    before, groups = 1, 1
    columns = 1, 1
    if settings.scope == "sample":
        groups = shape[0] if shape else 1
    elif settings.scope == "group":
        cut = _cut(settings, shape)
        if settings.select_by == "magnitude":
            before, groups = cut
        elif settings.group_dim % len(shape) < len(shape) - 1:  # else a column is in one group anyway
            columns = cut
    group_size = math.prod(shape) // max(groups, 1)
    return ActivationLayout(
        shape=shape,
        before=before,
        groups=groups,
        group_capacity=entries_at(density, group_size),
        explored=entries_at(settings.exploration, math.prod(shape)),
        forward_format=settings.forward_format,
        backward_format=settings.backward_format,
        column_before=columns[0],
        column_groups=columns[1],
    )


def entries_at(density: float, size: int) -> int:
    """The entries that a density means, of ``size``: rounded up, except for a rounding error of the product."""
    return min(math.ceil(density * size * (1 - 1e-12)), size)


def _cut(settings: SplitSettings, shape: tuple[int, ...]) -> tuple[int, int]:
    dim = settings.group_dim
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"`group_dim` is {dim} and the activations have {len(shape)} dimensions (shape {list(shape)}). Choose one"
            " of theirs."
        )
    length = shape[dim]
    groups = length if settings.groups is None else settings.groups
    if groups == 0 or length % groups:
        raise ValueError(
            f"`groups` is {groups} and does not divide dimension {dim} of the activations, which has {length}"
            f" entries (shape {list(shape)}). Choose a divisor of {length}, or leave `groups` out for one each."
        )
    return math.prod(shape[: dim % len(shape)]), groups
