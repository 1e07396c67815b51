"""What rank 0 makes of the hosts' addresses and versions before the ranks make a process group."""

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_dct.failures import meeting, waiting
from lightning_dct.failures.addresses import data_address, interfaces, is_loopback
from lightning_dct.failures.hosts import plan_of, unreachable

ADDRESSES = {"ada": "10.0.0.1", "bob": "10.0.0.2"}


def note(host: str, **more: Any) -> dict[str, Any]:
    """What a rank of a host says of itself."""
    known = {
        "rank": list(ADDRESSES).index(host),
        "host": host,
        "machine": f"machine of {host}",
        "is_first": True,
        "address": ADDRESSES[host],
        "problem": "",
        "towards": ADDRESSES[host],
        "master": ADDRESSES["ada"],
        "interfaces": {"lo": ["127.0.0.1"], "eth0": [ADDRESSES[host]]},
        "chosen": False,
        "versions": {"lightning_dct": "1", "torch": "2"},
        "port": 1,
    }
    return known | more


def test_hosts_that_fit_have_no_problem() -> None:
    plan = plan_of([note("ada"), note("bob")], "gloo")
    assert (plan["problem"], plan["is_split"], plan["interfaces"]) == ("", True, {})


@pytest.mark.parametrize("host", ["ada", "bob"])
def test_a_host_whose_name_leads_back_to_it_takes_the_interface_that_leads_out(host: str) -> None:
    """Oracle: the interface on the way to MASTER_ADDR, and on its own host the one that the others
    call.
    """
    notes = [note(one, **({"address": "127.0.1.1"} if one == host else {})) for one in ADDRESSES]
    plan = plan_of(notes, "gloo")
    assert not plan["problem"]
    assert plan["interfaces"] == {f"machine of {host}": ("eth0", ADDRESSES[host])}
    assert plan["firsts"][f"machine of {host}"]["address"] == ADDRESSES[host]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"address": "127.0.0.1", "chosen": True}, "leads every other host to itself"),
        ({"address": "127.0.1.1", "towards": "127.0.0.1", "master": "127.0.0.1"}, "by a VPN"),
        ({"problem": "`GLOO_SOCKET_IFNAME=eth9` names an interface that does not exist"}, "eth9"),
        ({"versions": {"lightning_dct": "2", "torch": "2"}}, "ada has 1, bob has 2"),
    ],
)
def test_what_keeps_hosts_apart_is_named(more: dict[str, Any], says: str) -> None:
    assert says in plan_of([note("ada"), note("bob", **more)], "gloo")["problem"]


def test_ranks_of_one_host_may_have_its_loopback_address() -> None:
    notes = [note("ada", address="127.0.0.1", rank=rank, is_first=rank == 0) for rank in range(2)]
    plan = plan_of(notes, "gloo")
    assert (plan["problem"], plan["is_split"]) == ("", False)


def test_a_host_that_cannot_be_reached_is_named_with_its_interfaces() -> None:
    said = unreachable([(note("bob"), note("ada"), "no answer")], "gloo")
    for word in (
        "'bob' cannot connect to 'ada' at 10.0.0.1",
        "no answer",
        "ufw allow from 10.0.0.2",
        "eth0 10.0.0.1",
    ):
        assert word in said
    assert unreachable([], "gloo") == ""


def test_an_interface_that_does_not_exist_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = interfaces()
    loopback = next(name for name, addresses in known.items() if "127.0.0.1" in addresses)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    assert data_address("gloo", known) == ("127.0.0.1", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing9")
    address, problem = data_address("gloo", known)
    assert (address, "nothing9" in problem) == ("", True)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    address, problem = data_address("gloo", known)
    assert problem == ""
    assert is_loopback(address) or any(address in addresses for addresses in known.values())


def test_a_port_without_a_listener_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert waiting.knock("127.0.0.1", port) == ""
    assert "nothing listens" in waiting.knock("127.0.0.1", port)
    assert "knows no address" in waiting.knock("no.such.name.invalid", port)


def test_who_waits_says_so_again_and_again_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: it has been asked twice before the end, and never afterwards."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(waiting, "EVERY_S", 0.01)
    asked = threading.Semaphore(0)

    def describe() -> str:
        asked.release()
        return "for somebody"

    with waiting.waiting(3, describe):
        assert asked.acquire(timeout=60)
        assert asked.acquire(timeout=60)
    said = capsys.readouterr().err
    assert "lightning_dct, rank 3 on " in said
    assert "s for somebody" in said


class ReadsLate:
    """A store whose plan takes a while to be read."""

    def __init__(self, store: Any, events: list[str]) -> None:
        self._store = store
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        if key.endswith("/plan"):
            time.sleep(0.3)
            self._events.append("rank 1 has read it")
        return self._store.get(key)


def test_rank_0_ends_a_failed_meeting_once_the_others_know_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds the store that they read."""
    plan = {"problem": "no way", "is_split": False, "interfaces": {}, "firsts": {}, "extra": {}}
    monkeypatch.setattr(meeting, "plan_of", lambda *_: plan)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    events: list[str] = []
    first, second = (
        meeting.Meeting(meeting.Job(rank, 2, "127.0.0.1", port), timedelta(seconds=20))
        for rank in range(2)
    )
    second.store = ReadsLate(second.store, events)

    def hold(one: meeting.Meeting) -> None:
        with pytest.raises(RuntimeError, match="no way"):
            one.hold()
        events.append(f"rank {one.job.rank} ends")

    threads = [threading.Thread(target=hold, args=(one,)) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[0] == "rank 1 has read it"
    assert sorted(events[1:]) == ["rank 0 ends", "rank 1 ends"]
