"""The hub's verdicts, with all ranks in this process: who is blamed, and when nobody is."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_dct.failures.hub import Hub
from lightning_dct.failures.sockets import connect, read_lines, write_line

# Far more than anything here takes on a quiet machine.
PATIENCE_S = 60.0


class Line:
    """One rank's connection, without the thread and the exit of a real one."""

    def __init__(self, hub: Hub, rank: int, token: str | None = None) -> None:
        self.connection = connect(["127.0.0.1"], hub.port, PATIENCE_S)
        self.connection.settimeout(PATIENCE_S)
        self._buffer = bytearray()
        self.heard: list[dict] = []
        self.say({"token": hub.token if token is None else token, "rank": rank, "who": f"Rank {rank}"})

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
        hub = Hub(world_size)
        lines = [Line(hub, rank) for rank in range(world_size)]
        opened.extend(lines)
        for line in lines:
            line.wait_for("welcome")
        return hub, lines

    yield of
    for line in opened:
        line.connection.close()


def hub_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning_dct hub"]


def test_the_dead_are_blamed_before_those_that_fail_of_it(job: Callable) -> None:
    """Rank 1 fails first, but only because rank 2 has died."""
    _, lines = job(3)
    lines[1].say({"failed": "RuntimeError: connection closed by peer"})
    lines[2].die()
    for line in lines[:2]:
        assert line.wait_for("verdict") == {"blamed": [2], "verdict": "Rank 2 has died"}


def test_who_fails_alone_is_blamed(job: Callable) -> None:
    _, lines = job(3)
    lines[1].say({"failed": "ValueError: no"})
    for line in lines:
        assert line.wait_for("verdict") == {"blamed": [1], "verdict": "Rank 1 has failed: ValueError: no"}


def test_nobody_is_blamed_when_all_fail(job: Callable) -> None:
    _, lines = job(3)
    lines[0].say({"left": True})
    for line in lines[1:]:
        line.say({"failed": "ValueError: no"})
    for line in lines[1:]:
        assert line.wait_for("verdict") == {"blamed": [], "verdict": ""}


def test_a_rank_that_fails_later_hears_the_same(job: Callable) -> None:
    _, lines = job(2)
    lines[1].die()
    assert lines[0].wait_for("verdict")["blamed"] == [1]
    lines[0].heard.clear()
    lines[0].say({"failed": "RuntimeError: connection closed by peer"})
    assert lines[0].wait_for("verdict")["blamed"] == [1]


def test_who_has_left_may_go(job: Callable) -> None:
    """Oracle: a later death is the first news; the others hear that the hub may go with rank 0."""
    _, lines = job(3)
    lines[0].say({"left": True})
    assert lines[1].wait_for("hub_may_end")
    lines[0].die()
    lines[2].die()
    assert lines[1].wait_for("verdict") == {"blamed": [2], "verdict": "Rank 2 has died"}


def test_the_hub_ends_with_the_last_rank(job: Callable) -> None:
    before = set(hub_threads())
    _, lines = job(2)
    (thread,) = set(hub_threads()) - before
    for line in lines:
        line.say({"left": True})
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_strangers_are_not_let_in(job: Callable) -> None:
    """Oracle: the ranks hear of no death when they hang up, and still hear of a real one."""
    hub = Hub(2)
    stranger = Line(hub, 1, token="guessed")
    noise = socket.create_connection(("127.0.0.1", hub.port))
    noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
    lines = [Line(hub, rank) for rank in range(2)]
    for line in lines:
        line.wait_for("welcome")
    assert not stranger.heard
    stranger.die()
    noise.close()
    lines[0].say({"failed": "ValueError: no"})
    assert lines[1].wait_for("verdict")["blamed"] == [0]
    for line in lines:
        line.die()


@pytest.mark.parametrize("received", [b"{}\n[]\n", b"x" * (1 << 17), b"7\n", b"{\n", b"\xff\n"])
def test_what_is_no_message_is_refused(received: bytes) -> None:
    with pytest.raises(ValueError):
        read_lines(bytearray(), received)


def test_messages_come_in_pieces() -> None:
    buffer = bytearray()
    assert read_lines(buffer, b'{"left"') == []
    assert read_lines(buffer, b': true}\n{"a": 1}\n{') == [{"left": True}, {"a": 1}]
    assert buffer == b"{"
