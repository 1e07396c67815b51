"""Numbers that a GPU works out and the host wants to know, but not badly enough to wait for them.

Asking a GPU for a number waits until all work before it is done. So what the host asks for during a synchronisation is
copied together when that ends, and looked at once it has arrived: usually while the next synchronisation runs, and at
the latest before anything is saved or shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Wanted(NamedTuple):
    """Whole numbers or flags on a device, shape ``[n]``, and who is told."""

    numbers: Tensor
    tell: Callable[[list[int]], None]


class _Travelling(NamedTuple):
    """Numbers on their way to the host; ``arrived`` is None for those that were there all the time."""

    wanted: list[_Wanted]
    copy: Tensor
    arrived: torch.cuda.Event | None


class Awaited:
    """Keeps what was asked for until it is known."""

    def __init__(self) -> None:
        self._wanted: dict[torch.device, list[_Wanted]] = {}
        self._travelling: list[_Travelling] = []

    def when_known(self, numbers: Tensor, tell: Callable[[list[int]], None]) -> None:
        """Call a function with numbers once the host knows them.

        Args:
            numbers: Shape ``[n]``, whole numbers or bool. Not changed until then.
            tell: Takes them as a list. What it raises comes out of :meth:`poll` or :meth:`synchronize`.
        """
        self._wanted.setdefault(numbers.device, []).append(_Wanted(numbers, tell))

    def poll(self) -> None:
        """Tell what has arrived, and send on its way what was asked for since the last look. Nobody waits."""
        while self._travelling and (self._travelling[0].arrived is None or self._travelling[0].arrived.query()):
            _tell(self._travelling.pop(0))
        for device, wanted in self._wanted.items():
            together = torch.cat([numbers.to(torch.int64) for numbers, _ in wanted])
            # The destination is pinned memory, so the host goes on while this copies.
            copy = together.to("cpu", non_blocking=True)
            arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            self._travelling.append(_Travelling(wanted, copy, arrived))
        self._wanted = {}

    def synchronize(self) -> None:
        """Tell everything, however long it takes to know."""
        self.poll()
        while self._travelling:
            travelling = self._travelling.pop(0)
            if travelling.arrived is not None:
                travelling.arrived.synchronize()
            _tell(travelling)


def _tell(travelling: _Travelling) -> None:
    numbers = travelling.copy.tolist()
    for wanted in travelling.wanted:
        count = wanted.numbers.numel()
        wanted.tell(numbers[:count])
        numbers = numbers[count:]
