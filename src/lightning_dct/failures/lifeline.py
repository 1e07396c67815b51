r"""One rank's connection to all others: says how this rank ends, and ends it when another one has died or failed.

    rank 0              rank 1              rank 2
    lifeline            lifeline            lifeline        a TCP connection each, silent as long as all is well
        \                  |                  /
         +------ hub, in the process of rank 0

Without it a rank waits in a collective for a dead one until the process group's timeout, half an hour, wherever
sockets stay open: forked DataLoader workers keep those of a dead rank, a host that has lost its power says nothing, and
a rank that has raised an exception may wait itself, in another collective.

It carries signals too: one that any rank receives is acted on by all of them, at the same place.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_dct.failures.hub import Hub
from lightning_dct.failures.places import Places
from lightning_dct.failures.sockets import address_towards, connect, read_lines, write_line

CONNECT_S = 10.0
# How long a failing rank waits to hear whether it was the first.
VERDICT_S = 5.0
# How long a rank may take to end by itself once it is lost.
GRACE_S = 10.0


class Lifeline:
    """This rank's connection; made by :meth:`open`."""

    def __init__(self, rank: int, connection: socket.socket, hub_who: str, hub: Hub | None = None) -> None:
        self.verdict = ""
        self._rank = rank
        self._connection = connection
        self._hub_who = hub_who
        self._hub = hub
        # A signal's handler sends, too, and may interrupt its own thread while that sends.
        self._sending = threading.RLock()
        self._places = Places()
        self._over = threading.Event()  # this rank has left, or has failed by itself
        self._decided = threading.Event()
        self._hub_may_end = False
        self._welcome = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="lightning_dct lifeline", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, wanted: bool | int = True) -> Lifeline | None:
        """Connect all ranks of the default process group, or none of them: a collective call.

        Args:
            wanted: False for none. A number is the port at which rank 0 listens.

        Returns:
            This rank's lifeline. None for a single process, where no rank wants one, and, with a warning on every
            rank, where some cannot connect or do not want to.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        rank = dist.get_rank()
        hub, told = _start_hub(wanted) if rank == 0 and wanted else (None, wanted)
        answers = _gather(told)
        lifeline = cls(0, hub.own, _who(0), hub) if hub else None
        problems = [f"rank {other} has `lifelines=False`" for other, answer in enumerate(answers) if not answer]
        if isinstance(answers[0], str):
            problems.append(answers[0])
        if not problems:
            problem = ""
            if rank > 0:
                lifeline, problem = cls._connect(rank, *answers[0])
            problems = [problem for problem in _gather(problem) if problem]
        if not problems:
            return lifeline
        if lifeline is not None:
            lifeline.close()
        if any(answers):
            warnings.warn(
                "A rank that dies may be noticed late, after the process group's timeout at worst, because"
                f" {'; '.join(problems)}. `DCTStrategy(lifelines=...)` takes False, or a port that is open.",
                stacklevel=2,
            )
        return None

    @classmethod
    def _connect(
        cls, rank: int, addresses: list[str], port: int, token: str, hub_who: str
    ) -> tuple[Lifeline | None, str]:
        """The lifeline, or None and why there is none."""
        try:
            lifeline = cls(rank, connect(addresses, port, CONNECT_S), hub_who)
        except OSError as error:
            return None, f"rank {rank} cannot connect to rank 0 at {addresses}, port {port}: {error}"
        lifeline._send({"token": token, "rank": rank, "who": _who(rank)})
        if lifeline._welcome.wait(CONNECT_S):
            return lifeline, ""
        return lifeline, f"what answers rank {rank} at {addresses}, port {port}, is not rank 0"

    def report(self, exception: BaseException) -> str:
        """Tell the others that this rank is failing, and wait to hear who is to blame.

        Returns:
            Who has died or failed. Empty when all ranks are failing, as they do by an error in what they share: then
            they are still together and can go on to save what they have.
        """
        self._over.set()
        said = str(exception).strip().split("\n")[0]
        self._send({"failed": f"{type(exception).__name__}: {said}"[:1000]})
        self._decided.wait(VERDICT_S)
        return self.verdict

    def signalled(self, signal_number: int) -> None:
        """Have all ranks act on a signal that this one has received. It may be called by the signal's handler."""
        self._send({"signal": signal_number})

    def passed(self) -> list[int]:
        """Pass a place through which all ranks go equally often; see :mod:`~lightning_dct.failures.places`.

        Returns:
            The signals that all ranks act on here, mostly none.
        """
        return self._places.passed()

    def close(self) -> None:
        """Leave: this rank has done its work, or has nothing more to say. No thread is left behind."""
        self._over.set()
        self._hub_may_end = True
        self._send({"left": True})
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._thread.join(VERDICT_S)
        if self._hub is not None:
            self._hub.join()

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):  # the end of the connection is news that the thread hears
            write_line(self._connection, message)

    def _listen(self) -> None:
        buffer = bytearray()
        how = ""
        while not how:
            try:
                received = self._connection.recv(1 << 16)
                for message in read_lines(buffer, received):
                    self._take(message)
                how = "" if received else "has died"
            except ConnectionError:
                how = "has died"
            except (OSError, ValueError):
                how = "cannot be reached any more"
        self._places.release()
        if not self._hub_may_end:
            self._hear(f"{self._hub_who} {how}", [0])
        self._decided.set()
        self._connection.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "welcome" in message:
            self._welcome.set()
        elif "where" in message:
            number = int(message["where"])
            self._send({"asked": number, "passed": self._places.ask(number)})
        elif "act_on" in message:
            self._places.settle(int(message["act_on"]), int(message["place"]))
        elif "verdict" in message:
            self._hear(str(message["verdict"]), message["blamed"])
        elif "over" in message:
            self._hub_may_end = True
            if not message["over"]:
                self.verdict = self.verdict or f"{self._hub_who} has left"
            else:
                self._say(f"the ranks' lifelines have ended ({message['over']}); one that dies may be noticed late.")

    def _hear(self, verdict: str, blamed: list[int]) -> None:
        if self._decided.is_set():
            return  # the answer to this rank's own report
        self.verdict = verdict
        self._decided.set()
        self._places.release()
        if not verdict or self._rank in blamed:
            return
        self._say(f"{verdict}. This rank ends too.")
        # A collective that waits for the rank that is lost cannot be interrupted, where it does not notice by itself.
        if not self._over.wait(GRACE_S):
            self._say(f"ended {GRACE_S:.0f} s after that.")
            os._exit(1)

    def _say(self, sentence: str) -> None:
        print(f"lightning_dct, rank {self._rank}: {sentence}", file=sys.stderr, flush=True)


def check_lifelines(wanted: bool | int) -> None:
    """Refuse what is neither True, False nor a port.

    Raises:
        ValueError: It is neither.
    """
    if not (isinstance(wanted, bool) or (type(wanted) is int and 0 < wanted < 1 << 16)):
        raise ValueError(f"`lifelines` must be True, False or a port from 1 to 65535, got {wanted!r}.")


def _start_hub(wanted: bool | int) -> tuple[Hub | None, Any]:
    """The hub, and where it is; or None, and why there is none."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        # Another host may know the first under another address than it knows itself.
        addresses = list(dict.fromkeys([address_towards(master), master]))
        hub = Hub(dist.get_world_size(), _who(0), 0 if wanted is True else wanted)
    except OSError as error:
        return None, f"rank 0 cannot listen: {error}"
    return hub, (addresses, hub.port, hub.token, _who(0))


def _gather(mine: Any) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return answers


def _who(rank: int) -> str:
    return f"Rank {rank} (process {os.getpid()} on {socket.gethostname()})"
