"""CUDA graphs of exchanges: what the package launches once for all ranks is recorded, and repeated
without a host.

A graph finds its numbers where it was recorded. So thresholds stay in memory of the graph's own,
the addresses that the package would copy to the GPU are filled in after the recording, and so are
gains, which change now and then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_dct.compress import bucket_plan, on_cpu
from lightning_dct.compress.awaited import Awaited, Callback
from lightning_dct.compress.bucket_plan import BucketPlan, Gain
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.gains import gain_of, gains_of
from lightning_dct.exchange import base
from lightning_dct.kernels.plain import Gains
from lightning_dct.traffic import Traffic

HOST = torch.device("cpu")
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
    """An exchange of all ranks as a graph.

    All ranks have thresholds; the exchange may select others.

    Attributes:
        sent: The bytes of each rank.
    """

    def __init__(
        self,
        exchange: Callable[[], None],
        feedbacks: Sequence[ErrorFeedback],
        traffic: Sequence[Traffic],
        gains: Mapping[str, Gain] | None,
    ) -> None:
        from lightning_dct.compress import on_gpu

        self._on_gpu = on_gpu
        self._feedbacks = feedbacks
        self._graph = torch.cuda.CUDAGraph()
        self._gains = gains
        # Where this graph reads factors, and what gives those of other gains.
        self._factors: list[tuple[Tensor, Callable[[Any], Tensor]]] = []
        # Where this graph reads and writes thresholds.
        self._own: list[dict[tuple[str, ...], Tensor]] = [
            {names: values for names, (_, values) in feedback.thresholds.by_bucket.items()}
            for feedback in feedbacks
        ]
        before = [own.totals.bytes_sent for own in traffic]
        with self._recording():
            exchange()
            for feedback, own in zip(feedbacks, self._own, strict=True):
                for names, values in own.items():
                    values.copy_(feedback.thresholds.on_device(names, values.device))
                    feedback.thresholds.replace(names, values)
        self.sent = [
            own.totals.bytes_sent - then for own, then in zip(traffic, before, strict=True)
        ]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        device = next(iter(self._own[0].values())).device
        room = torch.zeros(ROOM, dtype=torch.uint8, device=device)
        later = list[tuple[Tensor, Tensor]]()
        used = 0

        def to_device(host: Tensor, device: torch.device) -> Tensor:
            nonlocal used
            place = room[used : used + host.nbytes].view(host.dtype).view(host.shape)
            used += -(-host.nbytes // 256) * 256
            later.append((place, host))
            return place

        def on_device(factors_of: Callable[[Any], Tensor], device: torch.device) -> Tensor:
            place = to_device(factors_of(self._gains), device)
            self._factors.append((place, factors_of))
            return place

        def of_compressed(plan: BucketPlan, gains: Any, device: torch.device) -> Gains | None:
            if (found := gains_of(plan, gains, HOST)) is None:
                return None
            return found._replace(
                factors=on_device(lambda now: gains_of(plan, now, HOST).factors, device)
            )  # type: ignore[union-attr]

        def of_dense(plan: BucketPlan, index: int, gains: Any, mean: Tensor) -> Tensor:
            on_host = torch.empty_like(mean, device=HOST)
            return on_device(lambda now: gain_of(plan, index, now, on_host), mean.device)

        patched = mock.patch.multiple(self._on_gpu, to_device=to_device, gains_of=of_compressed)
        samples = mock.patch.object(bucket_plan, "to_device", to_device)
        dense = (
            mock.patch.object(on_cpu, "gain_of", of_dense),
            mock.patch.object(base, "gain_of", of_dense),
        )
        with (
            patched,
            samples,
            dense[0],
            dense[1],
            torch.cuda.graph(self._graph, capture_error_mode="relaxed"),
        ):
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

    def replay(self, gains: Mapping[str, Gain] | None) -> None:
        """Exchange with these gains, of the same parameters as those that the graph was recorded
        with.
        """
        if gains is not self._gains:
            for place, factors_of in self._factors:
                place.copy_(factors_of(gains).pin_memory(), non_blocking=True)
            self._gains = gains
        self._graph.replay()
