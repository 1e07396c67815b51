"""Measures what a link carries: one raw TCP transfer from one host to another."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `network` is

from network.hosts import Host

PORT = 29399
TRIES, PAUSE_SECONDS = 100, 0.05
CHUNK = 1 << 18


def measure_megabits(hosts: Sequence[Host], megabits: float | None, seconds: float = 1.0) -> float:
    """Send from the second host to the first, and see how fast it gets there.

    Args:
        hosts: At least two.
        megabits: What the link should carry, to choose how much is sent; None for a link without a limit.
        seconds: How long that should take.

    Returns:
        10^6 bits of content a second; headers take up to 4.5% more of the link.
    """
    total = int((megabits or 8000) * 1e6 / 8 * seconds)
    program = [sys.executable, __file__]
    receiver = hosts[0].start([*program, "receive"], {})
    sender = hosts[1].start([*program, "send", hosts[0].address, str(total)], {})
    try:
        answer, _ = receiver.communicate(timeout=60)
        sender.communicate(timeout=60)
    finally:
        for process in (receiver, sender):
            process.kill()
            process.wait()
    if receiver.returncode or sender.returncode:
        raise RuntimeError(f"The transfer between two hosts failed: {answer.strip()}")
    received, took = answer.split()
    return 8e-6 * int(received) / float(took)


def receive() -> None:
    """Take one connection, and print the bytes that came after its first and the seconds they took."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        with connection:
            connection.recv(1)
            received = 0
            started = time.perf_counter()
            while piece := connection.recv(CHUNK):
                received += len(piece)
            print(received, time.perf_counter() - started)


def send(address: str, total: int) -> None:
    """Send ``total`` bytes to a host that receives."""
    for attempt in range(TRIES):
        try:
            connection = socket.create_connection((address, PORT))
            break
        except OSError:
            if attempt == TRIES - 1:
                raise
            time.sleep(PAUSE_SECONDS)
    with connection:
        piece = bytes(CHUNK)
        for start in range(0, total, CHUNK):
            connection.sendall(piece[: total - start])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], int(sys.argv[3]))
