"""Averages a model's floating-point buffers over the ranks, uncompressed, and gives a rank its own back afterwards."""

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
        # A mean in half precision would change a number that all ranks have alike, and may be infinite. So would one in
        # fp32 where dividing by the number of ranks rounds.
        divides = all(link.size & (link.size - 1) == 0 for link in self._average_over)
        least = torch.float32 if divides else torch.float64
        for dtype in dict.fromkeys(torch.promote_types(buffer.dtype, least) for buffer in buffers):
            some = [buffer for buffer in buffers if torch.promote_types(buffer.dtype, least) == dtype]
            together = torch.cat([buffer.reshape(-1).to(dtype) for buffer in some])
            for link in self._average_over:
                all_reduce_mean(together, link).wait()
            for buffer, mean in zip(some, together.split([buffer.numel() for buffer in some]), strict=True):
                buffer.copy_(mean.view(buffer.shape))

    def own(self) -> dict[str, Tensor]:
        """This rank's own, also while an evaluation is shown others."""
        return {**self.named(), **self._own}

    def show(self, average: Callable[[], None]) -> None:
        """Show an evaluation what ``average`` makes of this rank's own, until :meth:`give_back`."""
        self._own = {name: buffer.clone() for name, buffer in self.named().items()}
        average()
        self._shown = {name: buffer.clone() for name, buffer in self.named().items()}

    def give_back(self) -> None:
        """Continue with this rank's own, or with what was written into them meanwhile."""
        for name, buffer in self.named().items():
            if name in self._own and torch.equal(buffer, self._shown[name]):
                buffer.copy_(self._own[name])
        self._own, self._shown = {}, {}


class MeanBuffers(Buffers):
    """The buffers of a rank that sends them with its updates: evaluations show the mean of the last exchange.

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
