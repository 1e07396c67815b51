"""The hub in the process of rank 0: sends the names of dead and failed ranks, and what ranks ask
each other.

A rank reports how it ends: it has left, or it has failed and why. If a connection ends without a
report, its process has died: the kernel closes the connections of any dead process. A living rank
may take any time.

Anyone on the network can connect until all ranks have. The hub closes connections without the token
or with the number of a connected rank, and the oldest silent ones if there are many. It sends
nothing from such callers to the ranks. A rank that the hub has hung up on before the welcome calls
again.
"""

from __future__ import annotations

import hmac
import math
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from lightning_dct.failures.collective_order import SAME_BATCHES
from lightning_dct.failures.messages import Failure, FromHub, FromRank, Hello, Peers, Place, Welcome
from lightning_dct.failures.sockets import (
    LONGEST_LINE,
    WELCOME,
    accept,
    listen,
    pair,
    receive,
    write_line,
)

# A death makes other ranks fail, and their reports may arrive first. So the hub waits before it
# decides.
SETTLE_S = 1.0
PATIENCE_S = 10.0  # for a message to be sent
STRANGERS = (
    16  # unknown callers that may wait, beyond one for each rank; the hub drops the oldest first
)
MOST_NAMED = 8  # ranks whose reports a message has: those of all could be too long for it


class Hub:
    """Serves all lifelines in its ``thread`` until rank 0, which messages call ``name``, has left.

    ``token`` is the secret of this job's ranks, and ``own`` the connection of rank 0, which needs
    no network. An OSError means that the hub cannot listen on the port.
    """

    def __init__(self, world_size: int, name: str, port: int = 0) -> None:
        self.token = secrets.token_hex(16)
        self._world_size = world_size
        self._listener = listen(port)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._nameless: list[_Caller] = []
        self.own, end = pair()
        self._members = {0: self._connected(end, rank=0, name=name)}
        self._dead: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._left: set[int] = set()
        self._decide_at: float | None = None
        self._failure: Failure | None = None
        # For each signal: the number of stop points that each rank had passed when it received the
        # question.
        self._passed: dict[int, dict[int, int]] = {}
        # The questions on which not all agree yet, and by ranks, the last place on which all do.
        self._open: dict[tuple[Peers, int], _Question] = {}
        self._agreed: dict[Peers, int] = {}
        # How many places each rank that has left had come to.
        self._places_of_left: dict[int, dict[Peers, int]] = {}
        # By rank, seconds of a step and of waiting in it.
        self.paces: dict[int, tuple[float, float]] = {}
        self.thread = threading.Thread(target=self._run, name="lightning_dct hub", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while 0 not in self._left:
                self._serve_once()
            over = ""
        except Exception as error:
            # Report a bug here as a bug, not as a death.
            over = f"{type(error).__name__}: {error}"
        self._send_all({"over": over})
        for member in self._members.values():
            # Closing with something unread takes back what was sent, and the rank would take that
            # for a death.
            with suppress(OSError):
                member.connection.shutdown(socket.SHUT_WR)
                member.connection.settimeout(SETTLE_S)
                while member.connection.recv(1 << 16):
                    pass
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _serve_once(self) -> None:
        wait = None if self._decide_at is None else max(self._decide_at - time.monotonic(), 0.0)
        # Callers that have sent something come first, before they are dropped as strangers.
        for key, _ in sorted(
            self._selector.select(wait), key=lambda event: event[0].fileobj is self._listener
        ):
            if key.fileobj is self._listener:
                with suppress(OSError):  # the caller has closed the connection
                    self._nameless.append(self._connected(accept(self._listener)))
                if len(self._nameless) > self._world_size + STRANGERS:
                    self._drop(self._nameless[0])
            elif key.data.connection.fileno() >= 0:  # not dropped a moment ago
                self._receive(key.data)
        if self._decide_at is not None and (
            self._all_have_ended() or time.monotonic() >= self._decide_at
        ):
            self._decide()

    def _receive(self, caller: _Caller) -> None:
        longest = LONGEST_LINE if caller.rank is None else math.inf
        if not (
            ending := receive(
                caller.connection, caller.buffer, partial(self._handle, caller), longest
            )
        ):
            return
        self._drop(caller)
        if caller.rank is not None and caller.rank not in self._left:
            # A process that ends after it has reported a failure has left.
            self._left.add(caller.rank)
            if caller.rank not in self._failed:
                self._dead[caller.rank] = f"{caller.name} {ending}"
                self._decide_soon()
            self._announce_stop_points()

    def _handle(self, caller: _Caller, message: FromRank) -> None:
        """Act on a message; any Exception means that no rank of this job has sent it."""
        if caller.rank is None:
            self._admit(caller, cast("Hello", message))
        elif "failed" in message:
            self._failed.setdefault(caller.rank, f"{caller.name} has failed: {message['failed']}")
            if self._failure is not None:
                self._send(caller, self._failure)
            self._decide_soon()
        elif "left" in message:
            self._left.add(caller.rank)
            self._places_of_left[caller.rank] = {
                tuple(peers): count for peers, count in message["left"]
            }
            self._announce_stop_points()
            for question in [
                one.first for (peers, _), one in self._open.items() if caller.rank in peers
            ]:
                self._answer_for(caller.rank, question)
        elif "signal" in message:
            number = int(message["signal"])
            if number not in self._passed:
                self._passed[number] = {}
                self._send_all({"where": number})
        elif "passed" in message:
            self._passed[int(message["asked"])][caller.rank] = int(message["passed"])
            self._announce_stop_points()
        elif "pace" in message:
            total, waiting = message["pace"]
            self.paces[caller.rank] = float(total), float(waiting)
        elif "elsewhere" in message:
            if (
                asked := self._open.get((tuple(message["peers"]), int(message["place"])))
            ) is not None:
                asked.elsewhere[caller.rank] = str(message["elsewhere"])
                if asked.agreeing | {
                    rank for rank, where in asked.elsewhere.items() if where
                } == set(message["peers"]):
                    self._announce_apart(asked.first, caller.rank, asked.elsewhere[caller.rank])
        elif "place" in message:
            self._ask(caller.rank, tuple(message["peers"]), message)
        elif "agrees" in message:
            if message["apart"]:
                self._announce([], message["apart"])
            else:
                self._note_agreement(tuple(message["peers"]), int(message["agrees"]), caller.rank)

    def _admit(self, caller: _Caller, hello: Hello) -> None:
        rank = hello["rank"]
        if (
            not hmac.compare_digest(str(hello["token"]).encode(), self.token.encode())
            or type(rank) is not int
            or rank not in range(self._world_size)
            or rank in self._members
        ):
            raise ValueError("not a rank of this job")
        name = str(hello["who"])  # before anything changes: a stranger may not give it
        self._nameless.remove(caller)
        caller.rank = rank
        caller.name = name
        self._members[rank] = caller
        self._send(caller, WELCOME)
        if len(self._members) == self._world_size:
            self._selector.unregister(self._listener)
            self._listener.close()
            while self._nameless:
                self._drop(self._nameless[0])

    def _announce_stop_points(self) -> None:
        """Announce the stop point at which all ranks act on a signal, once all remaining ranks have
        answered.
        """
        here = self._members.keys() - self._left
        for number, passed in self._passed.items():
            if passed and here <= passed.keys():
                self._send_all({"act_on": number, "place": max(passed.values()) + 1})
                passed.clear()

    def _ask(self, rank: int, peers: Peers, question: Place) -> None:
        """Pass a question on to its peers, except to those that have it from a rank with the same
        groups. A rank with other groups numbers places in another way, and may differ from a peer
        where the first does not.
        """
        place = int(question["place"])
        if place <= self._agreed.get(peers, 0):
            return
        asked = self._open.setdefault((peers, place), _Question(question)).asked
        groups = [frozenset(group) for group, _ in question["counts"]]
        for other in set(peers) - {rank}:
            shared = other, frozenset(group for group in groups if {rank, other} <= group)
            if shared not in asked:
                asked.add(shared)
                self._send(self._members[other], {"ask": question})
        self._note_agreement(peers, place, rank)
        for other in self._places_of_left.keys() & set(peers):
            self._answer_for(other, question)

    def _answer_for(self, rank: int, question: Place) -> None:
        """Answer for a rank that has left: either it has come to that place before, or it never
        will.
        """
        peers = tuple(question["peers"])
        place = int(question["place"])
        if self._places_of_left[rank].get(peers, 0) >= place:
            self._note_agreement(peers, place, rank)
        elif (peers, place) in self._open:
            self._announce_apart(question, rank, "its end")

    def _note_agreement(self, peers: Peers, place: int, rank: int) -> None:
        """Note that a rank does the same as one that asks, and tell all once all do."""
        if (question := self._open.get((peers, place))) is None:
            return  # all have agreed, and this rank was asked by several
        question.agreeing.add(rank)
        if question.agreeing == set(peers):
            del self._open[peers, place]
            self._agreed[peers] = place
            for other in peers:
                self._send(self._members[other], {"agreed": place, "peers": peers})

    def _announce_apart(self, question: Place, rank: int, where: str) -> None:
        both = sorted([(question["rank"], question["said"]), (rank, where)])
        places = " and ".join(f"rank {one} at {said}" for one, said in both)
        self._announce([], f"The ranks are out of step: {places}. {SAME_BATCHES}")

    def _decide_soon(self) -> None:
        if self._decide_at is None and self._failure is None:
            self._decide_at = time.monotonic() + SETTLE_S

    def _all_have_ended(self) -> bool:
        return set(range(self._world_size)) <= self._left | self._failed.keys()

    def _decide(self) -> None:
        """Name the dead ranks, else the failed ones; none if all have failed, because each of them
        knows why.
        """
        blamed = self._dead or ({} if self._all_have_ended() else self._failed)
        reports = [blamed[rank] for rank in sorted(blamed)]
        more = [f"and {len(reports) - MOST_NAMED} more"] if len(reports) > MOST_NAMED else []
        self._announce(sorted(blamed), "; ".join(reports[:MOST_NAMED] + more))

    def _announce(self, blamed: list[int], failure: str) -> None:
        """Tell all ranks of the first failure; later ones are its consequences."""
        self._decide_at = None
        if self._failure is None:
            self._failure = {"blamed": blamed, "failure": failure}
            self._send_all(self._failure)

    def _connected(
        self, connection: socket.socket, rank: int | None = None, name: str = ""
    ) -> _Caller:
        connection.settimeout(PATIENCE_S)
        caller = _Caller(connection, rank, name)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        return caller

    def _drop(self, caller: _Caller) -> None:
        if caller in self._nameless:
            self._nameless.remove(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _send(self, caller: _Caller, message: FromHub | Welcome) -> None:
        with suppress(OSError):  # receiving detects the end of the connection
            write_line(caller.connection, message)

    def _send_all(self, message: FromHub) -> None:
        for member in self._members.values():
            self._send(member, message)


@dataclass
class _Question:
    """What some ranks have been asked about a place that they share."""

    first: Place  # of the rank that has asked first
    # Ranks that have the question, with the groups that each shares with the rank that asked it.
    asked: set[tuple[int, frozenset[frozenset[int]]]] = field(default_factory=set)
    agreeing: set[int] = field(default_factory=set)
    # By rank, where it waits for others instead.
    elsewhere: dict[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Caller:
    """One connection, and its rank once that is known."""

    connection: socket.socket
    rank: int | None
    name: str  # in messages
    buffer: bytearray = field(default_factory=bytearray)
