"""Makes hosts out of network namespaces, each with one Ethernet interface on a common bridge
(Linux, as root).
"""

import argparse
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from network.delay import DelayedWire

INTERFACE = "eth0"
SUBNET = "10.213.7"
HEADER_BYTES = 66  # of a packet: Ethernet 14, IPv4 20, TCP 20 and its time stamps 12

# A link sends at once what it carries in this time: a longer burst would arrive too early.
_BURST_SECONDS = 0.5e-3
# Two frames; a smaller burst may never hold one.
_SMALLEST_BURST = 3200
# The largest packet Linux makes for an interface to cut up.
_LARGEST_PACKET = 65536
_QUEUE_SECONDS = 0.05
# torchrun needs a moment to end its workers.
_PATIENCE_SECONDS = 30
# Of <sched.h>: what a thread enters is a network namespace.
_CLONE_NEWNET = 0x40000000


class Link(NamedTuple):
    """The link of a host: its rate in Mbit/s, None for no limit, and the milliseconds a frame takes
    each way.
    """

    megabits: float | None = None
    delay_ms: float = 0.0


def parse_link(word: str) -> Link:
    """Read a link from the command line.

    Example:
        >>> parse_link("none").megabits, parse_link("10:50")
        (None, Link(megabits=10.0, delay_ms=50.0))
    """
    megabits, _, delay = word.partition(":")
    link = Link(None if megabits == "none" else float(megabits), float(delay or 0))
    if link.delay_ms < 0 or (link.megabits is not None and link.megabits <= 0):
        raise argparse.ArgumentTypeError(f"{word}: give a rate above 0 and no negative delay")
    return link


@dataclass(frozen=True)
class Host:
    """One network namespace, or this machine, whose processes then meet on its loopback interface.

    Attributes:
        namespace: Its name, for ``ip netns exec``; None for this machine, whose link has no rate.
        address: Its IPv4 address.
    """

    namespace: str | None = None
    address: str = "127.0.0.1"

    @property
    def outside(self) -> str:
        """The other end of its interface, on the bridge."""
        assert self.namespace is not None
        return self.namespace.replace("-", "p")

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a command on this host, and collect its output as text, errors included."""
        if self.namespace is not None:
            command = ["ip", "netns", "exec", self.namespace, *_as_invoking_user(), *command]
            environment = {"GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def enter(self) -> None:
        """Put this process on this host; call it before the process has started a thread or made a
        socket.
        """
        if self.namespace is None:
            return
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        with open(f"/run/netns/{self.namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(
                    ctypes.get_errno(), f"Cannot enter the network namespace {self.namespace}"
                )

    def plug(self, plugged: bool) -> None:
        """Put the cable of this host into the bridge, or pull it out there; its interface does not
        see that.
        """
        where = ("master", self.outside.rpartition("p")[0]) if plugged else ("nomaster",)
        _ip("link", "set", self.outside, *where)

    def end(self, process: subprocess.Popen[str]) -> None:
        """End what :meth:`start` has started; in a namespace kill all processes, whatever their
        session.
        """
        if self.namespace is None:
            process.terminate()
            try:
                process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        else:
            command = ["ip", "netns", "pids", self.namespace]
            for found in subprocess.run(
                command, check=False, capture_output=True, text=True
            ).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(found), signal.SIGKILL)


@contextmanager
def some_hosts(count: int, link: Link, has_links: bool) -> Iterator[list[Host]]:
    """Hosts with links, or this machine ``count`` times."""
    if has_links:
        with make_hosts(count, link.megabits, link.delay_ms / 1000) as hosts:
            yield hosts
    else:
        yield [Host()] * count


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder that the hosts' processes may write to, also as another user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def why_not() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if shutil.which("ip") is None:
        return "the `ip` command is missing (Debian: `apt-get install iproute2`)"
    if os.geteuid() != 0:
        return "network namespaces are made by root: run this with sudo"
    return None


@contextmanager
def make_hosts(
    count: int, megabits: float | None = None, delay: float = 0.0
) -> Iterator[list[Host]]:
    """Make hosts that reach one another, and remove them afterwards.

    Args:
        count: How many, from 2 to 200.
        megabits: Rate of each host's link, in either direction, in 10^6 bits a second, headers
            included; None for no limit. With a delay it limits what a host sends, not what it
            receives.
        delay: Seconds that a frame travels.

    Raises:
        RuntimeError: This machine cannot make them; the message says why.
    """
    if reason := why_not():
        raise RuntimeError(f"Cannot make hosts: {reason}.")
    # A new name, because the system takes a while to remove deleted interfaces.
    bridge = f"dct{secrets.token_hex(3)}"
    hosts = [Host(f"{bridge}-{index}", f"{SUBNET}.{index + 1}") for index in range(count)]
    outsides = [host.outside for host in hosts]
    wire = DelayedWire(outsides, delay) if delay else None
    try:
        if wire is None:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
        for outside, host in zip(outsides, hosts, strict=True):
            _ip("netns", "add", host.namespace)
            if wire is None:
                _ip(
                    "link",
                    "add",
                    outside,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    INTERFACE,
                    "netns",
                    host.namespace,
                )
                _ip("link", "set", outside, "master", bridge, "up")
            else:
                _ip("link", "set", outside, "netns", host.namespace, "name", INTERFACE)
            inside = ("-netns", host.namespace)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip(*inside, "link", "set", INTERFACE, "up")
            _ip(*inside, "link", "set", "lo", "up")
            if megabits is not None:
                limit_rate([*inside], INTERFACE, megabits)
                if wire is None:
                    limit_rate([], outside, megabits)
        yield hosts
    finally:
        if wire is not None:
            wire.close()
        for host in hosts:
            subprocess.run(
                ["ip", "netns", "delete", host.namespace], check=False, capture_output=True
            )
        subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)


def limit_rate(namespace: list[str], interface: str, megabits: float) -> None:
    """Let an interface send no faster than this, by a token bucket; ``["-netns", name]`` is
    another's namespace.
    """
    burst = max(int(megabits * 1e6 / 8 * _BURST_SECONDS), _SMALLEST_BURST)
    # A packet larger than the bucket would be cut up here, one frame after the other, at a cost of
    # its own.
    largest = min(burst, _LARGEST_PACKET)
    _ip(
        *namespace,
        "link",
        "set",
        interface,
        "gso_max_size",
        str(largest),
        "gso_max_segs",
        str(largest // 1500),
    )
    shaper = [
        "tbf",
        "rate",
        f"{megabits}mbit",
        "burst",
        str(burst),
        "latency",
        f"{1e3 * _QUEUE_SECONDS:.0f}ms",
    ]
    _run("tc", *namespace, "qdisc", "replace", "dev", interface, "root", *shaper)


def give_to_invoking_user(path: Path) -> None:
    """Under sudo, make a file or folder the user's own."""
    user = os.environ.get("SUDO_UID")
    group = os.environ.get("SUDO_GID")
    if user is not None and group is not None:
        os.chown(path, int(user), int(group))


def sent_by_interface() -> tuple[int, int]:
    """Bytes (frames with all headers) and packets that this host's interface has sent so far."""
    counters = f"/sys/class/net/{INTERFACE}/statistics"
    values = []
    for name in ("tx_bytes", "tx_packets"):
        with open(f"{counters}/{name}") as file:
            values.append(int(file.read()))
    return values[0], values[1]


def _as_invoking_user() -> list[str]:
    """A prefix of commands that drops root's rights under sudo, so that their files are the user's
    own.
    """
    user = os.environ.get("SUDO_UID")
    group = os.environ.get("SUDO_GID")
    if user is None or group is None or shutil.which("setpriv") is None:
        return []
    home = f"HOME={pwd.getpwuid(int(user)).pw_dir}"
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups", "env", home]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
