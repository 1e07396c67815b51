"""The floating-point buffers of a rank that sends them with its updates: evaluations show the mean of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_dct.sync.buffers import Buffers


class MeanBuffers(Buffers):
    """The buffers of one rank, and the mean of all that were present at the last exchange.

    Attributes:
        means: By name; empty before the first exchange.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(named, ())
        self.means: dict[str, Tensor] = {}

    def average(self) -> None:
        """Take the mean of the last exchange. It is no collective call: ranks that are not present would be missed."""
        for name, buffer in self.named().items():
            if name in self.means:
                buffer.copy_(self.means[name])

    def to_bytes(self) -> Tensor:
        """All buffers, one after the other: shape ``[bytes]``, uint8."""
        parts = [buffer.detach().cpu().reshape(-1).view(torch.uint8) for buffer in self.named().values()]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])

    def take(self, rows: Tensor) -> Tensor:
        """Take the mean of what ranks have sent, shape ``[ranks, bytes]``, and return the bytes behind the buffers."""
        start = 0
        for name, buffer in self.named().items():
            stop = start + buffer.numel() * buffer.element_size()
            each = rows[:, start:stop].clone(memory_format=torch.contiguous_format).view(buffer.dtype)
            start = stop
            mean = each.to(torch.float64).mean(0).to(buffer.dtype).view(buffer.shape)
            self.means[name] = mean
            buffer.copy_(mean)
        return rows[:, start:].clone(memory_format=torch.contiguous_format)
