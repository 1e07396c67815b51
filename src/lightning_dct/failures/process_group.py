"""Two flaws of torch's process groups that fail a job now and then, as it starts again and as it ends; kept clear of.

*A start that meets the last one.* Ranks find each other's addresses in a key-value store. Since torch 2.5 the agents
of torchrun keep one store for all starts of a job (``DynamicRendezvousHandler._shared_tcp_store_server``), and ranks no
longer tell starts apart in it (``torch.distributed.rendezvous._create_c10d_store``). After a restart a rank may read
the address of one that is dead, and fails ("connection refused") or waits without end. Plain DDP does as well. So here
rank 0 opens a store of its own, and tells the others where in the old one:

    rank r     asked/r = a word made up now        store of torchrun's agent, full of old words
    rank 0     told/word = where                   nobody but a living rank 0 can have answered that word
    rank r     connects, arrived/r = yes           the new store, empty

*A thread that outlives the interpreter.* A thread of gloo lets go of a collective's tensors after those who wait for it
have gone on, and needs the interpreter for that. If the process is ending by then, C++ aborts it ("terminate called
without an active exception"), and torchrun starts a job again that was done.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.constants import default_pg_timeout

from lightning_dct.failures.sockets import name_of_this_host

FROM_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
PREFIX = "lightning_dct"
LOOK_EVERY_S = 0.01
# Far longer than a thread needs that has only to be let in.
LET_IN_S = 0.1

# Held for as long as this process lives: the others may want the store until they end.
_own: list[TCPStore] = []


def meet_in_fresh_store(timeout: timedelta | None) -> None:
    """Point this process at a store that only ranks of this start know: to be called before the process group is made.

    Does nothing without torchrun, for a single rank, and when it has been done or the group is there.

    Args:
        timeout: How long to wait for the other ranks; None for torch's half an hour.

    Raises:
        RuntimeError: Some have not come; the message names them.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if os.environ.get(FROM_AGENT) != "True" or world_size == 1 or dist.is_initialized():
        return
    host, timeout = os.environ["MASTER_ADDR"], timeout or default_pg_timeout
    old = TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    # After a host has left, rank 0 may be on another one than the agent with the store.
    where = _invite(old, name_of_this_host(host), world_size, timeout) if rank == 0 else _ask(old, rank, timeout)
    # torch's `env://` reads these; in the process that holds the store it makes no second one.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = where
    os.environ[FROM_AGENT] = "False"


@contextmanager
def group_is_made(lifelines: bool | int, timeout: timedelta | None) -> Iterator[None]:
    """Surround what makes the process group, as lifelines want it; nothing happens without them."""
    if lifelines:
        meet_in_fresh_store(timeout)
    yield
    if lifelines:
        end_after_gloo()


def end_after_gloo() -> None:
    """Have this process, before it ends, let gloo's threads put down what they hold."""
    atexit.unregister(_let_in)
    atexit.register(_let_in)


def _let_in() -> None:
    time.sleep(LET_IN_S)  # others run meanwhile


def _invite(old: TCPStore, host: str, world_size: int, timeout: timedelta) -> tuple[str, str]:
    # `multi_tenant` lets `init_process_group` share it.
    fresh = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout)
    _own.append(fresh)
    answered: set[str] = set()
    missing = list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in missing:
            asked = f"{PREFIX}/asked/{rank}"
            if old.check([asked]) and (word := old.get(asked).decode()) not in answered:
                answered.add(word)
                old.set(f"{PREFIX}/told/{word}", f"{host} {fresh.port}")
        missing = [rank for rank in missing if not fresh.check([f"{PREFIX}/arrived/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank 0 has waited {timeout.total_seconds():.0f} s for ranks {missing}, which have not come. Look for"
                " what they say; or were they given another MASTER_ADDR or MASTER_PORT?"
            )
        time.sleep(LOOK_EVERY_S)
    return host, str(fresh.port)


def _ask(old: TCPStore, rank: int, timeout: timedelta) -> tuple[str, str]:
    word = secrets.token_hex(16)
    old.set(f"{PREFIX}/asked/{rank}", word)
    try:
        host, port = old.get(f"{PREFIX}/told/{word}").decode().split()
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank} has heard nothing from rank 0 for {timeout.total_seconds():.0f} s. Look for what rank 0 says."
        ) from error
    TCPStore(host, int(port), is_master=False, timeout=timeout).set(f"{PREFIX}/arrived/{rank}", "yes")
    return host, port
