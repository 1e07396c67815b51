"""Runs the ranks of one machine beside the first one, and starts one again that has died; a program of its own.

The first line of its input is the task. The second is the last word of rank 0: ``done`` when its process ends, ``left``
if that rank alone ends, ``stop`` if all shall end. If the input ends without that, rank 0 has died, and is started
again too. It imports nothing of this package, to start fast.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

RESTARTED = "LIGHTNING_DCT_RESTARTED"  # set in a process that was started again
RESTART_AFTER_S = 1.0
POLL_S = 0.1


def start_lighthouse(patience_ms: int, heartbeat_ms: int, host: str = "127.0.0.1") -> tuple[Any, str]:
    """A lighthouse, by default for this machine alone, and its address."""
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{host}:0",
        min_replicas=1,
        join_timeout_ms=patience_ms,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    return server, f"http://{host}:{server.address().rpartition(':')[2]}"


class Ranks:
    """The processes of this machine; the first one is not a child of this process until it has died."""

    def __init__(self, commands: list[tuple[list[str], str | None]], restarts: int) -> None:
        self._commands, self._left = commands, restarts
        self._running = {rank: self._start(rank) for rank in range(1, len(commands))}
        self._due: dict[int, float] = {}
        self.finished = False

    def restart(self, rank: int, how: str) -> None:
        """Start a rank again after a moment, unless the run is over."""
        if self.finished:
            return
        if self._left <= 0:
            print(f"lightning_dct: rank {rank} {how}, and no restarts are left. The others go on.", file=sys.stderr)
            return
        self._left -= 1
        print(f"lightning_dct: rank {rank} {how} and is started again.", file=sys.stderr, flush=True)
        self._due[rank] = time.monotonic() + RESTART_AFTER_S

    def look(self) -> bool:
        """Start what is due, and return whether any rank runs or shall."""
        for rank, process in list(self._running.items()):
            status = process.poll()
            if status is None:
                continue
            del self._running[rank]
            if status != 0:  # a rank that has left, or stopped early, ends nobody else's run
                self.restart(rank, f"has died of signal {-status}" if status < 0 else f"has failed (status {status})")
        for rank, when in list(self._due.items()):
            if self.finished:
                del self._due[rank]
            elif time.monotonic() >= when:
                del self._due[rank]
                self._running[rank] = self._start(rank, again=True)
        return bool(self._running or self._due)

    def hear(self, said: str) -> None:
        """Act on the last word of rank 0."""
        if said == "stop":
            self.end()
        elif said == "done":
            self.finished = True
        elif said != "left":
            self.restart(0, "has died")

    def end(self) -> None:
        """End all."""
        self.finished = True
        for process in self._running.values():
            process.kill()

    def _start(self, rank: int, again: bool = False) -> subprocess.Popen[bytes]:
        command, folder = self._commands[rank]
        environment = {**os.environ, "LOCAL_RANK": str(rank)} | ({RESTARTED: "1"} if again else {})
        return subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL)


def main() -> None:
    """Run until all ranks have ended."""
    # Without a buffer, so that select() knows of every line.
    first = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    task = json.loads(first.readline())
    lighthouse, address = None, os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if task["lighthouse"]:
        lighthouse, address = start_lighthouse(*task["lighthouse"])
        os.environ["TORCHFT_LIGHTHOUSE"] = address
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        print(address, file=answer)
    ranks = Ranks(task["commands"], task["restarts"])

    def end(*_: Any) -> None:
        ranks.end()
        os._exit(1)

    # A process that is asked to end takes its children along.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    first_runs = True
    while ranks.look() or first_runs:
        if select.select([first] if first_runs else [], [], [], POLL_S)[0]:
            ranks.hear(first.readline().decode().strip())
            first_runs = False
    del lighthouse


if __name__ == "__main__":
    main()
