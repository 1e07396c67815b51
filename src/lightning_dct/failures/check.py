"""``lightning-dct check``: finds out from two hosts, before a job starts, whether its ranks will
reach each other.

One host listens and the other calls it. Both tell what they are, connect to each other at ports
that the system chooses, as ranks do, and time the link. Each then prints the same table and one
verdict.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dct.__about__ import __version__
from lightning_dct.config import UsageError
from lightning_dct.cost.timing import measure_link
from lightning_dct.failures import sockets
from lightning_dct.failures.addresses import (
    VARIABLES,
    data_address,
    in_words,
    interfaces,
    is_loopback,
    machine,
)
from lightning_dct.failures.hosts import MeetingPlan, RankNote, must_connect, plan_of, unreachable
from lightning_dct.failures.process_group import init_process_group
from lightning_dct.failures.sockets import address_towards
from lightning_dct.failures.waiting import knock
from lightning_dct.traffic import plain_table

PORT = 29500  # that torchrun and Lightning take by default
HELLO = "lightning-dct check"
PATIENCE = timedelta(minutes=10)  # for all ranks of a job to come
PATIENCE_S = 30.0  # for the other host's next message
REACH_S = 8.0
PINGS = 20
FIRST_BYTES = 1 << 18
MOST_BYTES = 1 << 28
ENOUGH_S = 1.0  # of sending, for a rate
LONGEST_LINE = 1 << 20


class HostNote(RankNote):
    """What a host says of itself."""

    python: str  # its version
    gpus: int
    time: float  # seconds since the epoch


@dataclass
class Report:
    """What two hosts have found out, the listening one first.

    Attributes:
        notes: What each host says of itself.
        rates: Bits a second from the listening host to the other, and back.
        latency: Seconds of a round trip.
        problems: Sentences; none if ranks of the two hosts can start.
    """

    notes: list[HostNote]
    backend: str
    reached: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    latency: float = 0.0
    problems: list[str] = field(default_factory=list)


class _Line:
    """A connection of JSON messages and plain bytes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._file = connection.makefile("rb")

    def say(self, message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Any:
        line = self._file.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other host has ended the check")
        return json.loads(line)

    def take(self, count: int) -> None:
        while count:
            count -= len(self._file.read(min(count, 1 << 16))) or _ended()


def _ended() -> int:
    raise ConnectionError("the other host has ended the check")


def listen(port: int = PORT) -> Report:
    """Wait for the other host to call at a port, for any time, and check with it.

    Raises:
        UsageError: Another process has the port.
    """
    try:
        listener = sockets.listen(port)
    except OSError as error:
        raise UsageError(
            f"port {port}: {error.strerror}. `ss -ltnp | grep {port}` names the process that has"
            " it; end it, or give another `--port` on both hosts."
        ) from error
    with listener:
        listener.setblocking(True)
        known = interfaces()
        print(
            f"This is {socket.gethostname()} ({in_words(known)}), listening at port {port}. On the"
            " other host run"
        )
        addresses = [
            one for several in known.values() for one in several if not is_loopback(one)
        ] or ["HOST"]
        print(
            f"    lightning-dct check {addresses[0]}" + (f" --port {port}" if port != PORT else ""),
            flush=True,
        )
        while True:
            with sockets.accept(listener) as connection:
                line = _Line(connection)
                hello = None
                with suppress(ValueError, OSError):  # a stranger
                    hello = line.hear()
                if isinstance(hello, dict) and hello.get("hello") == HELLO:
                    return _check(line, 0, str(hello["master"]))


def call(host: str, port: int = PORT) -> Report:
    """Check with a host that listens.

    Raises:
        UsageError: It does not answer at this port; the message says why, and what to do.
    """
    try:
        connection = socket.create_connection((host, port), timeout=REACH_S)
    except OSError as error:
        why = knock(host, port) or str(error)
        own = ""
        with suppress(OSError):
            own = f" from {address_towards(host)}"
        raise UsageError(
            f"{host}, port {port}: {why}. Run `lightning-dct check --listen` there. If it runs, let"
            f" this host in: `sudo ufw allow{own}` there, or compare the address with `ip -brief"
            " address` there."
        ) from error
    with connection:
        line = _Line(connection)
        master = str(connection.getpeername()[0]).removeprefix("::ffff:")
        line.say({"hello": HELLO, "master": master})
        return _check(line, 1, master)


def _note(rank: int, master: str, backend: str, port: int) -> HostNote:
    known = interfaces()
    address, problem = data_address(backend, known)
    if problem:
        problem = (
            f"{problem} on host {socket.gethostname()!r}; name one of its interfaces:"
            f" {in_words(known)}"
        )
    towards = ""
    with suppress(OSError):
        towards = address_towards(master)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": machine(),
        "is_first": True,
        "address": address,
        "problem": problem,
        "towards": towards,
        "master": master,
        "interfaces": known,
        "chosen": bool(os.environ.get(VARIABLES[backend])),
        "versions": {"lightning_dct": __version__, "torch": torch.__version__},
        "python": platform.python_version(),
        "gpus": torch.cuda.device_count(),
        "time": time.time(),
        "port": port,
    }


def _check(line: _Line, side: int, master: str) -> Report:
    """Both hosts call this; ``side`` is 0 for the one that listens."""
    try:
        return _checked(line, side, master)
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the check has ended halfway ({type(error).__name__}: {error}). Start it again on both"
            " hosts, with the same version of lightning_dct."
        ) from error


def _checked(line: _Line, side: int, master: str) -> Report:
    line.say(torch.cuda.device_count())
    try:
        line.connection.settimeout(REACH_S)
        their_gpus = int(line.hear())
    except (OSError, ValueError, TypeError) as error:
        host, port = line.connection.getpeername()[:2]
        raise UsageError(
            f"{host}, port {port} answers, but not as `check` does. If a job is starting there, that"
            " is its rank 0 or its agent of torchrun: this host reaches it, so look at the commands"
            " on all hosts. To check the other ports, end the job, or give `check` on both hosts"
            " another `--port`."
        ) from error
    line.connection.settimeout(PATIENCE_S)
    backend = "nccl" if min(their_gpus, torch.cuda.device_count()) > 0 else "gloo"
    with sockets.listen(0) as own_listener:
        mine = _note(side, master, backend, own_listener.getsockname()[1])
        line.say(mine)
        theirs: HostNote = line.hear()
        report = Report([mine, theirs] if side == 0 else [theirs, mine], backend)
        plan = plan_of([*report.notes], backend)
        if plan["problem"]:
            report.problems.append(plan["problem"])
        if not plan["is_split"]:
            report.problems.append("Both ends are on one host: start `check` on the other one.")
        failed = _reach(line, side, report, plan)
    if not plan["problem"] and (problem := unreachable(failed, backend)):
        report.problems.append(problem)
    _time_link(line, side, report)
    return report


def _reach(
    line: _Line, side: int, report: Report, plan: MeetingPlan
) -> list[tuple[RankNote, RankNote, str]]:
    """Whom each host cannot connect to, of those that it must, and why."""
    one, other = report.notes
    failed: list[tuple[RankNote, RankNote, str]] = []
    for caller, called in ((one, other), (other, one)):
        # The plan has the addresses by which ranks would call.
        calling: HostNote = {**caller, "address": plan["firsts"][caller["machine"]]["address"]}
        answering: HostNote = {**called, "address": plan["firsts"][called["machine"]]["address"]}
        address = answering["address"]
        port = answering["port"]
        assert port is not None
        if caller["rank"] == side:
            why = (
                f"{called['host']} has no address" if not address else knock(address, port, REACH_S)
            )
            line.say(why)
        else:
            why = str(line.hear())
        way = f"{caller['host']} → {called['host']} at {address}, ports that the system chooses"
        is_needed = must_connect(calling, called, "gloo")
        is_needed = is_needed or report.backend != "gloo"
        report.reached.append(
            f"{way}: {why or 'open'}{'' if is_needed or not why else ' (not needed for gloo)'}"
        )
        if why and is_needed:
            failed.append((caller, answering, why))
    return failed


def _time_link(line: _Line, side: int, report: Report) -> None:
    """Time round trips, and a second of bytes in each direction; the host that sends takes the
    time.
    """
    times = []
    for _ in range(PINGS):
        if side == 1:
            began = time.perf_counter()
            line.say(0)
            line.hear()
            times.append(time.perf_counter() - began)
        else:
            line.hear()
            line.say(0)
    if side == 1:
        line.say(statistics.median(times))
        report.latency = statistics.median(times)
    else:
        report.latency = float(line.hear())
    for sender in (0, 1):
        rate = (
            _send_for_a_while(line, report.latency) if sender == side else _take_for_a_while(line)
        )
        report.rates.append(rate)


def _send_for_a_while(line: _Line, latency: float) -> float:
    count = FIRST_BYTES
    while True:
        data = os.urandom(1 << 16) * (count >> 16)  # a VPN may compress
        line.say(count)
        began = time.perf_counter()
        line.connection.sendall(data)
        line.hear()
        took = time.perf_counter() - began
        if took > ENOUGH_S or count >= MOST_BYTES:
            rate = 8 * count / max(took - latency, 1e-6)
            line.say(0)
            line.say(rate)
            return rate
        count *= 4


def _take_for_a_while(line: _Line) -> float:
    while count := int(line.hear()):
        line.take(count)
        line.say(0)
    return float(line.hear())


def check_job() -> tuple[str, float]:
    """Have all ranks that torchrun has started meet, connect and time their link; a sentence, and
    bits a second.

    Raises:
        UsageError: They cannot; the message says why, on every rank.
    """
    try:
        init_process_group("gloo", timeout=PATIENCE)
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    link = measure_link(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    return (
        (
            f"All {world_size} ranks reach each other: an empty exchange takes"
            f" {1e3 * link.latency:.2f} ms."
        ),
        (link.bits_per_second or 1e11),  # further bytes took no time that could be measured
    )


def rate_in_words(bits: float) -> str:
    """A rate as `plan` takes it.

    Example:
        >>> rate_in_words(94.2e6), rate_in_words(2.3e9)
        ('94Mbit', '2.3Gbit')
    """
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6)):
        if bits >= size:
            return f"{bits / size:.2g}{unit}" if bits < 10 * size else f"{bits / size:.0f}{unit}"
    return f"{bits / 1e3:.0f}kbit"


def describe(report: Report) -> str:
    """The table of a report, and its verdict in the last lines."""
    one, other = report.notes
    rows = [
        ("host", one["host"], other["host"]),
        ("address for ranks", *(note["address"] or "none" for note in report.notes)),
        ("interfaces", *(in_words(note["interfaces"]) for note in report.notes)),
        ("lightning_dct", *(note["versions"]["lightning_dct"] for note in report.notes)),
        ("torch", *(note["versions"]["torch"] for note in report.notes)),
        ("Python", one["python"], other["python"]),
        ("GPUs", str(one["gpus"]), str(other["gpus"])),
    ]
    lines = [plain_table([list(row) for row in rows]), "", *report.reached]
    lines.append(f"round trip: {1e3 * report.latency:.2f} ms")
    there, back = map(rate_in_words, report.rates)
    lines.append(f"rate: {one['host']} → {other['host']} {there}/s, back {back}/s")
    lines += [f"process group: {report.backend}{_why_backend(report)}", ""]
    if report.problems:
        lines += [f"Ranks on these hosts cannot start. {problem}" for problem in report.problems]
    else:
        lines.append("Ranks on these hosts can start.")
    return "\n".join(lines)


def _why_backend(report: Report) -> str:
    if report.backend == "nccl":
        return ", because both hosts have GPUs"
    having = [note["host"] for note in report.notes if note["gpus"]]
    return (
        f", because only {having[0]} has GPUs: train with accelerator='cpu'"
        if having
        else " on CPUs"
    )
