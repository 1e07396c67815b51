"""Ranks that share one process: their process groups in memory, and whose turn it is.

``torch.distributed``'s functions take such a group like any other. A rank runs until it waits for a
collective that others have not come to; then it is the next one's turn. So one rank runs at a time,
in an order that is always the same. The last rank to come moves the data of all.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.exchange.collectives import Link

Move = Callable[[list[Any]], None]


class Abandoned(RuntimeError):
    """Another rank has failed, so a collective will not come to its end."""


@dataclass
class Meeting:
    """A collective that some ranks have come to.

    Attributes:
        kind: Its name, the same for all ranks.
        brought: What each rank has brought, by rank.
        is_over: Whether all have come, and data have been moved.
    """

    kind: str
    brought: dict[int, Any] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True)
class Work:
    """A collective that a rank has started."""

    ranks: "Ranks"
    meeting: Meeting

    def wait(self) -> bool:
        """Let the other ranks run until all have come."""
        self.ranks.wait_for(self.meeting)
        return True


class Group(dist.ProcessGroup):
    """The process group of one of several ranks; its methods are those that ``torch.distributed``
    calls.
    """

    def __init__(self, rank: int, ranks: "Ranks") -> None:
        super().__init__(rank, ranks.count)
        self._rank = rank
        self._ranks = ranks
        self._calls = 0

    def together(self, kind: str, mine: Any, move: Move) -> Work:
        """Come to a collective; the last rank to come calls ``move`` with what all have brought."""
        work = Work(self._ranks, self._ranks.meet(self._rank, self._calls, kind, mine, move))
        self._calls += 1
        return work

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        """Sum, or take the largest, in place."""
        (mine,) = tensors
        takes_largest = options.reduceOp == dist.ReduceOp.MAX

        def move(all_ranks: list[Tensor]) -> None:
            stacked = torch.stack(all_ranks)
            reduced = stacked.amax(0) if takes_largest else stacked.sum(0)
            for own in all_ranks:
                own.copy_(reduced)

        kind = "all-reduce of the largest" if takes_largest else "all-reduce of sums"
        return self.together(kind, mine, move)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any) -> Work:
        """Give all ranks what each has, a tensor of each."""

        def move(all_ranks: list[tuple[list[Tensor], Tensor]]) -> None:
            for into, _ in all_ranks:
                for output, (_, theirs) in zip(into, all_ranks, strict=True):
                    output.copy_(theirs)

        return self.together("all-gather", (outputs[0], inputs[0]), move)

    def all_gather_single(self, output: Tensor, mine: Tensor, _: Any) -> Work:
        """Give all ranks what each has, one after the other."""

        def move(all_ranks: list[tuple[Tensor, Tensor]]) -> None:
            brought = [theirs for _, theirs in all_ranks]
            for into, _ in all_ranks:
                torch.cat(brought, out=into)

        return self.together("all-gather", (output, mine), move)

    def all_to_all_single(
        self,
        output: Tensor,
        mine: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        _: Any,
    ) -> Work:
        """Give each rank its own part of what each has."""

        def move(all_ranks: list[tuple[Tensor, Sequence[Tensor]]]) -> None:
            for rank, (into, _) in enumerate(all_ranks):
                torch.cat([parts[rank] for _, parts in all_ranks], out=into)

        return self.together("all-to-all", (output, mine.split(input_sizes)), move)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """Give all ranks what one has."""
        source = options.rootRank

        def move(all_ranks: list[Tensor]) -> None:
            for own in all_ranks:
                own.copy_(all_ranks[source])

        return self.together(f"broadcast from {source}", tensors[0], move)

    # So older versions of torch name two of them.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single


class MemoryLink(Link):
    """A link over such a group, which carries a GPU's payloads as they are."""

    @property
    def host_memory(self) -> None:  # type: ignore[override]
        """None is needed."""


class Ranks:
    """Some ranks of one process.

    Attributes:
        count: How many they are.
        groups: The process group of each.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.groups = [Group(rank, self) for rank in range(count)]
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, initializer=lambda: torch.set_num_threads(threads))
        self._stream: torch.cuda.Stream | None = None
        # Meetings to which not all ranks have come, by number.
        self._meetings: dict[int, Meeting] = {}
        self._function: Callable[[int], object] = lambda _: None
        self._unstarted: list[int] = []
        # Ranks that wait, in the order in which they have come: for what, and what wakes them.
        self._waiting: list[tuple[Meeting, threading.Lock]] = []
        self._running = 0
        self._all_done = threading.Lock()
        self._problems: list[BaseException] = []

    def run(self, function: Callable[[int], object]) -> None:
        """Call a function with the number of each rank, on the caller's stream.

        Raises:
            Exception: What a rank has raised. The others do not wait for it.
        """
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._function = function
        self._unstarted = list(range(self.count))
        self._running = self.count
        self._all_done = threading.Lock()
        self._all_done.acquire()
        try:
            self._take_turn()
            self._all_done.acquire()
        except BaseException as interruption:  # of the main thread
            self._problems.append(interruption)
        self._function = lambda _: None
        if self._problems:
            raise self._problems[0]

    def meet(self, rank: int, number: int, kind: str, mine: Any, move: Move) -> Meeting:
        """Come to a collective of a rank, by its number."""
        meeting = self._meetings.setdefault(number, Meeting(kind))
        if meeting.kind != kind:
            raise RuntimeError(f"rank {rank} calls {kind}, and another one {meeting.kind}")
        meeting.brought[rank] = mine
        if len(meeting.brought) == self.count:
            del self._meetings[number]
            move([meeting.brought[one] for one in range(self.count)])
            meeting.brought.clear()
            meeting.is_over = True
        return meeting

    def wait_for(self, meeting: Meeting) -> None:
        """Let other ranks run until all have come to a collective."""
        if not meeting.is_over and not self._problems:
            woken = threading.Lock()
            woken.acquire()
            self._waiting.append((meeting, woken))
            self._pass_on()
            woken.acquire()
        if not meeting.is_over:
            raise Abandoned("another rank has failed")

    def _take_turn(self) -> None:
        """Run ranks that have not begun, one after the other, and then let one go on that waits."""
        while self._unstarted:
            rank = self._unstarted.pop(0)
            try:
                if not self._problems:
                    self._function(rank)
            except Exception as problem:
                self._problems.append(problem)
            self._running -= 1
        if self._running:
            self._pass_on()
        else:
            self._all_done.release()

    def _pass_on(self) -> None:
        """Give up the turn: to a rank whose collective is over, or to one that has not begun.

        The last one to come goes first. So the caller's thread, which has come first, most often
        ends last, and nothing has to wake it.
        """
        ready = [one for one in self._waiting if one[0].is_over]
        if not ready and self._unstarted:
            self._pool.submit(self._take_turn_in_pool)
            return
        if not ready and not self._problems:
            kinds = ", ".join(meeting.kind for meeting, _ in self._waiting)
            self._problems.append(
                RuntimeError(f"ranks wait for collectives that the others do not call: {kinds}")
            )
        next_one = (ready or self._waiting)[-1]
        self._waiting.remove(next_one)
        next_one[1].release()

    def _take_turn_in_pool(self) -> None:
        with torch.cuda.stream(self._stream):
            self._take_turn()
