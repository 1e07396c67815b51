"""Runs one command on every host until all have ended, or one has failed; torchrun's command for each of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from network.hosts import Host
from network.loopback import LoopbackHost

LINES_KEPT = 80  # torchrun ends in some 30 of its own


def torchrun(count: int, address: str, port: int, words: Sequence[str], per_host: int = 1) -> list[list[str]]:
    """The command for each host that starts a script with its arguments under torchrun; they meet at the first one."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={per_host}"]
    meeting = [f"--master-addr={address}", f"--master-port={port}"]
    return [[*command, f"--node-rank={rank}", *meeting, *words] for rank in range(count)]


class HostFailedError(RuntimeError):
    """A host's command ended badly; the message says which host and shows its last lines."""


class _Output(threading.Thread):
    """Reads what a host prints, so that it never has to wait, and keeps the last lines."""

    def __init__(self, stream: IO[str], show: Callable[[str], None] | None) -> None:
        super().__init__(daemon=True)
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self._stream, self._show = stream, show
        self.start()

    def run(self) -> None:
        """Read until the host closes its output."""
        for line in self._stream:
            self.last.append(line)
            if self._show is not None:
                self._show(line)


def run_on(
    hosts: Sequence[Host | LoopbackHost],
    commands: Sequence[list[str]],
    environment: dict[str, str],
    show: Callable[[str], None],
) -> None:
    """Run a command on each host, at the same time, and call ``show`` with each line that the first host prints.

    Nothing that was started is left running, however this ends.

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
        # A rank whose peer is gone may wait for it forever, in a session of its own: torchrun's signals come late.
        for host, process in zip(hosts, running, strict=False):
            host.end_processes()
            process.wait()
    for output in outputs:
        output.join()
    if failed is not None:
        lines = "".join(outputs[failed].last)
        raise HostFailedError(
            f"Host {failed} ({hosts[failed].address}) ended with exit status {running[failed].returncode}, and the"
            f" other hosts were stopped. Its last lines:\n{lines}"
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
