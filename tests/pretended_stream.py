"""A GPU's stream, pretended: its host queues work and waits for nothing, and its events know when
they come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


class PretendedStream:
    """Seconds of work in the queue; none of it is done before somebody waits for it."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0

    def work(self, seconds: float) -> None:
        self.queued += seconds


@contextmanager
def pretended_stream() -> Iterator[PretendedStream]:
    """Events of CUDA are recorded on this stream, on a machine without a GPU too."""
    stream = PretendedStream()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, on: object) -> None:
            assert on is stream
            self.at = stream.queued

        def query(self) -> bool:
            return stream.done >= self.at

        def synchronize(self) -> None:
            stream.done = max(stream.done, self.at)

        def elapsed_time(self, later: Any) -> float:
            assert later.query()
            return 1e3 * (later.at - self.at)

    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "current_stream", lambda device: stream),
    ):
        yield stream
