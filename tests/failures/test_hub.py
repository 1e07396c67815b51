"""The hub's findings, with all ranks in this process: who is blamed, and when nobody is."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from lightning_dct.failures.hub import STRANGERS, Hub
from lightning_dct.failures.sockets import (
    LONGEST_LINE,
    WELCOME,
    connect,
    join_hub,
    read_lines,
    write_line,
)

# Far more than anything here takes on a quiet machine.
PATIENCE_S = 240.0


def call(hub: Hub) -> socket.socket:
    connection = connect(["127.0.0.1"], hub.port, PATIENCE_S)
    connection.settimeout(PATIENCE_S)
    return connection


def is_hung_up_on(connection: socket.socket) -> bool:
    """Whether the hub has closed the connection; it answers strangers nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


class Line:
    """One rank's connection, without the thread and the exit of a real one."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.connection = hub.own if rank == 0 else call(hub)
        self.connection.settimeout(PATIENCE_S)
        self._buffer = bytearray()
        self.heard: list[dict] = []
        if rank > 0:
            self.say({"token": hub.token, "rank": rank, "who": f"Rank {rank}"})
            self.wait_for("welcome")

    def say(self, message: dict) -> None:
        write_line(self.connection, message)

    def wait_for(self, key: str) -> dict:
        while True:
            found = next((message for message in self.heard if key in message), None)
            if found is not None:
                return found
            received = self.connection.recv(1 << 16)
            assert received, f"the hub has closed the connection; heard {self.heard}"
            self.heard += read_lines(self._buffer, received)

    def die(self) -> None:
        self.connection.close()


@pytest.fixture
def job() -> Iterator[Callable[[int], tuple[Hub, list[Line]]]]:
    """So many ranks, all of them let in."""
    opened: list[Line] = []

    def of(world_size: int) -> tuple[Hub, list[Line]]:
        hub = Hub(world_size, "Rank 0")
        lines = [Line(hub, rank) for rank in range(world_size)]
        opened.extend(lines)
        return hub, lines

    yield of
    for line in opened:
        line.connection.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub decides when all ranks have ended, and not before, however long a busy machine takes
    to tell it all.
    """
    monkeypatch.setattr("lightning_dct.failures.hub.SETTLE_S", PATIENCE_S)


@pytest.mark.usefixtures("unhurried")
def test_the_dead_are_blamed_before_those_that_fail_of_it(job: Callable) -> None:
    """Ranks 0 and 1 fail first, but only because rank 2 has died."""
    _, lines = job(3)
    for line in lines[:2]:
        line.say({"failed": "RuntimeError: connection closed by peer"})
    lines[2].die()
    for line in lines[:2]:
        assert line.wait_for("failure") == {"blamed": [2], "failure": "Rank 2 has died"}


def test_who_fails_alone_is_blamed(job: Callable) -> None:
    _, lines = job(3)
    lines[1].say({"failed": "ValueError: no"})
    for line in lines:
        assert line.wait_for("failure") == {
            "blamed": [1],
            "failure": "Rank 1 has failed: ValueError: no",
        }


@pytest.mark.usefixtures("unhurried")
def test_nobody_is_blamed_when_all_fail(job: Callable) -> None:
    _, lines = job(3)
    lines[2].say({"left": True})
    for line in lines[:2]:
        line.say({"failed": "ValueError: no"})
    for line in lines[:2]:
        assert line.wait_for("failure") == {"blamed": [], "failure": ""}


def test_a_rank_that_fails_later_hears_the_same(job: Callable) -> None:
    _, lines = job(2)
    lines[1].die()
    assert lines[0].wait_for("failure")["blamed"] == [1]
    lines[0].heard.clear()
    lines[0].say({"failed": "RuntimeError: connection closed by peer"})
    assert lines[0].wait_for("failure")["blamed"] == [1]


@pytest.mark.usefixtures("unhurried")
def test_a_verdict_about_many_stays_short(job: Callable) -> None:
    """What all have to say could be longer than a message may be."""
    _, lines = job(71)
    for line in lines[1:]:
        line.die()
    lines[0].say({"failed": "RuntimeError: connection closed by peer"})
    failure = lines[0].wait_for("failure")
    assert failure["blamed"] == [*range(1, 71)]
    assert failure["failure"].startswith("Rank 1 has died; Rank 2 has died; ")
    assert failure["failure"].endswith("Rank 8 has died; and 62 more")


def test_who_has_left_may_go(job: Callable) -> None:
    """Oracle: a later death is the first news."""
    _, lines = job(3)
    lines[1].say({"left": True})
    lines[1].die()
    lines[2].die()
    assert lines[0].wait_for("failure") == {"blamed": [2], "failure": "Rank 2 has died"}


def test_the_hub_ends_with_rank_0(job: Callable) -> None:
    """Oracle: the others hear it, as no death; no thread is left."""
    hub, lines = job(3)
    lines[0].say({"left": True})
    hub.thread.join()
    for line in lines[1:]:
        assert line.wait_for("over") == {"over": ""}


def test_a_hub_that_breaks_says_so(job: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the ranks hear the reason, and of no death."""
    _, lines = job(3)
    monkeypatch.setattr(Hub, "_decide", lambda hub: 1 / 0)
    lines[2].die()
    for line in lines[:2]:
        assert line.wait_for("over") == {"over": "ZeroDivisionError: division by zero"}
        assert not any("failure" in message for message in line.heard)


TOKEN = b"the token"
CALLS = {
    "not of ours": b"GET / HTTP/1.1\r\n\r\n",
    "no text": b"\xff\xfe\n",
    "a list": b"[]\n",
    "nothing in it": b"{}\n",
    "a long line": b"x" * (1 << 18),
    "deep": b"[" * 20_000 + b"\n",
    "another token": b'{"token": "guessed", "rank": 1, "who": "me"}\n',
    "letters beyond ASCII": '{"token": "h\u00e9", "rank": 1, "who": "me"}\n'.encode(),
    "half a letter": b'{"token": "\\ud800", "rank": 1, "who": "me"}\n',
    "no rank": b'{"token": "the token", "who": "me"}\n',
    "no name": b'{"token": "the token", "rank": 1}\n',
    "beyond the world": b'{"token": "the token", "rank": 2, "who": "me"}\n',
    "before the world": b'{"token": "the token", "rank": -1, "who": "me"}\n',
    "no number": b'{"token": "the token", "rank": "1", "who": "me"}\n',
    "hardly a number": b'{"token": "the token", "rank": true, "who": "me"}\n',
    "a second rank 0": b'{"token": "the token", "rank": 0, "who": "me"}\n',
}


@pytest.mark.parametrize("says", CALLS.values(), ids=list(CALLS))
def test_strangers_are_not_let_in(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: they are hung up on; the ranks that come then hear of no death but a real one."""
    monkeypatch.setattr("lightning_dct.failures.hub.SETTLE_S", 0.0)
    hub = Hub(2, "Rank 0")
    stranger = call(hub)
    with suppress(ConnectionError):  # hung up on before it has said all
        stranger.sendall(says.replace(TOKEN, hub.token.encode()))
    assert is_hung_up_on(stranger)
    lines = [Line(hub, rank) for rank in range(2)]
    lines[1].die()
    assert lines[0].wait_for("failure") == {"blamed": [1], "failure": "Rank 1 has died"}
    lines[0].die()


def test_a_rank_is_let_in_once() -> None:
    """Oracle: the second one is hung up on, and the first one is the one whose death counts."""
    hub = Hub(3, "Rank 0")
    lines = [Line(hub, rank) for rank in range(2)]
    second = call(hub)
    write_line(second, {"token": hub.token, "rank": 1, "who": "me"})
    assert is_hung_up_on(second)
    lines.append(Line(hub, 2))
    lines[1].die()
    assert lines[0].wait_for("failure")["blamed"] == [1]
    lines[0].die()


def test_silent_callers_are_cut() -> None:
    """Oracle: beyond a number the eldest go at once, the rest when all ranks are in; nobody can
    call then.
    """
    hub = Hub(2, "Rank 0")
    silent = [call(hub) for _ in range(100)]
    assert all(is_hung_up_on(connection) for connection in silent[: -2 - STRANGERS])
    line = Line(hub, 1)
    assert all(is_hung_up_on(connection) for connection in silent)
    with pytest.raises(OSError):
        connect(["127.0.0.1"], hub.port, PATIENCE_S)
    line.die()
    hub.own.close()


def test_a_signal_is_acted_on_where_nobody_has_passed(job: Callable) -> None:
    """Oracle: all are asked, once; the place after the furthest of the ranks that are still
    there.
    """
    _, lines = job(4)
    lines[1].say({"left": True})
    for line in (lines[2], lines[3], lines[2]):
        line.say({"signal": 15})
    for line, passed in zip((lines[0], lines[2], lines[3]), (7, 9, 8), strict=True):
        assert line.wait_for("where") == {"where": 15}
        line.say({"asked": 15, "passed": passed})
    for line in (lines[0], lines[2], lines[3]):
        assert line.wait_for("act_on") == {"act_on": 15, "place": 10}
    lines[0].say({"left": True})
    assert lines[2].wait_for("over")
    for line in lines:
        assert sum("where" in message for message in line.heard) <= 1


@pytest.mark.parametrize("received", [b"{}\n[]\n", b"x" * (1 << 17), b"7\n", b"{\n", b"\xff\n"])
def test_what_is_no_message_is_refused(received: bytes) -> None:
    with pytest.raises(ValueError):
        read_lines(bytearray(), received, LONGEST_LINE)


def test_messages_come_in_pieces() -> None:
    buffer = bytearray()
    assert read_lines(buffer, b'{"left"') == []
    assert read_lines(buffer, b': true}\n{"a": 1}\n{') == [{"left": True}, {"a": 1}]
    assert buffer == b"{"


def test_questions_between_many_ranks_arrive(job: Callable) -> None:
    """As among 10,000 ranks, which a question lists twice: some 140,000 bytes."""
    _, lines = job(2)
    many = list(range(10_000))
    question = {
        "place": 1,
        "what": "a barrier",
        "said": "a barrier",
        "peers": [0, 1],
        "counts": [[many, 1], [many, 2]],
    }
    lines[1].say({**question, "rank": 1})
    assert lines[0].wait_for("ask")["ask"]["counts"][1] == [many, 2]
    lines[0].say({"agrees": 1, "peers": [0, 1], "apart": ""})
    assert lines[1].wait_for("agreed") == {"agreed": 1, "peers": [0, 1]}


def test_a_stranger_cannot_send_as_much(job: Callable) -> None:
    hub = Hub(2, "Rank 0")
    with call(hub) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(b"x" * (1 << 20))
        assert is_hung_up_on(stranger)
    Line(hub, 0).say({"left": True})


def test_each_rank_is_asked_by_those_that_count_other_places_with_it(job: Callable) -> None:
    """Ranks 0 and 1 are the stages of one pipeline, 2 and 3 those of another; 2 asks first, and
    then 0.

    Oracle: rank 1 hears both, because it shares more places with rank 0; rank 3 hears rank 2, and
    rank 0 as well. When all agree, they hear it once, though rank 1 has answered twice.
    """
    _, lines = job(4)
    for rank, pipeline in ((2, (2, 3)), (0, (0, 1))):
        counts = [[(0, 1, 2, 3), 1], [pipeline, 5]]
        lines[rank].say(
            {"place": 1, "what": "the end", "peers": (0, 1, 2, 3), "rank": rank, "counts": counts}
        )
        for other in {0, 1, 2, 3} - {rank}:
            assert lines[other].wait_for("ask")["ask"]["rank"] == rank
            lines[other].heard.clear()
    for rank in (1, 1, 3):
        lines[rank].say({"agrees": 1, "peers": (0, 1, 2, 3), "apart": ""})
    lines[3].say({"left": True})
    lines[1].die()
    for line in (lines[0], lines[2]):
        line.wait_for("failure")
        assert [message for message in line.heard if "agreed" in message] == [
            {"agreed": 1, "peers": [0, 1, 2, 3]}
        ]


def test_an_address_that_drops_packets_leaves_time_for_the_next() -> None:
    """As behind a firewall: of the first address the backlog is full, so nobody answers.

    The second takes a while.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as full,
        ExitStack() as waiting,
    ):
        port = server.getsockname()[1]
        full.bind(("127.0.0.2", port))
        full.listen(0)
        for _ in range(8):
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.2", port))

        def welcome() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                time.sleep(0.1)
                write_line(connection, WELCOME)

        thread = threading.Thread(target=welcome)
        thread.start()
        join_hub(["127.0.0.2", "127.0.0.1"], port, {"rank": 1}, 1.5).close()
        thread.join()
