"""Stands in for hosts where none can be made: processes of this machine that meet on its loopback interface."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field

# torchrun needs a moment to end its workers.
PATIENCE_SECONDS = 30


@dataclass(frozen=True)
class LoopbackHost:
    """Has the face of :class:`network.hosts.Host`; its link has no rate, and all such hosts share one interface."""

    address: str = "127.0.0.1"
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a command; its output is collected as text, errors included."""
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def end_processes(self) -> None:
        """End what was started here, its children included where it ends them."""
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
