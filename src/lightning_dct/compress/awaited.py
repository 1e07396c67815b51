"""Numbers that a GPU computes and the host needs later: they are copied in batches, and read once
they have arrived.

Reading a number from a GPU waits until all work before it is done. So the numbers of a
synchronisation are copied together at its end, and the host reads them after they have arrived:
usually during the next synchronisation, and at the latest before anything is saved or logged. The
times of a GPU's work are read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_dct.traffic import Clock

Callback = Callable[[list[int]], None]
# The name of work in the profilers of Lightning and torch: of compress, exchange, apply and
# decompress.
SPAN = "[Strategy]DCTStrategy.{}"
# Devices whose host must not wait for numbers. Tests add the CPU.
WITHOUT_WAITING = {"cuda"}


def must_not_wait(device: torch.device) -> bool:
    """Whether the host must not wait for numbers of a device."""
    return device.type in WITHOUT_WAITING


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for what the device does."""
    return (
        numbers.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else numbers.to(device, non_blocking=True)
    )


class _Copy(NamedTuple):
    """A copy on the host of the numbers of several requests; ``arrived`` is None on devices without
    events.
    """

    numbers: Tensor
    callbacks: list[tuple[int, Callback]]  # and how many numbers each takes
    arrived: torch.cuda.Event | None


class Awaited:
    """Keeps callbacks until their numbers are known. A copy of it begins without any."""

    def __init__(self) -> None:
        self._requests: dict[torch.device, list[tuple[Tensor, Callback]]] = {}
        self._copies: list[_Copy] = []

    def __reduce__(self) -> tuple[type[Awaited], tuple[()]]:
        return Awaited, ()

    def on_ready(self, numbers: Tensor, callback: Callback) -> None:
        """Call a function with a list of numbers (``[n]``, integers or bool) once the host knows
        them.

        They must not change until then. The function's exceptions come out of :meth:`poll` or
        :meth:`synchronize`.
        """
        self._requests.setdefault(numbers.device, []).append((numbers, callback))

    def poll(self) -> None:
        """Deliver what has arrived, and start copying what was requested since the last poll; never
        wait.
        """
        while self._copies and (self._copies[0].arrived is None or self._copies[0].arrived.query()):
            self._deliver()
        for device, requests in self._requests.items():
            together = torch.cat([numbers.to(torch.int64) for numbers, _ in requests])
            # The destination is pinned memory, so the host does not wait for the copy.
            copy = together.to("cpu", non_blocking=True)
            arrived = (
                torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            )
            self._copies.append(
                _Copy(copy, [(numbers.numel(), call) for numbers, call in requests], arrived)
            )
        self._requests = {}

    def synchronize(self) -> None:
        """Wait for all numbers, and deliver them."""
        self.poll()
        while self._copies:
            if self._copies[0].arrived is not None:
                self._copies[0].arrived.synchronize()
            self._deliver()

    def _deliver(self) -> None:
        copy = self._copies.pop(0)
        parts = copy.numbers.split([size for size, _ in copy.callbacks])
        for (_, callback), part in zip(copy.callbacks, parts, strict=True):
            callback(part.tolist())


def read_together(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers by name (shape ``[]``, one dtype), read from each device at once; each read waits for
    a GPU.
    """
    found = dict.fromkeys(numbers, 0.0)
    for device in {number.device for number in numbers.values()}:
        names = [name for name, number in numbers.items() if number.device == device]
        found |= zip(names, torch.stack([numbers[name] for name in names]).tolist(), strict=True)
    return found


class StreamClock(Clock):
    """Time of a GPU's current stream.

    The host starts work and waiting on it, and goes on at once: its own time says nothing about
    either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """The moment when the stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has got there."""
        return mark.query()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """The time between two marks; waits for the second."""
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def recorded(work: str) -> AbstractContextManager[Any]:
    """A span of ``torch.profiler``; none while nothing profiles, when it would take 6
    microseconds.
    """
    # torch tells its own optimizers by this flag.
    profiles = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(SPAN.format(work)) if profiles else nullcontext()


def clock_of(device: torch.device) -> Clock:
    """The clock by which work on a device is timed."""
    return StreamClock(device) if device.type == "cuda" else Clock()
