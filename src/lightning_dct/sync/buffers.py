"""Averages a model's floating-point buffers over the ranks, uncompressed, and gives a rank its own back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_dct.exchange.collectives import Link, all_reduce_mean


class Buffers:
    """The floating-point buffers of one rank, such as the running statistics of a BatchNorm.

    Args:
        named: Gives the buffers by name.
        average_over: The ranks over which they are averaged, one link after the other.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]], average_over: Sequence[Link]) -> None:
        self.named = named
        self._average_over = average_over
        # During an evaluation: this rank's own, and those it is shown.
        self._own: dict[str, Tensor] = {}
        self._shown: dict[str, Tensor] = {}

    def average(self) -> None:
        """Give every rank the mean; a collective call."""
        buffers = list(self.named().values())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            some = [buffer for buffer in buffers if buffer.dtype == dtype]
            together = torch.cat([buffer.reshape(-1) for buffer in some])
            for link in self._average_over:
                all_reduce_mean(together, link).wait()
            for buffer, mean in zip(some, together.split([buffer.numel() for buffer in some]), strict=True):
                buffer.copy_(mean.view(buffer.shape))

    def own(self) -> dict[str, Tensor]:
        """This rank's own, also while an evaluation is shown others."""
        return {**self.named(), **self._own}

    def keep_own(self) -> None:
        """Keep this rank's own for :meth:`give_back`, before an evaluation is shown others."""
        self._own = self._copies()

    def keep_shown(self) -> None:
        """Keep those that an evaluation is shown, so that :meth:`give_back` knows what has been written meanwhile."""
        self._shown = self._copies()

    def give_back(self) -> None:
        """Continue with this rank's own, or with what was written into them meanwhile."""
        for name, buffer in self.named().items():
            if name in self._own and torch.equal(buffer, self._shown[name]):
                buffer.copy_(self._own[name])
        self._own, self._shown = {}, {}

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.named().items()}
