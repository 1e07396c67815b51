r"""One rank's connection to the hub: reports how this rank ends, and ends it when another has died
or failed.

    rank 0              rank 1              rank 2
    lifeline            lifeline            lifeline        a TCP connection each, silent while all is well
        \                  |                  /
         +------ hub, in the process of rank 0

``docs/failures.md`` says what gloo alone does not notice. A lifeline also carries signals, on
which all ranks act together (:mod:`lightning_dct.failures.collective_order`).
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from lightning_dct.agreement import gather_objects
from lightning_dct.failures.collective_order import CollectiveOrder
from lightning_dct.failures.hub import Hub
from lightning_dct.failures.messages import Batch, FromHub, FromRank, Hello
from lightning_dct.failures.sockets import address_towards, join_hub, receive, write_line
from lightning_dct.failures.waiting import waiting

CONNECT_S = 10.0  # for a rank to be let in by the hub
ANSWER_S = 5.0  # for a failing rank to wait for the hub's answer
GRACE_S = 10.0  # for a lost rank to end by itself


class Lifeline:
    """This rank's connection; made by :meth:`open`."""

    def __init__(
        self, rank: int, connection: socket.socket, hub_name: str, hub: Hub | None = None
    ) -> None:
        self.failure = ""
        self._rank = rank
        self._connection = connection
        self._hub_name = hub_name
        self._hub = hub
        # A signal handler may interrupt its own thread while that sends.
        self._sending = threading.RLock()
        self._order = CollectiveOrder(rank, self._send)
        self._ends_with = ""
        self._over = threading.Event()  # this rank has left, or has failed by itself
        self._decided = threading.Event()
        self._hub_may_end = False
        self._thread = threading.Thread(
            target=self._listen, name="lightning_dct lifeline", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(cls, wanted: bool | int = True) -> Lifeline | None:
        """Connect all ranks of the default process group, or none of them: a collective call.

        ``wanted`` is False for no lifeline; a number is the port on which rank 0 listens. The
        result is None for a single process or if no rank wants one, and, with a warning on every
        rank, if some rank cannot connect or does not want to.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        rank = dist.get_rank()
        hub, mine = _start_hub(wanted) if rank == 0 and wanted else (None, wanted)
        with waiting(rank, _who_is_missing()):
            answers = gather_objects(mine)
        lifeline = cls(0, hub.own, _name_of(0), hub) if hub else None
        problems = [
            f"rank {other} has `lifelines=False`"
            for other, answer in enumerate(answers)
            if not answer
        ]
        if isinstance(answers[0], str):
            problems.append(answers[0])
        if not problems:
            problem = ""
            if rank > 0:
                addresses, port, token, hub_name = answers[0]
                hello: Hello = {"token": token, "rank": rank, "who": _name_of(rank)}
                try:
                    # The thread starts after the welcome, so an error before it is not reported as
                    # a death.
                    lifeline = cls(rank, join_hub(addresses, port, hello, CONNECT_S), hub_name)
                except OSError as error:
                    problem = (
                        f"rank {rank} cannot connect to rank 0 at {addresses}, port {port}: {error}"
                    )
            problems = [problem for problem in gather_objects(problem) if problem]
        if not problems:
            return lifeline
        if lifeline is not None:
            lifeline.close()
        if any(answers):
            warnings.warn(
                "If a rank dies, the others may notice it late (at worst after the process group's"
                f" timeout), because {'; '.join(problems)}. Let all ranks reach rank 0, or set"
                " `lifelines` to False or to a port that is open.",
                stacklevel=2,
            )
        return None

    def report(self, exception: BaseException) -> str:
        """Report that this rank is failing, and wait for the hub's answer: which ranks have died or
        failed.

        It is empty if all ranks are failing, as on an error in shared code: then they can save a
        checkpoint together.
        """
        # Else a GPU may wait for the lost rank for ever while this one tears down.
        if not self._ends_with:
            self._over.set()
        first_line = str(exception).strip().split("\n")[0].removesuffix(".")
        self._send(
            {"failed": f"{type(exception).__name__}: {first_line}".removesuffix(": ")[:1000]}
        )
        self._decided.wait(ANSWER_S)
        return self.failure

    def signalled(self, signal_number: int) -> None:
        """Have all ranks act on a signal that this one has received; a signal handler may call
        this.
        """
        self._send({"signal": signal_number})

    def passed(self) -> list[int]:
        """Pass a stop point, and return the signals that all ranks act on there, mostly none."""
        return self._order.pass_stop_point()

    def check_order(
        self,
        name: str,
        description: str,
        peers: Sequence[int],
        patience_s: float | None = None,
        batch: Batch | None = None,
    ) -> None:
        """Check that some ranks do the same here, as
        :mod:`lightning_dct.failures.collective_order` explains.

        A RuntimeError says that they do not, or that a rank has died or failed.
        """
        if not self._over.is_set():
            difference = self._order.check_order(name, description, peers, patience_s, batch)
            if problem := difference or self._ends_with:
                raise RuntimeError(f"{problem}.")

    def report_pace(self, step: float, waiting: float) -> dict[int, tuple[float, float]]:
        """Report the seconds of a step, and of waiting in it, to rank 0; there, the latest reports
        of all ranks.
        """
        self._send({"pace": (step, waiting)})
        return {} if self._hub is None else dict(self._hub.paces)

    def close(self) -> None:
        """Leave: this rank is done. No thread remains."""
        self._over.set()
        self._hub_may_end = True
        self._send({"left": list(self._order.counts.items())})
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._thread.join(ANSWER_S)
        if self._hub is not None:
            self._hub.thread.join()

    def _send(self, message: FromRank) -> None:
        with self._sending, suppress(OSError):  # the thread notices the end of the connection
            write_line(self._connection, message)

    def _listen(self) -> None:
        buffer = bytearray()
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        ending = ""
        while not ending:
            if selector.select(self._order.ask_if_late()):
                ending = receive(self._connection, buffer, self._handle)
        self._order.release()
        if not self._hub_may_end:
            self._decide(f"{self._hub_name} {ending}", [0])
        self._decided.set()
        selector.close()
        self._connection.close()

    def _handle(self, message: FromHub) -> None:
        if "failure" in message:
            self._decide(str(message["failure"]), message["blamed"])
        elif "over" in message:
            self._hub_may_end = True
            if not (bug := message["over"]):
                self.failure = self.failure or f"{self._hub_name} has left"
            else:
                self._print(
                    f"the ranks' lifelines have ended ({bug}); a rank that dies may be noticed"
                    " late."
                )
        elif difference := self._order.hear(message):
            self._decide(difference, [])

    def _decide(self, failure: str, blamed: list[int]) -> None:
        if self._decided.is_set():
            return  # the answer to this rank's own report
        self.failure = failure
        if self._rank not in blamed:
            self._ends_with = failure
        self._decided.set()
        self._order.release()
        if not self._ends_with:
            return
        self._print(f"{failure}. This rank ends too.")
        # No exception interrupts a collective that waits for the lost rank.
        if not self._over.wait(GRACE_S):
            self._print(f"ended {GRACE_S:.0f} s after that.")
            os._exit(1)

    def _print(self, sentence: str) -> None:
        with suppress(OSError, ValueError):  # standard error is closed, or it cannot be encoded
            print(f"lightning_dct, rank {self._rank}: {sentence}", file=sys.stderr, flush=True)


_openings = count()


def _who_is_missing() -> Callable[[], str]:
    """Tell the other ranks that this one opens its lifeline; the result says which ones do not."""
    store = dist.distributed_c10d._get_default_store()
    place = f"lightning_dct/lifelines/{next(_openings)}"
    store.set(f"{place}/{dist.get_rank()}", "")

    def describe() -> str:
        missing: list[int] = []
        with suppress(RuntimeError):  # the store is gone, or cannot tell
            missing = [r for r in range(dist.get_world_size()) if not store.check([f"{place}/{r}"])]
        whom = f"ranks {missing}" if missing else "the other ranks"
        return (
            f"for {whom} to come to their first exchange, after the process group has connected."
            " They load data or a model, or they hang: look at their output."
        )

    return describe


_of_processes: dict[dist.ProcessGroup | None, Lifeline | None] = {}
_wanted_by_group: dict[dist.ProcessGroup | None, bool | int] = {}


def want_lifelines_of_process(wanted: bool | int) -> None:
    """Have loops in the default process group that say nothing themselves open their lifelines so
    (:meth:`Lifeline.open`).
    """
    _wanted_by_group[dist.group.WORLD] = wanted


def lifeline_of_process(wanted: bool | int | None = None) -> Lifeline | None:
    """The lifeline of loops without a Trainer: one for each default process group, until the
    process ends.

    A collective call; see :meth:`Lifeline.open`. A loop of which some rank wants none has none.
    None leaves it to :func:`want_lifelines_of_process`.
    """
    if wanted is None:
        wanted = _wanted_by_group.get(dist.group.WORLD, True)
    if (lifeline := _of_processes.get(dist.group.WORLD)) is not None:
        return lifeline if all(gather_objects(bool(wanted))) else None
    lifeline = _of_processes[dist.group.WORLD] = Lifeline.open(wanted)
    if lifeline is not None:
        Finalize(None, lifeline.close, exitpriority=0)  # also in processes of multiprocessing
    return lifeline


def check_lifelines(wanted: bool | int) -> None:
    """Refuse a value that is neither True, False nor a port, with a ValueError."""
    if not (isinstance(wanted, bool) or (type(wanted) is int and 0 < wanted < (1 << 16) - 1)):
        raise ValueError(
            f"`lifelines` must be True, False or a port from 1 to 65534, got {wanted!r}."
        )


def _start_hub(wanted: bool | int) -> tuple[Hub | None, Any]:
    """The hub and its address; or None and why there is none."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        # Another host may know this one by another address.
        addresses = list(dict.fromkeys([address_towards(master), master]))
        hub = Hub(dist.get_world_size(), _name_of(0), 0 if wanted is True else wanted)
    except OSError as error:
        return None, f"rank 0 cannot listen: {error}"
    return hub, (addresses, hub.port, hub.token, _name_of(0))


def _name_of(rank: int) -> str:
    return f"Rank {rank} (process {os.getpid()} on {socket.gethostname()})"
