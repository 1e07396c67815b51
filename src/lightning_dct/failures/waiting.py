"""Says for whom and for what a rank waits, after a while and then again and again, while it goes on
waiting.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

FIRST_S = (
    20.0  # a start on two hosts may take as long, and a message every time would soon be overlooked
)
EVERY_S = 60.0
KNOCK_S = 3.0  # for a host to answer: longer than any round trip


@contextmanager
def waiting(rank: int, describe: Callable[[], str]) -> Iterator[None]:
    """While the code within runs, print what it waits for, after ``FIRST_S`` and then every
    ``EVERY_S``.

    ``describe`` returns what follows "has waited 20 s", in a thread of its own. It may take a
    while, such as to find out whether another host answers.
    """
    over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        pause = FIRST_S
        while not over.wait(pause):
            words = describe()
            if not over.is_set():
                say(rank, f"has waited {time.monotonic() - began:.0f} s {words}")
            pause = EVERY_S

    thread = threading.Thread(target=tell, name="lightning_dct waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(KNOCK_S)  # mostly no time: it sleeps, or describes


def say(rank: int, words: str) -> None:
    """Print a sentence about this rank to standard error."""
    with suppress(OSError, ValueError):  # standard error is closed, or it cannot be encoded
        print(
            f"lightning_dct, rank {rank} on {socket.gethostname()}: {words}",
            file=sys.stderr,
            flush=True,
        )


def listed(causes: list[str]) -> str:
    """Likely causes, each with what tells it from the others."""
    return "".join(f"\n  - {cause}" for cause in causes)


def knock(address: str, port: int, timeout_s: float = KNOCK_S) -> str:
    """Why a connection to a port fails; empty if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except socket.gaierror:
        return f"this host knows no address of the name {address!r}"
    except TimeoutError:
        return "no answer; a firewall drops the packets, or no host has this address"
    except ConnectionRefusedError:
        return (
            "the host refuses the connection; nothing listens at this port, or a firewall"
            " rejects it"
        )
    except OSError as error:
        return f"{error.strerror or error}".lower()
    return ""
