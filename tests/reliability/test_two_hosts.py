"""Two hosts that cannot start together: each says why, and the remedy works.

Skipped without network namespaces.
"""

import shutil
import time
from collections.abc import Iterator

import pytest

from reliability.rooms import PORT, Room, two_rooms
from reliability.time_faults import in_words, measure
from reliability.two_hosts import (
    check,
    train,
    train_and_die,
    train_for_long,
    train_in_loop,
    train_one_replica,
)

LIFELINES = 29501
RANGE = "40000-40999"
SHORT_DROP_S = 1.5  # much less than the ranks of two_hosts.py wait for a host


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


def start_both(rooms: list[Room], lifelines: bool | int = True, **on_bob: str) -> None:
    for rank, (room, more) in enumerate(zip(rooms, ({}, on_bob), strict=True)):
        room.train(train, room.disk, lifelines, rank=rank, master=rooms[0].address, **more)


def start_loop(
    rooms: list[Room], rank: int, kind: str, lifelines: bool | int = True, **more: str
) -> None:
    places = {"RANK": str(rank), "WORLD_SIZE": "2", **more}
    rooms[rank].train(train_in_loop, kind, lifelines, rank=rank, master=rooms[0].address, **places)


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


needs_firewall = pytest.mark.skipif(
    shutil.which("nft") is None, reason="needs nft (Debian: apt-get install nftables)"
)


@needs_firewall
def test_check_finds_the_firewall(rooms: list[Room]) -> None:
    """Oracle: which ports are open; and the verdict's exit status, the same on both hosts."""
    ada, bob = rooms
    for status, open_ports in ((1, [PORT]), (0, [])):
        for room in rooms if open_ports else ():
            room.let_in_only(*open_ports)
        ada.start(check, "--listen")
        ada.has_said("On the other host run")
        bob.start(check, ada.address)
        for room in rooms:
            room.has_said(
                "can start."
                if status == 0
                else "bob → ada at 10.213.7.1, ports that the system chooses: no"
            )
            room.ends(status)
            room.end()
            room.open_firewall()
    bob.start(check, ada.address)
    bob.has_said("Run `lightning-dct check --listen` there")
    bob.ends(1)
    bob.end()
    # A job listens there, or an agent of torchrun that waits without a word.
    ada.train(train, ada.disk, rank=0, master=ada.address)
    ada.has_said("for rank 1 of 2")
    bob.start(check, ada.address)
    bob.has_said("answers, but not as `check` does")
    bob.ends(1)


@needs_firewall
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


@needs_firewall
@pytest.mark.parametrize("kind", ["trainer", "fabric", "plain", "torchrun"])
def test_a_few_open_ports_are_enough(rooms: list[Room], kind: str) -> None:
    """Oracle: they train behind a firewall, and rank 0 listens where it shall; under torchrun it
    also has a store at the next port.
    """
    for room in rooms:
        room.run("sysctl", "-w", f"net.ipv4.ip_local_port_range={RANGE.replace('-', ' ')}")
        room.let_in_only(PORT, LIFELINES, RANGE)
    try:
        if kind == "torchrun":
            for rank, room in enumerate(rooms):
                room.torchrun(train, room.disk, LIFELINES, rank=rank, master=rooms[0].address)
            for room in rooms:
                at = f"at {rooms[0].address}, port {LIFELINES + 1} (no answer"
                room.has_said(f"'bob' cannot connect to 'ada' {at}")
            for room in rooms:
                room.end()
                room.open_firewall()
                room.let_in_only(PORT, LIFELINES, LIFELINES + 1, RANGE)
        if kind == "trainer":
            start_both(rooms, LIFELINES)
        elif kind == "torchrun":
            for rank, room in enumerate(rooms):
                room.torchrun(train, room.disk, LIFELINES, rank=rank, master=rooms[0].address)
        else:
            for rank in (0, 1):
                start_loop(rooms, rank, kind, LIFELINES)
        rooms[0].has_said(f"listens at {LIFELINES}.")
        both_train(rooms)
    finally:
        for room in rooms:
            room.open_firewall()
            room.run("sysctl", "-w", "net.ipv4.ip_local_port_range=32768 60999")


def test_an_interface_that_is_not_there_is_named_on_both_hosts(rooms: list[Room]) -> None:
    start_both(rooms, GLOO_SOCKET_IFNAME="eth9")
    both_say(
        rooms, f"on host 'bob'; name one of its interfaces: lo 127.0.0.1, eth0 {rooms[1].address}"
    )
    start_both(rooms, GLOO_SOCKET_IFNAME="eth0")
    both_train(rooms)


@pytest.mark.usefixtures("rooms")
def test_the_command_times_faults() -> None:
    """Oracle: both hosts are seen to name a fault, and one that is not there is not."""
    for seen in measure("hand", "plain", "wrong interface on B"):
        assert seen.seconds is not None
        assert seen.message.startswith("GLOO_SOCKET_IFNAME=eth9` names an interface")
    assert in_words([12.3, 12.7]) == "12 to 13 s"
    assert in_words([12.3, None]) == "-"


def test_an_address_that_the_other_host_cannot_reach_is_named(rooms: list[Room]) -> None:
    """An interface of a network in which the other host is not, such as that of a VPN."""
    bob = rooms[1]
    bob.run("ip", "link", "add", "vpn0", "type", "veth", "peer", "name", "vpn1")
    try:
        bob.run("ip", "address", "add", "10.9.0.1/24", "dev", "vpn0")
        for end in ("vpn0", "vpn1"):
            bob.run("ip", "link", "set", end, "up")
        start_both(rooms, GLOO_SOCKET_IFNAME="vpn0")
        both_say(rooms, "'ada' cannot connect to 'bob' at 10.9.0.1")
        start_both(rooms, GLOO_SOCKET_IFNAME="eth0")
        both_train(rooms)
    finally:
        bob.run("ip", "link", "delete", "vpn0")


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
    whom = (
        f"for rank 1 of 2 at {rooms[0].address}",
        f"for rank 0 at {rooms[0].address}, port {PORT}",
    )[first]
    for rank in (first, 1 - first):
        rooms[rank].train(train, rooms[rank].disk, rank=rank, master=rooms[0].address)
        rooms[first].has_said(whom)
    both_train(rooms)


def test_a_name_of_rank_0_that_leads_back_is_named(rooms: list[Room]) -> None:
    rooms[1].knows = ["127.0.1.1 ada bob"]
    rooms[1].train(train, rooms[1].disk, rank=1, master="ada")
    rooms[1].has_said("That is this host itself, 127.0.1.1")


def test_other_versions_are_named_on_both_hosts(rooms: list[Room]) -> None:
    start_both(rooms, VERSION="0.0.1")
    both_say(rooms, "bob has 0.0.1. Install the same one on all")


@pytest.mark.parametrize("kind", ["fabric", "plain"])
def test_loops_without_a_trainer_say_the_same(rooms: list[Room], kind: str) -> None:
    """Who is missing, then a wrong interface; the remedy works."""
    start_loop(rooms, 1, kind, GLOO_SOCKET_IFNAME="eth9")
    rooms[1].has_said(f"for rank 0 at {rooms[0].address}, port {PORT}")
    start_loop(rooms, 0, kind)
    both_say(rooms, "on host 'bob'; name one of its interfaces: lo 127.0.0.1, eth0")
    for rank in (0, 1):
        start_loop(rooms, rank, kind)
    both_train(rooms)


@needs_firewall
@pytest.mark.parametrize("kind", ["fabric", "plain"])
def test_loops_without_a_trainer_name_a_closed_port(rooms: list[Room], kind: str) -> None:
    for room in rooms:
        room.let_in_only(PORT)
    try:
        for rank in (0, 1):
            start_loop(rooms, rank, kind)
        both_say(rooms, f"'bob' cannot connect to 'ada' at {rooms[0].address}")
    finally:
        for room in rooms:
            room.open_firewall()


def result(room: Room) -> str:
    """What a training has ended with."""
    room.has_said("ends with")
    room.has_said("].")
    room.ends(0)
    return room.text.partition("ends with")[2].partition("].")[0]


def run_both(
    rooms: list[Room], folder: str, kind: str, dies: bool = False, checkpoint: str | None = None
) -> list[str]:
    """Train with each host's ``default_root_dir`` in a folder of its own; rank 0 is on the first
    host.
    """
    for rank, room in enumerate(rooms):
        place = room.disk / room.name / folder
        room.train(train_and_die, place, kind, dies, checkpoint, rank=rank, master=rooms[0].address)
    for room in rooms if dies else ():
        room.has_said("dies")
        room.ends(0)
    found = [] if dies else [result(room) for room in rooms]
    for room in rooms:
        room.end()
    return found


@pytest.mark.parametrize("kind", ["plain", "tables", "shards"])
def test_hosts_without_a_shared_disk_resume_bit_for_bit(rooms: list[Room], kind: str) -> None:
    """Oracle: a run that was never killed.

    Nobody copies anything, also if the hosts have swapped their ranks.
    """
    never_killed = run_both(rooms, f"{kind} whole", kind)
    run_both(rooms, kind, kind, dies=True)
    files = [
        {path.name for path in (room.folder / room.name / kind).rglob("*.ckpt")} for room in rooms
    ]
    assert files == [{"last.ckpt", "epoch=0-step=8.ckpt", "hpc_ckpt_1.ckpt"}, {"hpc_ckpt_1.ckpt"}]
    kept = [room.folder / room.name / "kept" for room in rooms]
    for room, copy in zip(rooms, kept, strict=True):
        shutil.copytree(room.folder / room.name / kind, copy)
    assert (
        run_both(rooms, kind, kind, checkpoint="hpc" if kind == "tables" else "last")
        == never_killed
    )
    for room, copy in zip(rooms, kept, strict=True):
        shutil.rmtree(room.folder / room.name / kind)
        shutil.move(copy, room.folder / room.name / kind)
    if kind != "plain":
        path = rooms[0].disk / "ada" / kind / "checkpoints" / "last.ckpt"
        assert run_both(rooms[::-1], "swapped", kind, checkpoint=str(path)) == never_killed
        return
    shutil.rmtree(rooms[1].folder / "bob" / kind)  # its disk is broken
    for rank, room in enumerate(rooms):
        room.train(
            train_and_die,
            room.disk / room.name / kind,
            kind,
            False,
            "last",
            rank=rank,
            master=rooms[0].address,
        )
    both_say(rooms, f"Rank 1 wrote it on 'bob' as '{rooms[1].disk}/bob/{kind}")


def test_a_replica_whose_shards_are_on_two_disks_is_not_saved(rooms: list[Room]) -> None:
    """Oracle: both hosts say which shards are not where, and no half of a checkpoint is left."""
    for rank, room in enumerate(rooms):
        room.train(train_one_replica, room.disk / "halves", rank=rank, master=rooms[0].address)
    both_say(rooms, "because this replica spans hosts without a shared disk")
    assert not [path for room in rooms for path in (room.folder / "halves").rglob("*.ckpt")]


def test_a_link_that_drops_ends_both_hosts_and_they_continue(rooms: list[Room]) -> None:
    """Oracle: whom each host names; and the step of the last save, from which both go on."""
    for steps in (100_000, 24):
        for rank, room in enumerate(rooms):
            room.train(
                train_for_long,
                room.disk / room.name / "long",
                steps,
                rank=rank,
                master=rooms[0].address,
            )
        if steps == 24:
            break
        for room in rooms:
            room.has_said("step 12")
        rooms[1].host.plug(False)
        try:
            for room, other in zip(rooms, (1, 0), strict=True):
                room.has_said(f"Rank {other} (process")
                room.has_said("cannot be reached any more. This rank ends too")
                room.processes[0].join()
        finally:
            rooms[1].host.plug(True)
        for room in rooms:
            room.end()
    for room in rooms:
        room.has_said("trained")
        room.ends(0)
        assert "step 1 " not in room.text


@pytest.mark.parametrize("what", ["drops", "reboots"])
def test_torchrun_starts_both_ranks_again(rooms: list[Room], what: str) -> None:
    """A link that drops, or a host that loses power and then starts its command again.

    Oracle: whom the hosts name; and the step of the last save, from which both go on.
    """
    ada, bob = rooms

    def start(rank: int) -> None:
        place = rooms[rank].disk / rooms[rank].name / what
        restarts = {"rank": rank, "master": ada.address, "restarts": 1}
        rooms[rank].torchrun(train_for_long, place, 100_000, **restarts)

    for rank in (0, 1):
        start(rank)
    for room in rooms:
        room.has_said("step 12 ")
    try:
        if what == "drops":
            bob.host.plug(False)
            time.sleep(SHORT_DROP_S)
            bob.host.plug(True)
            for room in rooms:
                room.has_said(f"step {room.step + 12} ")
                assert "cannot be reached" not in room.text
        bob.host.plug(False)
        if what == "reboots":
            bob.run("sysctl", "-w", "net.ipv4.tcp_orphan_retries=1")
            bob.kill_all()
        else:
            bob.has_said("Rank 0 (process")
        ada.has_said("Rank 1 (process")
    finally:
        bob.host.plug(True)
    if what == "reboots":
        bob.end()
        start(1)
    ada.has_said("step ", after="Restored all states from the checkpoint")
    bob.has_said("step ", after="" if what == "reboots" else "Rank 0 (process")
    assert ada.text.count("step 1 ") == 1
    assert bob.text.count("step 1 ") == (0 if what == "reboots" else 1)
