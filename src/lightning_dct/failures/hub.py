"""In the process of rank 0: holds a connection to every rank, finds out who has died or failed, and tells everybody.

A rank says how it ends: it has left, or it has failed and why. A connection that ends without a word is a process that
has died, whatever has killed it: the kernel closes it. Silence is no evidence of anything, so a rank may compute, load
data or sit in a debugger for as long as it likes.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from lightning_dct.failures.sockets import accept, listen, read_lines, write_line

# Ranks fail in consequence of a death, and may say so before the death itself is seen. So the hub waits a little.
SETTLE_S = 1.0
# How long a connection may take to say who it is, and a message to be taken.
PATIENCE_S = 10.0


class Hub:
    """The place where all lifelines meet. It runs in a thread of its own until every rank has left.

    Args:
        world_size: How many ranks there are.

    Attributes:
        port: Where it listens.
        token: What a rank has to know to be let in.
    """

    def __init__(self, world_size: int) -> None:
        self.token = secrets.token_hex(16)
        self._world_size = world_size
        self._listener = listen()
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[int, _Caller] = {}
        self._dead: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._left: set[int] = set()
        self._decide_at: float | None = None
        self._verdict: dict[str, Any] | None = None
        threading.Thread(target=self._run, name="lightning_dct hub", daemon=True).start()

    def _run(self) -> None:
        while len(self._left) < self._world_size:
            wait = None if self._decide_at is None else max(self._decide_at - time.monotonic(), 0.0)
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listener:
                    with suppress(OSError):
                        connection = accept(self._listener)
                        connection.settimeout(PATIENCE_S)
                        self._selector.register(connection, selectors.EVENT_READ, _Caller(connection))
                else:
                    self._hear(key.data)
            if self._decide_at is not None and (self._none_is_well() or time.monotonic() >= self._decide_at):
                self._decide()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _hear(self, caller: _Caller) -> None:
        """Read what a connection says; its end is news too."""
        try:
            received = caller.connection.recv(1 << 16)
            messages = read_lines(caller.buffer, received)
            how = "has died" if not received else None
        except ConnectionError:
            messages, how = [], "has died"
        except (OSError, ValueError):
            # The kernel's probes were not answered, or a stranger has called.
            messages, how = [], "cannot be reached any more"
        for message in messages:
            self._take(caller, message)
        if how is None:
            return
        self._selector.unregister(caller.connection)
        caller.connection.close()
        rank = caller.rank
        if rank is not None and rank not in self._left:
            # A process that has failed and then ends has left.
            self._left.add(rank)
            if rank not in self._failed:
                self._dead[rank] = f"{caller.who} {how}"
                self._news()

    def _take(self, caller: _Caller, message: dict[str, Any]) -> None:
        if caller.rank is None:
            if hmac.compare_digest(str(message.get("token")), self.token):
                caller.rank, caller.who = int(message["rank"]), str(message["who"])
                self._members[caller.rank] = caller
                self._tell(caller, {"welcome": True})
                if len(self._members) == self._world_size:
                    self._selector.unregister(self._listener)
                    self._listener.close()
        elif "failed" in message:
            self._failed.setdefault(caller.rank, f"{caller.who} has failed: {message['failed']}")
            if self._verdict is not None:
                self._tell(caller, self._verdict)
            self._news()
        elif "left" in message:
            self._left.add(caller.rank)
            if caller.rank == 0:
                # Its process may end now, and this hub with it.
                for other in self._members.values():
                    self._tell(other, {"hub_may_end": True})

    def _news(self) -> None:
        if self._decide_at is None and self._verdict is None:
            self._decide_at = time.monotonic() + SETTLE_S

    def _none_is_well(self) -> bool:
        return set(range(self._world_size)) <= self._left | self._failed.keys()

    def _decide(self) -> None:
        """Say who is to blame: the dead, else who has failed, unless all have: then each of them knows why."""
        blamed = self._dead or ({} if self._none_is_well() else self._failed)
        self._verdict = {"blamed": sorted(blamed), "verdict": "; ".join(blamed[rank] for rank in sorted(blamed))}
        self._decide_at = None
        for caller in self._members.values():
            self._tell(caller, self._verdict)

    def _tell(self, caller: _Caller, message: dict[str, Any]) -> None:
        with suppress(OSError):  # its end will be heard
            write_line(caller.connection, message)


class _Caller:
    """One connection, and who it is once it has said so."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.rank: int | None = None
        self.who = ""
