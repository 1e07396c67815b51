"""Times how long two hosts take to name a fault, each in its own output.

    sudo python tests/reliability/time_faults.py

Two network namespaces with a disk each (``rooms.py``), one rank on each, the package's own
patience. A fault at the start counts from the moment when the last rank starts, one in mid-run from
the moment when the link drops. Ranks are forked from a process that has imported everything, so
imports do not count.
"""

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "experiments")]

from reliability.rooms import PORT, Room, two_rooms
from reliability.two_hosts import train_for_long, train_in_loop

ENDLESS = 100_000  # steps
STEP_S = 0.1
START_S = 240.0  # for a training to begin, on a busy machine
SILENT_S = 60.0  # without a word, a host counts as silent
BACK_S = 60.0  # for ranks to go on, after the link is back
REBOOT_S = 15.0
EXCERPT = 80  # characters of a message
SOON_S = 30.0
SILENT = "nothing of it"
LOOPS = ("trainer", "fabric", "plain")
LAUNCHERS = ("hand", "torchrun")


class Job:
    """A training on two hosts, by a kind of loop and with or without torchrun."""

    def __init__(self, rooms: list[Room], launcher: str, kind: str) -> None:
        self.rooms = rooms
        self.launcher = launcher
        self.kind = kind

    def start(self, rank: int, master: str = "", resumes: bool = False, **more: str) -> None:
        """Start the rank of a host."""
        room = self.rooms[rank]
        folder = room.disk / room.name
        master = master or self.rooms[0].address
        more["PATIENT"] = "yes"
        if self.kind == "trainer":
            function: Callable[..., None] = train_for_long
            arguments: tuple[object, ...] = (folder, ENDLESS, STEP_S)
        else:
            function = train_in_loop
            saves = folder if self.kind == "fabric" else ""
            arguments = (self.kind, True, ENDLESS, STEP_S, saves, resumes)
        if self.launcher == "torchrun":
            room.torchrun(function, *arguments, rank=rank, master=master, restarts=3, **more)
        else:
            places = {"RANK": str(rank), "WORLD_SIZE": "2", **more}
            room.train(function, *arguments, rank=rank, master=master, **places)

    def start_both(self, on_ada: dict[str, str] | None = None, **on_bob: str) -> None:
        """Start both ranks at once."""
        self.start(0, **(on_ada or {}))
        self.start(1, **on_bob)

    def is_under_way(self) -> None:
        """Start both ranks, and wait until they have saved."""
        self.start_both()
        for room in self.rooms:
            room.has_said("step 12", patience_s=START_S)


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        words: What each host is to say; empty for one that is not there.
        happens: Brings it about; returns the moment from which time counts.
        ends: Seconds after which the link is back.
    """

    words: tuple[str, str]
    happens: Callable[[Job], float]
    ends: float | None = None


def closed_ports(job: Job) -> float:
    for room in job.rooms:
        room.let_in_only(PORT)
    job.start_both()
    return time.monotonic()


def wrong_interface(job: Job) -> float:
    job.start_both(GLOO_SOCKET_IFNAME="eth9")
    return time.monotonic()


def alone(rank: int) -> Callable[[Job], float]:
    def happens(job: Job) -> float:
        job.start(rank)
        return time.monotonic()

    return happens


def other_version(job: Job) -> float:
    job.start_both(VERSION="0.0.1")
    return time.monotonic()


def another_network(job: Job) -> None:
    """The first host has another address, in a network that the second one is not in."""
    ada, bob = job.rooms
    ada.run("sysctl", "-w", "net.ipv4.conf.all.arp_ignore=1")
    ada.run("ip", "link", "add", "vpn0", "type", "veth", "peer", "name", "vpn1")
    ada.run("ip", "address", "add", "10.9.0.1/24", "dev", "vpn0")
    for end in ("vpn0", "vpn1"):
        ada.run("ip", "link", "set", end, "up")
    bob.run("ip", "route", "add", "default", "dev", "eth0")


def wrong_address(job: Job) -> float:
    another_network(job)
    job.start_both({"master": "10.9.0.1"}, master="10.9.0.1")
    return time.monotonic()


def wrong_network(job: Job) -> float:
    another_network(job)
    job.start_both({"GLOO_SOCKET_IFNAME": "vpn0"})
    return time.monotonic()


def name_of_itself(job: Job) -> float:
    job.rooms[1].knows = ["127.0.1.1 ada bob"]
    job.start_both({"master": "ada"}, master="ada")
    return time.monotonic()


def lost_disk(job: Job) -> float:
    job.is_under_way()
    for room in job.rooms:
        room.end()
    for folder in job.rooms[1].folder.iterdir():
        shutil.rmtree(folder)
    for rank in (0, 1):
        job.start(rank, resumes=True)
    return time.monotonic()


def dropped_link(job: Job) -> float:
    job.is_under_way()
    job.rooms[1].host.plug(False)
    return time.monotonic()


def reboot(job: Job) -> float:
    """The second host loses power, and with it all that its kernel knows of connections."""
    job.is_under_way()
    bob = job.rooms[1]
    bob.run("sysctl", "-w", "net.ipv4.tcp_orphan_retries=1")
    bob.host.plug(False)
    began = time.monotonic()
    bob.kill_all()
    return began


EACH_OTHER = ("Rank 1 (process", "Rank 0 (process")
FAULTS = {
    "only MASTER_PORT open": Fault(("cannot connect to 'ada'",) * 2, closed_ports),
    "wrong interface on B": Fault(("GLOO_SOCKET_IFNAME=eth9` names an",) * 2, wrong_interface),
    "A not started": Fault(("", "for rank 0 at"), alone(1)),
    "B not started": Fault(("for rank 1 of 2", ""), alone(0)),
    "another version on B": Fault(
        ("the hosts have different versions of lightning_dct",) * 2, other_version
    ),
    "MASTER_ADDR out of B's reach": Fault(("for rank 1 of 2", "for rank 0 at"), wrong_address),
    "A's interface out of B's reach": Fault(("cannot connect to 'ada'",) * 2, wrong_network),
    "MASTER_ADDR is B's own name": Fault(
        ("for rank 1 of 2", "That is this host itself"), name_of_itself
    ),
    "B's disk lost, resumed": Fault(("Rank 1 wrote it on 'bob'",) * 2, lost_disk),
    "link down for 20 s": Fault(EACH_OTHER, dropped_link, 20.0),
    "link down for 2 minutes": Fault(EACH_OTHER, dropped_link, 120.0),
    "B reboots": Fault(("Rank 1 (process", ""), reboot, REBOOT_S),
}
# The agents of torchrun wait for each other before any code of the package runs.
MISSING = "waiting for clients. 1/2 clients joined"
NO_ANSWER = "while trying to connect to ("
NO_ROUTE = "failed to connect to any network address of ("
AGENTS_SAY = {
    "A not started": ("", NO_ANSWER),
    "B not started": (MISSING, ""),
    "MASTER_ADDR out of B's reach": (MISSING, NO_ROUTE),
    "MASTER_ADDR is B's own name": (MISSING, NO_ANSWER),
}
# Nothing of these is handed over, or read, by the package.
LEFT_OUT = {("plain", "B's disk lost, resumed")}


class Seen(NamedTuple):
    """What a host has said, and when."""

    seconds: float | None
    message: str


def watch(job: Job, fault: Fault, began: float) -> list[Seen]:
    """Wait until both hosts have named a fault, or go on without."""
    seen: dict[int, Seen] = {}
    awaited = [rank for rank, words in enumerate(fault.words) if words]
    ends = None if fault.ends is None else began + fault.ends
    given_up = began + SILENT_S if ends is None else max(ends + BACK_S, began + SILENT_S)
    before: list[int] = []
    while len(seen) < len(awaited) and (now := time.monotonic()) < given_up:
        for rank in awaited:
            place = job.rooms[rank].text.find(fault.words[rank])
            if place >= 0 and rank not in seen:
                excerpt = job.rooms[rank].text[place : place + EXCERPT]
                seen[rank] = Seen(now - began, f"{excerpt} ...")
        if ends is not None and now > ends and not before:
            job.rooms[1].host.plug(True)
            before = [room.step for room in job.rooms]
        if before and not seen:
            after = [job.rooms[rank].step for rank in awaited]
            if all(new > old + 3 for new, old in zip(after, before, strict=False)):
                return [Seen(now - began, "goes on")] * 2
        time.sleep(0.1)
    silent = Seen(None, f"{SILENT} in {given_up - began:.0f} s")
    absent = Seen(None, "")
    return [seen.get(rank, silent if rank in awaited else absent) for rank in (0, 1)]


def measure(launcher: str, kind: str, name: str) -> tuple[Seen, Seen]:
    """What each host has said of a fault, in one kind of loop."""
    with tempfile.TemporaryDirectory() as folder, two_rooms(Path(folder)) as rooms:
        job = Job(rooms, launcher, kind)
        fault = FAULTS[name]
        if launcher == "torchrun" and name in AGENTS_SAY:
            fault = fault._replace(words=AGENTS_SAY[name])
        began = fault.happens(job)
        ada, bob = watch(job, fault, began)
        logs = [room.log.read_text(errors="replace")[-1000:] for room in rooms]
    if SILENT in ada.message + bob.message:
        print(f"--- {launcher} {kind}, {name}:", *logs, sep="\n", file=sys.stderr, flush=True)
    print(f"{name}, {launcher} {kind}: {ada} {bob}", file=sys.stderr, flush=True)
    return ada, bob


def in_words(seconds: list[float | None]) -> str:
    """Their range; a dash if a host is not there, or has said nothing."""
    known = [one for one in seconds if one is not None]
    if len(known) < len(seconds):
        return "-"
    first, last = (f"{one:.0f}" for one in (min(known), max(known)))
    return f"{last} s" if first == last else f"{first} to {last} s"


def main() -> int:
    """Print a table, each row of all loops; 1 if a host that is there took over half a minute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--at-once", type=int, default=3, help="trainings beside each other")
    chosen = parser.parse_args()
    rows = [(name, launcher) for launcher in chosen.launchers for name in chosen.faults]
    cases = [
        (launcher, kind, name)
        for name, launcher in rows
        for kind in chosen.loops
        if (kind, name) not in LEFT_OUT
    ]
    # Processes, because a start changes the environment of its process for a moment.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.at_once, mp_context=spawn) as pool:
        seen = dict(zip(cases, pool.map(measure, *zip(*cases, strict=True)), strict=True))
    print("| fault | started by | A | B | A's message | B's message |")
    print("|---|---|---:|---:|---|---|")
    is_late = False
    for name, launcher in rows:
        of_loops = [seen[case] for case in cases if case[0] == launcher and case[2] == name]
        if not of_loops:
            continue
        hosts = list(zip(*of_loops, strict=True))
        times = [in_words([one.seconds for one in host]) for host in hosts]
        messages = [host[0].message for host in hosts]
        print(f"| {' | '.join([name, launcher, *times, *messages])} |")
        is_late |= any(
            one.message and (one.seconds is None or one.seconds > SOON_S)
            for host in hosts
            for one in host
        )
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main())
