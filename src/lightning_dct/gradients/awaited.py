"""Numbers that a GPU computes and the host needs later: they are copied in batches, and read once they have arrived.

To ask a GPU for a number waits until all work before it is done. So the numbers of a synchronisation are copied
together when that ends. The host reads them when they have arrived: usually while the next synchronisation runs, and at
the latest before anything is saved or shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Request(NamedTuple):
    """Whole numbers or flags on a device, shape ``[n]``, and the callback that takes them."""

    numbers: Tensor
    callback: Callable[[list[int]], None]


class _Copy(NamedTuple):
    """Numbers on their way to the host; ``arrived`` is None on devices without events."""

    requests: list[_Request]
    numbers: Tensor
    arrived: torch.cuda.Event | None


class Awaited:
    """Keeps requests until their numbers are known."""

    def __init__(self) -> None:
        self._requests: dict[torch.device, list[_Request]] = {}
        self._copies: list[_Copy] = []

    def when_known(self, numbers: Tensor, callback: Callable[[list[int]], None]) -> None:
        """Call a function with numbers once the host knows them.

        Args:
            numbers: Shape ``[n]``, whole numbers or bool. Not changed until then.
            callback: Takes them as a list. What it raises comes out of :meth:`poll` or :meth:`synchronize`.
        """
        self._requests.setdefault(numbers.device, []).append(_Request(numbers, callback))

    def poll(self) -> None:
        """Deliver what has arrived, and start copying what was requested since the last poll. Nobody waits."""
        while self._copies and (self._copies[0].arrived is None or self._copies[0].arrived.query()):
            _deliver(self._copies.pop(0))
        for device, requests in self._requests.items():
            together = torch.cat([numbers.to(torch.int64) for numbers, _ in requests])
            # The destination is pinned memory, so the host goes on while this copies.
            copy = together.to("cpu", non_blocking=True)
            arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            self._copies.append(_Copy(requests, copy, arrived))
        self._requests = {}

    def synchronize(self) -> None:
        """Deliver everything, however long it takes."""
        self.poll()
        while self._copies:
            copy = self._copies.pop(0)
            if copy.arrived is not None:
                copy.arrived.synchronize()
            _deliver(copy)


def _deliver(copy: _Copy) -> None:
    parts = copy.numbers.split([request.numbers.numel() for request in copy.requests])
    for request, part in zip(copy.requests, parts, strict=True):
        request.callback(part.tolist())
