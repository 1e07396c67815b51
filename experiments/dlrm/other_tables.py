"""What others send of pooled embeddings and their gradients, emulated to compare changes of rows
with.

Rows cross as they are, and the rank that uses them masks or rounds what it has pooled. The model is
the same as if that had crossed, but a threshold or a scale sees the batch of one rank. The counter
has the bytes that would cross of all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct import ShardedEmbeddingBags, SplitPoint
from lightning_dct.activations.module import CompressedModule
from lightning_dct.traffic import FP32_BYTES, ID_BYTES, Traffic

GROUP = 32
"""Entries with one scale, as FBGEMM has for int8 and MX4."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of E2M1 (OCP, *Microscaling Formats (MX) Specification*, version 1.0, table 5)."""


class WholeRows(nn.Module):
    """Sharded tables whose rows cross whole; :meth:`crossed` does with pooled embeddings what a
    subclass emulates.
    """

    def __init__(
        self, table_rows: Sequence[int], embedding_dim: int, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self.rows = ShardedEmbeddingBags(
            table_rows, embedding_dim, density=1.0, value_format="fp32", **settings
        )
        self._not_reported = Traffic()

    def request(self, ids: Tensor) -> WholeRows:
        """Start the exchange of rows for ids ``[batch, tables]``."""
        self.rows.traffic = self._not_reported  # the strategy gives it the counter of the emulation
        self._lookup = self.rows.request(ids)
        return self

    def pooled(self) -> Tensor:
        """Wait for the rows; pool them: ``[batch, tables, dim]``."""
        return self.crossed(self._lookup.pooled())

    def crossed(self, pooled: Tensor) -> Tensor:
        raise NotImplementedError


class ThresholdedTables(WholeRows):
    """The paper's exchange (Gupta et al., KDD 2021, section 3.2).

    Only the largest entries of a batch's pooled embeddings cross, and the others are zero for the
    model; gradients come back under the same mask. Ids are not counted.

    ``density`` is the share of a table's pooled entries that crosses, and ``value_format`` that of
    pooled embeddings and of their gradients. Other settings are those of
    :class:`lightning_dct.ShardedEmbeddingBags`.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        embedding_dim: int,
        density: float,
        value_format: Any = "bf16",
        refresh_every: int = 1000,
        **settings: Any,
    ) -> None:
        super().__init__(table_rows, embedding_dim, settings)
        formats = {"forward_format": value_format, "backward_format": value_format}
        self.masks = nn.ModuleList(
            SplitPoint(density, refresh_every=refresh_every, **formats, seed=table)
            for table in range(len(table_rows))
        )

    def crossed(self, pooled: Tensor) -> Tensor:
        parts = pooled.unbind(1)
        return torch.stack(
            [mask(part) for mask, part in zip(self.masks, parts, strict=True)], dim=1
        )


class QuantisedTables(WholeRows):
    """All pooled embeddings and gradients in few bits, without a residual, as the codecs of
    TorchRec send them.

    ``value_format`` is ``"fp16"``, ``"int8"`` (32 entries share a scale and an offset in fp32) or
    ``"mx4"`` (32 share a power of two). Ids are counted. Other settings are those of
    :class:`lightning_dct.ShardedEmbeddingBags`; ``density`` and ``refresh_every`` have no meaning
    here.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        embedding_dim: int,
        value_format: str,
        density: float | None = None,
        refresh_every: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(table_rows, embedding_dim, settings)
        self.codec = Quantised(value_format)

    def crossed(self, pooled: Tensor) -> Tensor:
        return self.codec(pooled)


class Quantised(CompressedModule):
    """Rounds a tensor to a format of ``FORMATS`` in forward, and its gradient in backward."""

    def __init__(self, value_format: str) -> None:
        super().__init__(refresh_every=1)
        if value_format not in FORMATS:
            raise ValueError(
                f"model.exchange.value_format={value_format!r}: choose one of {', '.join(FORMATS)}"
            )
        self.rounded, self.group_bytes = FORMATS[value_format]

    def forward(self, pooled: Tensor) -> Tensor:
        """Pooled embeddings ``[batch, tables, dim]``, rounded."""
        if self.training:
            ids = ID_BYTES * pooled[..., 0].numel()
            groups = -(-pooled.numel() // GROUP)
            entries = pooled.numel()
            sent = ids + 2 * groups * self.group_bytes
            dense = ids + 2 * FP32_BYTES * entries
            self.traffic.add(
                bytes_sent=sent, bytes_dense=dense, entries_sent=2 * entries, entries=2 * entries
            )
        return _RoundBoth.apply(pooled, self.rounded)


class _RoundBoth(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, pooled: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        context.rounded = rounded
        return _in_groups(pooled, rounded)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _in_groups(gradient, context.rounded), None


def _in_groups(values: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Round groups of consecutive entries; the last one is filled up with its last entry."""
    flat = values.reshape(-1)
    missing = -flat.numel() % GROUP
    groups = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, GROUP)
    return rounded(groups).view(-1)[: flat.numel()].view_as(values)


def round_to_fp16(groups: Tensor) -> Tensor:
    """To the nearest fp16, clamped to its range."""
    largest = torch.finfo(torch.float16).max
    return groups.clamp(-largest, largest).half().float()


def round_to_int8(groups: Tensor) -> Tensor:
    """To 256 levels between each row's smallest and largest entry."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    step = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).tiny)
    return low + ((groups - low) / step).round() * step


def round_to_mx4(groups: Tensor) -> Tensor:
    """To E2M1 times a power of two for each row; the largest entry lies in (2, 4] times that
    power.
    """
    largest = groups.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(largest.log2().ceil() - 2)
    levels = FP4.to(groups.device)
    nearest = torch.bucketize((groups / scale).abs(), (levels[1:] + levels[:-1]) / 2, right=True)
    return levels[nearest].copysign(groups) * scale


FORMATS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "fp16": (round_to_fp16, 2 * GROUP),
    "int8": (round_to_int8, GROUP + 2 * FP32_BYTES),
    "mx4": (round_to_mx4, GROUP // 2 + 1),
}
"""How each format rounds groups ``[n, 32]``, and the bytes of a group."""
