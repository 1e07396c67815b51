"""CUDA graphs of exchanges: what the package launches once for all ranks is recorded, and repeated
without a host.

A graph finds its numbers where it was recorded. So thresholds stay in memory of the graph's own,
the addresses that the package would copy to the GPU are filled in after the recording, and so are
gains, which change now and then.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from lightning_dct.compress import bucket_plan, codec
from lightning_dct.compress.awaited import Awaited, Callback
from lightning_dct.compress.bucket_plan import (
    BucketPlan,
    ExchangeContext,
    Gain,
    gains_of,
    gains_of_dense,
)
from lightning_dct.exchange import base
from lightning_dct.kernels.plain import Gains
from lightning_dct.sync.optimizer_clock import OptimizerClock
from lightning_dct.sync.updates import UpdateSynchronizer
from replicated.in_memory import Group

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

    All ranks have thresholds; the exchange may select others. They all call :meth:`record`, and
    then each time :meth:`replay`.

    Args:
        synchronizers: Those of all ranks.
        gains: On the means of the exchange that is recorded.

    Attributes:
        sent: The bytes that each rank sends.
    """

    def __init__(
        self, synchronizers: Sequence["RecordedUpdates"], gains: Mapping[str, Gain]
    ) -> None:
        from lightning_dct.compress import on_gpu

        self._on_gpu = on_gpu
        self._synchronizers = synchronizers
        self.sent = [0 for _ in synchronizers]
        self._graph = torch.cuda.CUDAGraph()
        self._stream: torch.cuda.Stream | None = None
        self._gains = self._next_gains = gains
        # Where this graph reads factors, and what gives those of other gains.
        self._factors: list[tuple[Tensor, Callable[[Any], Tensor]]] = []
        # Where this graph reads and writes the thresholds of each rank.
        self._own: list[dict[tuple[str, ...], Tensor]] = [
            {names: values for names, (_, values) in one.thresholds.by_bucket.items()}
            for one in synchronizers
        ]
        self._unread = [Unread() for _ in synchronizers]

    def record(self, rank: int, exchange: Callable[[], None]) -> None:
        """Record the exchange of a rank, which runs nothing; a collective call."""
        one = self._synchronizers[rank]
        thresholds = one.thresholds
        # One thread begins a recording and ends it.
        with self._recording() if rank == 0 else nullcontext():
            one.come_together()
            awaited = one.feedback.awaited
            one.feedback.awaited = self._unread[rank]
            sent_before = one.traffic.totals.bytes_sent
            with torch.cuda.stream(self._stream):
                exchange()
                for names, values in self._own[rank].items():
                    values.copy_(thresholds.on_device(names, values.device))
                    thresholds.replace(names, values)
            self.sent[rank] = one.traffic.totals.bytes_sent - sent_before
            one.feedback.awaited = awaited
            one.come_together()
        one.come_together()

    def replay(self, rank: int, gains: Mapping[str, Gain], takes_over: bool) -> None:
        """Exchange with these gains, of the same parameters as those that the graph was recorded
        with; a collective call.

        With ``takes_over`` it continues with the thresholds of exchanges that were made without
        this graph.
        """
        if rank == 0:  # all ranks have the same gains, each an object of its own
            self._next_gains = gains
        self._synchronizers[rank].come_together(lambda: self._start(takes_over))

    def look(self) -> None:
        """Raise what is wrong with the payloads of the latest exchange."""
        for unread in self._unread:
            unread.look()

    def _start(self, takes_over: bool) -> None:
        if takes_over:
            self._take_over()
        if self._next_gains is not self._gains:
            self._gains = self._next_gains
            for place, factors_of in self._factors:
                place.copy_(factors_of(self._gains).pin_memory(), non_blocking=True)
        self._graph.replay()

    def _take_over(self) -> None:
        for one, own in zip(self._synchronizers, self._own, strict=True):
            for names, values in own.items():
                now = one.thresholds.on_device(names, values.device)
                if now is not values:
                    values.copy_(now)
                    one.thresholds.replace(names, values)

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

        def of_dense(plan: BucketPlan, gains: Any, mean: Tensor) -> Tensor | None:
            on_host = torch.empty_like(mean, device=HOST)
            if gains_of_dense(plan, gains, on_host) is None:
                return None
            return on_device(lambda now: gains_of_dense(plan, now, on_host), mean.device)  # type: ignore[arg-type,return-value]

        patched = mock.patch.multiple(self._on_gpu, to_device=to_device, gains_of=of_compressed)
        samples = mock.patch.object(bucket_plan, "to_device", to_device)
        dense = (
            mock.patch.object(codec, "gains_of_dense", of_dense),
            mock.patch.object(base, "gains_of_dense", of_dense),
        )
        with (
            patched,
            samples,
            dense[0],
            dense[1],
            torch.cuda.graph(self._graph, capture_error_mode="relaxed"),
        ):
            self._stream = torch.cuda.current_stream()
            yield
        for place, host in later:
            place.copy_(host)
        self._kept = room


class Kind(NamedTuple):
    """What exchanges that a graph may stand for have in common.

    Attributes:
        length: Steps since the last exchange.
        dropped: The share that own weights lose.
        selects: Whether thresholds are selected.
        has_gains: Whether there are gains.
        gain: That of all compressed tensors.
    """

    length: int
    dropped: float
    selects: bool
    has_gains: bool
    gain: float | None


class Graphs:
    """The graphs of one training, by kind of exchange; its ranks share them.

    Attributes:
        synchronizers: Those of all ranks.
        by_kind: The graphs.
        latest: That of the latest exchange; None if it was made without one.
    """

    def __init__(self) -> None:
        self.synchronizers: list[RecordedUpdates] = []
        self.by_kind: dict[Kind, ExchangeGraph] = {}
        self.latest: ExchangeGraph | None = None

    def look(self) -> None:
        """Raise what the latest exchange has found wrong."""
        if self.latest is not None:
            self.latest.look()
        else:
            for one in self.synchronizers:
                one.flush()


class RecordedUpdates(UpdateSynchronizer):
    """An engine whose exchanges become graphs, once those of a kind have been made without one.

    Attributes:
        graphs: Those of the training.
        eager: Exchanges of a kind without a graph, in which kernels are compiled.
    """

    graphs: Graphs
    eager: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: Counter[Kind] = Counter()
        self._recorded: set[Kind] = set()

    def come_together(self, action: Callable[[], None] = lambda: None) -> None:
        """Wait for the other ranks; the last one to come calls ``action``."""
        group = self.exchange.everyone.group
        assert isinstance(group, Group)
        group.together("coming together", None, lambda _: action()).wait()

    def exchange_buckets(
        self,
        clock: OptimizerClock,
        buckets: Sequence[Sequence[str]],
        length: int,
        context: ExchangeContext,
        selected_anew: Collection[str],
    ) -> None:
        """Exchange as a graph, once exchanges of this kind have been made without one."""
        gains = context.gains
        kind = Kind(length, context.dropped, bool(selected_anew), bool(gains), context.gain)
        exchange = partial(super().exchange_buckets, clock, buckets, length, context, selected_anew)
        graphs = self.graphs
        rank = self.exchange.everyone.rank
        eager = 1 if kind.selects else self.eager
        # Residuals that are held back lie elsewhere after each exchange, so a graph would not find
        # them.
        if clock.holds_back or self._made[kind] < eager:
            self._made[kind] += 1
            exchange()
            graphs.latest = None
            return
        if kind in self._recorded:
            graph = graphs.by_kind[kind]
            graph.replay(rank, gains, takes_over=graphs.latest is not graph)
            self.traffic.add(bytes_sent=graph.sent[rank])
        else:
            self._recorded.add(kind)
            self.come_together()  # what they have done before is not recorded
            if kind not in graphs.by_kind:
                graphs.by_kind[kind] = ExchangeGraph(graphs.synchronizers, gains)
            graph = graphs.by_kind[kind]
            graph.record(rank, exchange)
            graph.replay(rank, gains, takes_over=False)
        graphs.latest = graph
