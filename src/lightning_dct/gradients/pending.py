"""A bucket of gradients under way to the other ranks and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_dct.gradients.exchanges import Flow
from lightning_dct.traffic import Traffic


class Pending:
    """A bucket under way.

    Args:
        flow: Its way; its first collective is started here.
        rounds: How many collectives that way has.
        buffer: The bucket's gradients.

    Attributes:
        future: What DistributedDataParallel waits for.
        rounds_left: Collectives that have not been waited for.
        finite: Whether what has come home is; known where that is asked for.
    """

    def __init__(self, flow: Flow, rounds: int, buffer: Tensor) -> None:
        self.rounds_left = rounds
        self.future = future_for(buffer)
        self.finite = True
        self._flow = flow
        self._work: dist.Work = next(flow)

    def advance(self, traffic: Traffic, check_finite: bool) -> None:
        """Wait for the bucket's collective, and start its next one or read what it has brought.

        Args:
            traffic: Where the time is counted.
            check_finite: Find out whether what has come home is finite. This waits for a GPU.
        """
        with traffic.waiting("exchange"):
            self._work.wait()
        with traffic.timed("decompress"):
            self.rounds_left -= 1
            try:
                self._work = next(self._flow)
            except StopIteration as finished:
                mean = finished.value
                if check_finite:
                    self.finite = bool(_entries(mean).isfinite().all())
                self.future.set_result(mean)


def bring_home(pendings: Sequence[Pending], traffic: Traffic, check_finite: bool = False) -> None:
    """Bring buckets home, one round of all of them after the other: one is read while the next one travels.

    Args:
        pendings: In the order in which they were sent, which is the same on every rank.
        traffic: Where the time is counted.
        check_finite: See :meth:`Pending.advance`.
    """
    while under_way := [pending for pending in pendings if pending.rounds_left]:
        for pending in under_way:
            pending.advance(traffic, check_finite)


def future_for(buffer: Tensor) -> Future[Tensor]:
    """A future of a tensor that lies where this one does."""
    return Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])


def _entries(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
