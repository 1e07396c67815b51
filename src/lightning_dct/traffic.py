"""Counts the bytes and the time that communication costs: plain numbers, no torch, no Lightning.

Every payload is counted at the one place where it is handed to a collective, as the bytes that this rank puts
on the wire for it. Beside it stands what the dense fp32 exchange of the same tensors would have put there:

====================  ================================================================
collective            bytes one rank sends (``W`` ranks, ``B`` bytes a rank)
====================  ================================================================
all-reduce (ring)     ``2 * (W - 1) / W * B``
all-gather (ring)     ``(W - 1) * B``
all-to-all            what is meant for the others
====================  ================================================================

Where gradients are exchanged by node, ``L`` ranks in each, ``bytes_sent`` and ``bytes_dense`` are bytes *between*
nodes, and those inside have a number of their own. A ring over all ranks in the order of the nodes leaves a node at one
of its ``L`` ranks: a ring's bytes count ``1 / L`` of them a rank as sent between nodes.

A compression ratio is always ``bytes_dense / bytes_sent``. Element counts are never called a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

FP32_BYTES = 4
ID_BYTES = 8


def all_reduce_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes one rank sends in a ring all-reduce of ``num_bytes`` bytes over ``world_size`` ranks."""
    return -(-2 * (world_size - 1) * num_bytes // world_size)


def all_gather_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes one rank sends in a ring all-gather to which it contributes ``num_bytes`` bytes."""
    return (world_size - 1) * num_bytes


def bytes_between_nodes(num_bytes: int, world_size: int, ranks_per_node: int) -> int:
    """What of one rank's bytes in a ring crosses from node to node, on average over the ranks of a node.

    Args:
        num_bytes: Bytes each rank sends.
        world_size: Ranks in the ring, in the order of the nodes.
        ranks_per_node: How many of them share a node; 1 where nodes are not told apart.
    """
    return 0 if 1 < world_size <= ranks_per_node else -(-num_bytes // ranks_per_node)


@dataclass(frozen=True)
class TrafficTotals:
    """Totals of one rank since counting began; subtract two of them to get what lies between.

    Attributes:
        steps: Completed gradient synchronisations.
        bytes_sent: Bytes this rank put on the wire, headers and padding of the payloads included; between nodes only
            where gradients are exchanged by node.
        bytes_dense: Bytes the dense fp32 exchange of the same tensors would have put there.
        entries_sent: Tensor entries that went out in those bytes. A GPU tells late how many these are: complete after
            :meth:`~lightning_dct.gradients.GradientSynchronizer.flush`, which logging and saving call.
        entries: Tensor entries that were due.
        seconds: Wall time spent compressing and decompressing, the network's time not included. With a GPU, what its
            host spends on that.
        refreshes: Times the thresholds were selected anew.
        bytes_inside_node: Bytes this rank sent to ranks of its own node, where these are told apart.
        seconds_waiting: Wall time spent waiting for payloads: for the network, and for ranks that come later.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    entries_sent: int = 0
    entries: int = 0
    seconds: float = 0.0
    refreshes: int = 0
    bytes_inside_node: int = 0
    seconds_waiting: float = 0.0

    def __sub__(self, earlier: TrafficTotals) -> TrafficTotals:
        return TrafficTotals(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    @property
    def compression_ratio(self) -> float:
        """Dense fp32 bytes over bytes sent; NaN when nothing was sent (a single process)."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else math.nan

    @property
    def density(self) -> float:
        """Entries sent over entries due; NaN before the first step."""
        return self.entries_sent / self.entries if self.entries else math.nan

    @property
    def overhead_ms(self) -> float:
        """Milliseconds spent compressing, a step; NaN before the first step."""
        return 1e3 * self.seconds / self.steps if self.steps else math.nan


class Traffic:
    """The counter itself.

    Args:
        span: Shows a piece of work, by name, to whoever profiles the run: what this gives is entered around the work.

    Example:
        >>> traffic = Traffic()
        >>> traffic.add(bytes_sent=40, bytes_dense=4000, entries_sent=10, entries=1000)
        >>> traffic.add(steps=1)
        >>> traffic.totals.compression_ratio
        100.0
    """

    def __init__(self, span: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        self.span = span
        self._totals = TrafficTotals()

    def add(
        self,
        *,
        steps: int = 0,
        bytes_sent: int = 0,
        bytes_dense: int = 0,
        entries_sent: int = 0,
        entries: int = 0,
        seconds: float = 0.0,
        refreshes: int = 0,
        bytes_inside_node: int = 0,
        seconds_waiting: float = 0.0,
    ) -> None:
        """Add to the totals; see :class:`TrafficTotals` for what each number means."""
        old = self._totals
        self._totals = TrafficTotals(
            old.steps + steps,
            old.bytes_sent + bytes_sent,
            old.bytes_dense + bytes_dense,
            old.entries_sent + entries_sent,
            old.entries + entries,
            old.seconds + seconds,
            old.refreshes + refreshes,
            old.bytes_inside_node + bytes_inside_node,
            old.seconds_waiting + seconds_waiting,
        )

    @contextmanager
    def timed(self, work: str | None = None) -> Iterator[None]:
        """Count the time within as spent compressing, and show it to profilers where it has a name."""
        start = perf_counter()
        try:
            with nullcontext() if work is None else self.span(work):
                yield
        finally:
            self.add(seconds=perf_counter() - start)

    @contextmanager
    def waiting(self, work: str) -> Iterator[None]:
        """Count the time within as spent waiting for others, and show it to profilers."""
        start = perf_counter()
        try:
            with self.span(work):
                yield
        finally:
            self.add(seconds_waiting=perf_counter() - start)

    @property
    def totals(self) -> TrafficTotals:
        """The totals so far."""
        return self._totals

    def state_dict(self) -> dict[str, int | float]:
        """The totals as plain numbers."""
        return {f.name: getattr(self._totals, f.name) for f in fields(TrafficTotals)}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Continue counting from saved totals."""
        self._totals = TrafficTotals(**state)  # type: ignore[arg-type]
