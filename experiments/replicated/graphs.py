"""CUDA graphs of exchanges: what the package launches once for all ranks is recorded, and repeated without a host.

A graph finds its numbers where it was recorded. So thresholds stay in memory of the graph's own, the addresses that the
package would copy to the GPU are filled in after the recording, and so are the weights of sums, which change with the
mean's length.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_dct.compress import bucket_plan
from lightning_dct.compress.awaited import Awaited, Callback
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.kernels import weights_by_senders
from lightning_dct.traffic import Traffic

# Bytes for what the package would copy in an exchange of all ranks.
ROOM = 1 << 25


class Unread(Awaited):
    """Keeps the numbers of the latest exchange until someone looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: list[tuple[Tensor, Callback]] = []

    def on_ready(self, numbers: Tensor, callback: Callback) -> None:
        self.latest.append((numbers, callback))

    def look(self) -> None:
        """Raise what is wrong with the payloads of the latest exchange."""
        for numbers, callback in self.latest:
            callback(numbers.tolist())


class ExchangeGraph:
    """An exchange of all ranks as a graph. All ranks have thresholds; the exchange may select others.

    Attributes:
        sent: The bytes of each rank.
    """

    def __init__(
        self,
        exchange: Callable[[], None],
        feedbacks: Sequence[ErrorFeedback],
        traffic: Sequence[Traffic],
        lengthening: float | None,
    ) -> None:
        from lightning_dct.compress import on_gpu

        self._on_gpu, self._feedbacks, self._graph = on_gpu, feedbacks, torch.cuda.CUDAGraph()
        self._weights: dict[tuple[int, float, torch.dtype], Tensor] = {}
        self._lengthening = lengthening
        # Where this graph reads and writes thresholds.
        self._own: list[dict[tuple[str, ...], Tensor]] = [
            {names: values for names, (_, values) in feedback.thresholds.by_bucket.items()} for feedback in feedbacks
        ]
        before = [own.totals.bytes_sent for own in traffic]
        with self._recording():
            exchange()
            for feedback, own in zip(feedbacks, self._own, strict=True):
                for names, values in own.items():
                    values.copy_(feedback.thresholds.on_device(names, values.device))
                    feedback.thresholds.replace(names, values)
        self.sent = [own.totals.bytes_sent - then for own, then in zip(traffic, before, strict=True)]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        device = next(iter(self._own[0].values())).device
        room, later, used = torch.zeros(ROOM, dtype=torch.uint8, device=device), list[tuple[Tensor, Tensor]](), 0

        def to_device(host: Tensor, device: torch.device) -> Tensor:
            nonlocal used
            place = room[used : used + host.nbytes].view(host.dtype)
            used += -(-host.nbytes // 256) * 256
            later.append((place, host))
            return place

        def weights(ranks: int, factor: float, lengthening: float | None, dtype: torch.dtype, device: Any) -> Tensor:
            if (ranks, factor, dtype) not in self._weights:
                numbers = weights_by_senders(ranks, factor, lengthening, dtype)
                self._weights[ranks, factor, dtype] = to_device(numbers, device)
            return self._weights[ranks, factor, dtype]

        patched = mock.patch.multiple(self._on_gpu, to_device=to_device, _weights=weights)
        samples = mock.patch.object(bucket_plan, "to_device", to_device)
        with patched, samples, torch.cuda.graph(self._graph, capture_error_mode="relaxed"):
            yield
        for place, host in later:
            place.copy_(host)
        self._kept = room

    def take_over(self) -> None:
        """Continue with the thresholds of exchanges that were made without this graph."""
        for feedback, own in zip(self._feedbacks, self._own, strict=True):
            for names, values in own.items():
                now = feedback.thresholds.on_device(names, values.device)
                if now is not values:
                    values.copy_(now)
                    feedback.thresholds.replace(names, values)

    def replay(self, lengthening: float | None) -> None:
        """Exchange with a mean of this length."""
        if lengthening != self._lengthening:
            for (ranks, factor, dtype), place in self._weights.items():
                place.copy_(weights_by_senders(ranks, factor, lengthening, dtype), non_blocking=True)
            self._lengthening = lengthening
        self._graph.replay()
