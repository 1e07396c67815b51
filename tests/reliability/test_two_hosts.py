"""Two hosts that cannot start together: each says why, and the remedy works. Skipped without network namespaces."""

import shutil
from collections.abc import Iterator

import pytest

from reliability.rooms import PORT, Room, two_rooms
from reliability.two_hosts import train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Room]]:
    making = two_rooms(tmp_path_factory.mktemp("rooms"))
    try:
        rooms = making.__enter__()
    except RuntimeError as error:
        pytest.skip(str(error))
    yield rooms
    making.__exit__(None, None, None)


@pytest.fixture
def rooms(made: list[Room]) -> Iterator[list[Room]]:
    known = [list(room.knows) for room in made]
    yield made
    for room, lines in zip(made, known, strict=True):
        room.end()
        room.knows = lines


def start_both(rooms: list[Room], **on_bob: str) -> None:
    for rank, (room, more) in enumerate(zip(rooms, ({}, on_bob), strict=True)):
        room.train(train, room.disk, rank=rank, master=rooms[0].address, **more)


def both_train(rooms: list[Room]) -> None:
    for room in rooms:
        room.has_said("trained")
        room.ends(0)
        room.end()


def both_say(rooms: list[Room], words: str) -> None:
    for room in rooms:
        room.has_said(words)
        room.ends(1)
        room.end()


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft for a firewall (Debian: `apt-get install nftables`)")
def test_ports_that_a_firewall_closes_are_named_on_both_hosts(rooms: list[Room]) -> None:
    for room in rooms:
        room.let_in_only(PORT)
    try:
        start_both(rooms)
        both_say(rooms, f"'bob' cannot connect to 'ada' at {rooms[0].address}")
    finally:
        for room in rooms:
            room.open_firewall()
    start_both(rooms)
    both_train(rooms)


def test_an_interface_that_is_not_there_is_named_on_both_hosts(rooms: list[Room]) -> None:
    start_both(rooms, GLOO_SOCKET_IFNAME="eth9")
    both_say(rooms, f"on host 'bob'; name one of its interfaces: lo 127.0.0.1, eth0 {rooms[1].address}")
    start_both(rooms, GLOO_SOCKET_IFNAME="eth0")
    both_train(rooms)


def test_hosts_whose_names_lead_back_to_them_train(rooms: list[Room]) -> None:
    """As on Debian and Ubuntu, where a host's own name is 127.0.1.1."""
    for room in rooms:
        room.knows = [f"127.0.1.1 {room.name}"]
    start_both(rooms)
    for room in rooms:
        room.has_said(f"gloo uses the interface eth0 ({room.address})")
    both_train(rooms)


@pytest.mark.parametrize("first", [0, 1])
def test_a_host_that_is_alone_says_for_whom_it_waits(rooms: list[Room], first: int) -> None:
    """Rank 0 waits for the other, and the other one for rank 0; then that is started."""
    whom = (f"for rank 1 of 2 at {rooms[0].address}", f"for rank 0 at {rooms[0].address}, port {PORT}")[first]
    for rank in (first, 1 - first):
        rooms[rank].train(train, rooms[rank].disk, rank=rank, master=rooms[0].address)
        rooms[first].has_said(whom)
    both_train(rooms)


def test_a_name_of_rank_0_that_leads_back_is_named(rooms: list[Room]) -> None:
    rooms[1].knows = ["127.0.1.1 ada bob"]
    rooms[1].train(train, rooms[1].disk, rank=1, master="ada")
    rooms[1].has_said("That is this host itself, 127.0.1.1")


def test_other_versions_are_named_on_both_hosts(rooms: list[Room]) -> None:
    for rank, (room, version) in enumerate(zip(rooms, ("", "0.0.1"), strict=True)):
        room.train(train, room.disk, version, rank=rank, master=rooms[0].address)
    both_say(rooms, "bob has 0.0.1. Install the same one on all")
