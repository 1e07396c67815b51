"""Runs a script under torchrun, or any command, on every host until all have ended or one has
failed.
"""

import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import socket
from typing import IO

from network.hosts import Host

LINES_KEPT = 80  # torchrun ends in some 30 of its own


def run_ranks(
    hosts: Sequence[Host],
    words: Sequence[str],
    ranks_per_host: int = 1,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    show: Callable[[str], object] | None = None,
) -> None:
    """Run a script with its arguments under torchrun on each host; see :func:`run_on`."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    command += [f"--nproc-per-node={ranks_per_host}", f"--master-addr={hosts[0].address}"]
    command += [f"--master-port={free_port()}"]
    commands = [[*command, f"--node-rank={rank}", *words] for rank in range(len(hosts))]
    limits = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    run_on(hosts, commands, {**limits, **(environment or {})}, show)


def free_port() -> int:
    """A TCP port that no process listens on, below those that kernels assign: torchrun takes
    seconds to bind it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 15_000)
        with socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class HostFailedError(RuntimeError):
    """A host's command ended badly; the message says which host and shows its last lines."""


class _Output(threading.Thread):
    """Reads what a host prints, so that its pipe is never full, and keeps the last lines."""

    def __init__(self, stream: IO[str], show: Callable[[str], object] | None) -> None:
        super().__init__(daemon=True)
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self._stream = stream
        self._show = show
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self.last.append(line)
            if self._show is not None:
                self._show(line)


def run_on(
    hosts: Sequence[Host],
    commands: Sequence[list[str]],
    environment: dict[str, str],
    show: Callable[[str], object] | None = None,
) -> None:
    """Run a command on each host, at the same time, and call ``show`` with each line that the first
    host prints.

    No process is left when this returns or raises.

    Raises:
        HostFailedError: A command ended with an error.
    """
    running: list[subprocess.Popen[str]] = []
    outputs: list[_Output] = []
    try:
        for host, command in zip(hosts, commands, strict=True):
            running.append(host.start(command, environment))
            outputs.append(_Output(running[-1].stdout, None if outputs else show))
        failed = _wait_for(running)
    finally:
        # A rank whose peer is gone may wait for it forever, in a session of its own: torchrun's
        # signals come late.
        for host, process in zip(hosts, running, strict=False):
            host.end(process)
            process.wait()
    for output in outputs:
        output.join()
    if failed is not None:
        lines = "".join(outputs[failed].last)
        raise HostFailedError(
            f"Host {failed} ({hosts[failed].address}) ended with exit status"
            f" {running[failed].returncode}, and the other hosts were stopped. Its last"
            f" lines:\n{lines}"
        )


def _wait_for(running: Sequence[subprocess.Popen[str]]) -> int | None:
    """Wait until all have ended well, or one has not: which."""
    while True:
        states = [process.poll() for process in running]
        for index, state in enumerate(states):
            if state:
                return index
        if all(state == 0 for state in states):
            return None
        time.sleep(0.2)
