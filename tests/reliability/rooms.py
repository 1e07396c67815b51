"""Two hosts with nothing in common but a cable: network namespaces with a name, an ``/etc/hosts``
and a disk each.

Needs root on Linux, as ``experiments/network/hosts.py`` does. ``Room.start`` calls a function
there, in a process that is forked from one that has imported everything, and ``Room.text`` is what
it has printed.
"""

import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.run

from distributed.harness import started
from network.hosts import INTERFACE, Host, make_hosts

PORT = 29500
# Far more than anything takes on a quiet machine.
PATIENCE_S = 240.0
# Of <sched.h> and <sys/mount.h>.
_CLONE_NEWNS = 0x20000
_CLONE_NEWUTS = 0x4000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18


@dataclass
class Room:
    """A host, and the processes that run there.

    Attributes:
        host: Its network namespace.
        name: The name that the host has for itself.
        folder: Its own disk: what its processes see as ``disk``.
        disk: A path that is another folder on each host.
        knows: Lines of its ``/etc/hosts``.
    """

    host: Host
    name: str
    folder: Path
    disk: Path
    knows: list[str]
    log: Path = field(init=False)
    processes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.log = self.folder.parent / f"{self.name}.log"
        self.log.touch()

    @property
    def address(self) -> str:
        """Its address, which the other host reaches."""
        return self.host.address

    def start(self, function: Callable[..., None], *arguments: Any, **environment: str) -> Any:
        """Call a function on this host, in a process of its own; its output is in :attr:`text`."""
        self.disk.mkdir(exist_ok=True)
        hosts_file = self.log.with_suffix(".hosts")
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *self.knows, ""]))
        # No name server answers here, and asking one takes seconds.
        mounts = {
            "/etc/hosts": hosts_file,
            "/etc/resolv.conf": Path("/dev/null"),
            str(self.disk): self.folder,
        }
        words = function.__module__, function.__qualname__, arguments
        process = started(_run, self.host, self.name, mounts, self.log, environment, *words)
        self.processes.append(process)
        return process

    def train(
        self, function: Callable[..., None], *arguments: Any, rank: int, master: str, **more: str
    ) -> Any:
        """Start a training as users start it without any launcher."""
        places = {"NODE_RANK": str(rank), "MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
        return self.start(function, *arguments, **places, **more)

    def torchrun(
        self,
        function: Callable[..., None],
        *arguments: Any,
        rank: int,
        master: str,
        restarts: int = 0,
        **more: str,
    ) -> Any:
        """Start a training by torchrun as ``docs/two_machines.md`` has it; the agent forks this
        host's rank.

        The module of the function, run as a program, calls a function by its name and arguments.
        """
        script = inspect.getfile(function)
        command = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
        command += [f"--master-addr={master}", f"--master-port={PORT}"]
        command += [
            f"--max-restarts={restarts}",
            "--rdzv-conf=timeout=25",
            "--run-path",
            "--start-method=fork",
        ]
        command += [script, function.__name__, json.dumps(arguments, default=str)]
        return self.start(torch.distributed.run.main, command, **more)

    @property
    def text(self) -> str:
        """All that this host has printed, with every white space as one blank."""
        return " ".join(self.log.read_text(errors="replace").split())

    def has_said(self, words: str, after: str = "", patience_s: float = PATIENCE_S) -> float:
        """Wait until this host has printed these words, after others if some are given; an
        AssertionError says what it has printed instead.
        """

        def is_said() -> bool:
            return words in (self.text.rpartition(after)[2] if after else self.text)

        began = time.monotonic()
        while not is_said():
            ended = all(process.exitcode is not None for process in self.processes)
            if (ended and not is_said()) or time.monotonic() > began + patience_s:
                raise AssertionError(
                    f"{self.name} has not said {words!r}:\n{self.log.read_text(errors='replace')}"
                )
            time.sleep(0.1)
        return time.monotonic() - began

    @property
    def step(self) -> int:
        """The last step that this host has printed; 0 if there is none."""
        return int(self.text.rpartition("step ")[2].split(" ", 1)[0] or 0)

    def ends(self, status: int) -> None:
        """Wait until all processes of this host have ended, with this exit status."""
        for process in self.processes:
            process.join(PATIENCE_S)
            assert process.exitcode == status, (
                f"{self.name}:\n{self.log.read_text(errors='replace')}"
            )

    def run(self, *command: str) -> None:
        """Run a command in this host's network."""
        done = ["ip", "netns", "exec", str(self.host.namespace), *command]
        subprocess.run(done, check=True, capture_output=True, text=True)

    def let_in_only(self, *ports: int | str) -> None:
        """A firewall that drops all TCP connections from outside, except to these ports, or ranges
        of ports.
        """
        rules = [
            "add table inet filter",
            "add chain inet filter input { type filter hook input priority 0; policy accept; }",
            f"add rule inet filter input iifname {INTERFACE} ct state established,related accept",
            *(
                f"add rule inet filter input iifname {INTERFACE} tcp dport {port} accept"
                for port in ports
            ),
            f"add rule inet filter input iifname {INTERFACE} meta l4proto tcp drop",
        ]
        self.run("nft", "; ".join(rules))

    def open_firewall(self) -> None:
        """Let everything in again."""
        self.run("nft", "flush", "ruleset")

    def kill_all(self) -> None:
        """Kill all processes of this host, those that its processes have started, too."""
        found = subprocess.run(
            ["ip", "netns", "pids", str(self.host.namespace)], capture_output=True, text=True
        )
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        for started_one in self.processes:
            started_one.join()
        self.processes.clear()

    def end(self) -> None:
        """Kill all processes of this host, and forget what they have said."""
        self.kill_all()
        self.log.write_text("")


@contextmanager
def two_rooms(folder: Path, megabits: float | None = None) -> Iterator[list[Room]]:
    """Two rooms, ``ada`` and ``bob``, that know each other by name; a RuntimeError if this machine
    cannot make them.
    """
    with make_hosts(2, megabits) as hosts:
        names = ("ada", "bob")
        known = [f"{host.address} {name}" for host, name in zip(hosts, names, strict=True)]
        disk = folder / "disk"
        rooms = [
            Room(host, name, folder / name, disk, list(known))
            for host, name in zip(hosts, names, strict=True)
        ]
        try:
            yield rooms
        finally:
            for room in rooms:
                room.end()


def _run(
    host: Host,
    name: str,
    mounts: dict[str, Path],
    log: Path,
    environment: dict[str, str],
    module: str,
    function: str,
    arguments: tuple[Any, ...],
) -> None:
    host.enter()
    del os.environ["GLOO_SOCKET_IFNAME"]  # which hosts of experiments need, and users may not know
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    for place, source in mounts.items():
        _check(libc.mount(str(source).encode(), place.encode(), None, _MS_BIND, None))
    socket.sethostname(name)
    os.environ.update(environment)
    stream = log.open("a")
    for number in (1, 2):
        os.dup2(stream.fileno(), number)
    sys.stdout = sys.stderr = stream
    getattr(importlib.import_module(module), function)(*arguments)
    stream.flush()


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
