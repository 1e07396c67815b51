"""Works around two faults of torch's process groups that sometimes fail a job when it restarts or ends.

*A restart reads stale addresses.* Since torch 2.5 the agents of torchrun keep one store for all starts of a job
(``DynamicRendezvousHandler._shared_tcp_store_server``), with the same keys for every start
(``torch.distributed.rendezvous._create_c10d_store``). After a restart a rank may read the address of a dead one, and
fail ("connection refused") or wait forever. Plain DDP has this fault as well. Here rank 0 opens a fresh store, and
publishes its address in the old one:

    rank r     request/r = a new random word       the store of torchrun's agent, full of stale keys
    rank 0     reply/word = address                only a living rank 0 can answer that word
    rank r     connects, arrived/r = yes           the fresh store

*A thread outlives the interpreter.* A gloo thread needs the interpreter to release a collective's tensors, after the
waiting ranks have continued. If the process is ending by then, C++ aborts it ("terminate called without an active
exception"), and torchrun restarts a finished job.
"""

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
POLL_S = 0.01
LET_FINISH_S = 0.1  # far longer than gloo's threads need for the interpreter
# Kept until this process ends, because the other ranks may use the store until they end.
_own: list[TCPStore] = []


def meet_in_fresh_store(timeout: timedelta | None) -> None:
    """Let this process use a store of this start only; call it before the process group is made.

    Does nothing without torchrun, for a single rank, the second time, and if the group exists. After ``timeout``, by
    default torch's half an hour, a RuntimeError names the ranks that have not come.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if os.environ.get(FROM_AGENT) != "True" or world_size == 1 or dist.is_initialized():
        return
    host, timeout = os.environ["MASTER_ADDR"], timeout or default_pg_timeout
    old = TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    # After a host has left, rank 0 may be on another one than the agent with the store.
    where = _invite(old, name_of_this_host(host), world_size, timeout) if rank == 0 else _request(old, rank, timeout)
    # torch's `env://` reads these; the process that holds the store makes no second one.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = where
    os.environ[FROM_AGENT] = "False"


@contextmanager
def group_is_made(lifelines: bool | int, timeout: timedelta | None) -> Iterator[None]:
    """Surround the code that makes the process group; does nothing without lifelines."""
    if lifelines:
        meet_in_fresh_store(timeout)
    yield
    if lifelines:
        atexit.unregister(_let_finish)
        atexit.register(_let_finish)


def _let_finish() -> None:
    """Let gloo's threads finish before this process ends."""
    time.sleep(LET_FINISH_S)  # other threads run meanwhile


def _invite(old: TCPStore, host: str, world_size: int, timeout: timedelta) -> tuple[str, str]:
    # `multi_tenant` lets `init_process_group` share it.
    fresh = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout)
    _own.append(fresh)
    answered: set[str] = set()
    missing = list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in missing:
            request = f"{PREFIX}/request/{rank}"
            if old.check([request]) and (word := old.get(request).decode()) not in answered:
                answered.add(word)
                old.set(f"{PREFIX}/reply/{word}", f"{host} {fresh.port}")
        missing = [rank for rank in missing if not fresh.check([f"{PREFIX}/arrived/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank 0 has waited {timeout.total_seconds():.0f} s for ranks {missing}, which have not connected. Look"
                " at their output, and check that they have the same MASTER_ADDR and MASTER_PORT."
            )
        time.sleep(POLL_S)
    return host, str(fresh.port)


def _request(old: TCPStore, rank: int, timeout: timedelta) -> tuple[str, str]:
    word = secrets.token_hex(16)
    old.set(f"{PREFIX}/request/{rank}", word)
    try:
        host, port = old.get(f"{PREFIX}/reply/{word}").decode().split()
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank} has received nothing from rank 0 for {timeout.total_seconds():.0f} s. Look at the output of"
            " rank 0."
        ) from error
    TCPStore(host, int(port), is_master=False, timeout=timeout).set(f"{PREFIX}/arrived/{rank}", "yes")
    return host, port
