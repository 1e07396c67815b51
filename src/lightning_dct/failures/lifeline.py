r"""One rank's connection to all others: says how this rank ends, and ends it when another one has died or failed.

    rank 0              rank 1              rank 2
    lifeline            lifeline            lifeline        a TCP connection each, silent as long as all is well
        \                  |                  /
         +------ hub, in the process of rank 0

Without it a rank waits in a collective for a dead one until the process group's timeout, half an hour, wherever
sockets stay open: forked DataLoader workers keep those of a dead rank, a host that has lost its power says nothing, and
a rank that has raised an exception may wait itself, in another collective.
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
from lightning_dct.failures.sockets import address_towards, connect, read_lines, write_line

CONNECT_S = 10.0
# How long a failing rank waits to hear whether it was the first.
VERDICT_S = 5.0
# How long a rank may take to end by itself once it is lost.
GRACE_S = 10.0


class Lifeline:
    """This rank's connection; made by :meth:`open`."""

    def __init__(self, rank: int, connection: socket.socket, hub_who: str) -> None:
        self._rank = rank
        self._connection = connection
        self._hub_who = hub_who
        self._lock = threading.Lock()
        self._over = threading.Event()  # this rank has left, or has failed by itself
        self._decided = threading.Event()
        self._hub_may_end = False
        self._welcome = threading.Event()
        self.verdict = ""

    @classmethod
    def open(cls) -> Lifeline | None:
        """Connect all ranks of the default process group: a collective call.

        Returns:
            This rank's lifeline. None for a single process, and, with a warning, where ranks cannot connect.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        rank = dist.get_rank()
        box: list[Any] = [_invite(dist.get_world_size()) if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return None
        addresses, port, token, hub_who = box[0]
        try:
            lifeline = cls(rank, connect(addresses, port, CONNECT_S), hub_who)
            lifeline._send({"token": token, "rank": rank, "who": _who(rank)})
        except OSError as error:
            _warn(f"rank {rank} cannot connect to rank 0 at {addresses}, port {port}: {error}")
            return None
        threading.Thread(target=lifeline._listen, name="lightning_dct lifeline", daemon=True).start()
        if not lifeline._welcome.wait(CONNECT_S):
            lifeline.close()
            _warn(f"what answers rank {rank} at {addresses}, port {port}, is not rank 0")
            return None
        return lifeline

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

    def close(self) -> None:
        """Leave: this rank has done its work, or has nothing more to say."""
        self._over.set()
        self._send({"left": True})
        self._hub_may_end = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # the end of the connection is news that the thread hears
            write_line(self._connection, message)

    def _listen(self) -> None:
        buffer = bytearray()
        how = "has died"
        while True:
            try:
                received = self._connection.recv(1 << 16)
                messages = read_lines(buffer, received)
            except ConnectionError:
                received, messages = b"", []
            except OSError:
                received, messages, how = b"", [], "cannot be reached any more"
            for message in messages:
                if "welcome" in message:
                    self._welcome.set()
                elif "hub_may_end" in message:
                    self._hub_may_end = True
                elif "verdict" in message:
                    self._hear(str(message["verdict"]), message["blamed"])
            if not received:
                break
        if not self._hub_may_end and not self._decided.is_set():
            self._hear(f"{self._hub_who} {how}", [0])
        self._connection.close()

    def _hear(self, verdict: str, blamed: list[int]) -> None:
        if self._decided.is_set():
            return  # the answer to this rank's own report
        self.verdict = verdict
        self._decided.set()
        if not verdict or self._rank in blamed:
            return
        print(f"lightning_dct, rank {self._rank}: {verdict}. This rank ends too.", file=sys.stderr, flush=True)
        # A collective that waits for the rank that is lost cannot be interrupted, where it does not notice by itself.
        if not self._over.wait(GRACE_S):
            print(f"lightning_dct, rank {self._rank}: ended {GRACE_S:.0f} s after that.", file=sys.stderr, flush=True)
            os._exit(1)


def _invite(world_size: int) -> tuple[list[str], int, str, str] | None:
    """Start the hub and say where it is; None, with a warning, where that cannot be done."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        hub = Hub(world_size)
        # Another host may know the first under another address than it knows itself.
        return list(dict.fromkeys([address_towards(master), master])), hub.port, hub.token, _who(0)
    except OSError as error:
        _warn(f"rank 0 cannot listen: {error}")
        return None


def _warn(reason: str) -> None:
    warnings.warn(
        f"A rank that dies may be noticed late, after the process group's timeout at worst, because {reason}.",
        stacklevel=3,
    )


def _who(rank: int) -> str:
    return f"Rank {rank} (process {os.getpid()} on {socket.gethostname()})"
