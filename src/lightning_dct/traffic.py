"""Counts the bytes and the time that communication costs, and writes them as text: no torch, no
Lightning.

Each payload is counted at its collective, as the bytes that this rank sends for it, and beside them
the bytes that the dense fp32 exchange of the same tensors would have sent. An all-reduce and an
all-gather count as rings, an all-to-all as the parts of other ranks.

If nodes of ``L`` ranks exchange gradients by node, ``bytes_sent`` and ``bytes_dense`` are bytes
*between* nodes, and bytes inside a node have a total of their own. A ring over all ranks in the
order of the nodes leaves a node at one of its ``L`` ranks, so ``1 / L`` of a rank's bytes in a ring
count as sent between nodes.

A compression ratio is always ``bytes_dense / bytes_sent``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from time import perf_counter
from typing import Any

FP32_BYTES = 4
ID_BYTES = 8
TAG_BYTES = 8


def all_reduce_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes one rank sends in a ring all-reduce of ``num_bytes`` bytes over ``world_size``
    ranks.
    """
    return -(-2 * (world_size - 1) * num_bytes // world_size)


def all_gather_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes one rank sends in a ring all-gather to which it contributes ``num_bytes`` bytes."""
    return (world_size - 1) * num_bytes


def bytes_between_nodes(num_bytes: int, world_size: int, ranks_per_node: int) -> int:
    """The part of one rank's bytes in a ring that crosses between nodes, on average over the ranks
    of a node.

    With one rank a node, that is all of ``num_bytes``.
    """
    return 0 if 1 < world_size <= ranks_per_node else -(-num_bytes // ranks_per_node)


@dataclass(frozen=True)
class TrafficTotals:
    """Totals of one rank since counting began; the difference of two is the traffic between them.

    Attributes:
        steps: Optimizer steps, of all optimizers together; with gradients, synchronisations.
        bytes_sent: Bytes this rank handed to collectives, headers and padding included.
        bytes_dense: Bytes that the dense fp32 exchange of the same tensors would have sent.
        entries_sent: Tensor entries in the bytes sent. A GPU reports them late: the number is
            complete after :meth:`~lightning_dct.sync.gradients.GradientSynchronizer.flush`, which
            logging and saving call.
        entries: Tensor entries that were due.
        seconds: Time of compression and decompression, without the network. A GPU reports times
            late, too.
        refreshes: How often the thresholds were selected anew.
        bytes_inside_node: Bytes this rank sent inside its node, if these have a total of their own.
        seconds_waiting: Time spent waiting for payloads: for the network, and for slower ranks.
        admitted_rows: Rows of growing tables that this rank has made.
        evicted_rows: Rows of growing tables that this rank has evicted.
        bytes_of_buffers: Of the bytes sent, those of buffers and of their comparison.
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
    admitted_rows: int = 0
    evicted_rows: int = 0
    bytes_of_buffers: int = 0

    def __sub__(self, earlier: TrafficTotals) -> TrafficTotals:
        return TrafficTotals(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self))
        )

    @property
    def compression_ratio(self) -> float:
        """Dense fp32 bytes over bytes sent; NaN when nothing was sent (a single process)."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else math.nan

    @property
    def density(self) -> float:
        """Entries sent over entries due; NaN before the first step."""
        return self.entries_sent / self.entries if self.entries else math.nan


class Clock:
    """Wall time of the host.

    :class:`~lightning_dct.compress.awaited.StreamClock` is that of a GPU.
    """

    mark: Callable[[], Any] = staticmethod(perf_counter)  # marks a moment

    def has_passed(self, mark: Any) -> bool:
        """Whether a marked moment has come; a GPU runs behind its host."""
        return True

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two marks; waits for the second."""
        return float(stop - start)


class _Timing(AbstractContextManager[None]):
    """Times what happens within.

    A step has a dozen of them, and a generator would take twice as long.
    """

    __slots__ = ("_clock", "_span", "_start", "_total", "_traffic")

    def __init__(
        self, traffic: Traffic, total: str, span: AbstractContextManager[Any] | None
    ) -> None:
        self._traffic = traffic
        self._total = total
        self._span = span

    def __enter__(self) -> None:
        self._clock = self._traffic.clock
        self._start = self._clock.mark()
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._span is not None:
            self._span.__exit__(*error)
        self._traffic.note(self._total, self._clock, self._start, self._clock.mark())


class Traffic:
    """The counter itself; ``span`` makes the context, given the name of some work, in which
    profilers show that work.

    Example:
        >>> traffic = Traffic()
        >>> traffic.add(bytes_sent=40, bytes_dense=4000, entries_sent=10, entries=1000)
        >>> traffic.add(steps=1)
        >>> traffic.totals.compression_ratio
        100.0
    """

    def __init__(
        self,
        span: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        clock: Clock | None = None,
    ) -> None:
        self.span = span
        self.clock = clock or Clock()
        # Work whose end may not have come yet: the total it counts in, the clock, and the marks
        # around it.
        self._timed: deque[tuple[str, Clock, Any, Any]] = deque()
        # A dict, because every step adds several times: to replace a frozen dataclass takes ten
        # times as long.
        self._counts: dict[str, Any] = asdict(TrafficTotals())

    def __getstate__(self) -> dict[str, Any]:
        """Without marks of a GPU, which cannot be copied."""
        return {**vars(self), "_timed": deque()}

    @property
    def totals(self) -> TrafficTotals:
        """The current totals."""
        return TrafficTotals(**self._counts)

    def add(self, **amounts: float) -> None:
        """Add to the totals, by the names of :class:`TrafficTotals`."""
        for name, amount in amounts.items():
            self._counts[name] += amount

    def timed(self, work: str | None = None, total: str = "seconds") -> AbstractContextManager[Any]:
        """Add the time within to a total, by default that of compressing; profilers show work that
        has a name.
        """
        return _Timing(self, total, None if work is None else self.span(work))

    def note(self, total: str, clock: Clock, start: Any, stop: Any) -> None:
        """Add the time between two marks of a clock to a total, once both have passed."""
        self._timed.append((total, clock, start, stop))
        self._read_times(wait=False)

    def read_clocks(self) -> TrafficTotals:
        """The current totals, with all times so far; waits for a GPU."""
        self._read_times(wait=True)
        return self.totals

    def _read_times(self, wait: bool) -> None:
        while self._timed:
            total, clock, start, stop = self._timed[0]
            if not (wait or clock.has_passed(stop)):
                return
            self._counts[total] += clock.seconds(start, stop)
            self._timed.popleft()

    def state_dict(self) -> dict[str, int | float]:
        """The totals as plain numbers."""
        return dict(self._counts)

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Continue counting from saved totals."""
        self._counts = asdict(TrafficTotals(**state))  # type: ignore[arg-type]


def format_bytes(num_bytes: float) -> str:
    """A byte count in decimal units, as network rates have.

    Example:
        >>> format_bytes(999), format_bytes(123_456)
        ('999 B', '123.46 kB')
    """
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if round(value, 2) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def rate_text(bits_per_second: float, digits: int = 6) -> str:
    """A rate as people write it, of which so many digits are known.

    Example:
        >>> rate_text(1e9), rate_text(2.54e8, digits=2)
        ('1 Gbit/s', '250 Mbit/s')
    """
    bits_per_second = float(f"{bits_per_second:.{digits}g}")
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g} {prefix}bit/s"
    return f"{bits_per_second:g} bit/s"


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column on the left and all others on the right.

    Example:
        >>> print(plain_table([["what", "bytes"], ["ddp", "1,000"]]))
        what  bytes
        ddp   1,000
    """
    first, *others = zip(*rows, strict=True)
    columns = [[cell.ljust(max(map(len, first))) for cell in first]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    return "\n".join("  ".join(row) for row in zip(*columns, strict=True))
