"""Has the ranks meet before their process group is made, and works around two faults of torch's
process groups.

Ranks of several hosts first meet (:mod:`lightning_dct.failures.meeting`), which names whatever
would keep the group from connecting. The faults sometimes fail a job when it restarts or ends:

*A restart reads stale addresses.* Since torch 2.5 the agents of torchrun keep one store for all
starts of a job (``DynamicRendezvousHandler._shared_tcp_store_server``), with the same keys for
every start (``torch.distributed.rendezvous._create_c10d_store``). After a restart a rank may read
the address of a dead one, and fail ("connection refused") or wait forever. Plain DDP has this fault
as well. Here rank 0 opens a fresh store, and tells the others its address when they meet in the old
one.

*A thread outlives the interpreter.* A gloo thread needs the interpreter to release a collective's
tensors, after the waiting ranks have continued. If the process is ending by then, C++ aborts it
("terminate called without an active exception"), and torchrun restarts a finished job.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.constants import default_pg_timeout

from lightning_dct.failures.lifeline import check_lifelines, want_lifelines_of_process
from lightning_dct.failures.meeting import Job, Meeting, new_store
from lightning_dct.failures.sockets import name_of_this_host
from lightning_dct.failures.waiting import waiting
from lightning_dct.strategy_protocols import StrategyWithGroup

FROM_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
LET_FINISH_S = 0.1  # far longer than gloo's threads need for the interpreter
# Kept until this process ends, because the other ranks may use the store until they end.
_own: list[TCPStore] = []


def job_of(strategy: StrategyWithGroup) -> Job | None:
    """What a rank of Lightning's or Fabric's strategy knows of its job; None if its ranks need not
    meet.

    That is so for a single rank, and on one host without torchrun, where nothing is between the
    ranks.
    """
    # Of Fabric's strategies.
    name = "set_world_ranks" if hasattr(strategy, "set_world_ranks") else "_set_world_ranks"
    getattr(strategy, name)()
    environment = strategy.cluster_environment
    has_store = os.environ.get(FROM_AGENT) == "True"
    if environment is None or strategy.world_size == 1 or not (has_store or strategy.num_nodes > 1):
        return None
    return Job(
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        host=environment.main_address,
        port=environment.main_port,
        backend=strategy._get_process_group_backend(),
        has_store=has_store,
        local_rank=strategy.local_rank,
    )


@contextmanager
def group_is_made(
    strategy: StrategyWithGroup, lifelines: bool | int, timeout: timedelta | None
) -> Iterator[None]:
    """Surround the code that makes a strategy's process group; does nothing without lifelines, or
    if there is a group.

    If ``lifelines`` is a port, rank 0 opens a store of this start at the next one.

    Raises:
        RuntimeError: The ranks cannot meet within the timeout, by default torch's half an hour, or
            cannot reach each other. Raised on every rank that has come.
    """
    if not lifelines:
        yield
        return
    job = None if dist.is_initialized() else job_of(strategy)
    if job is None:
        yield
    else:
        # The store lives at least until the group has it.
        store = meet(job, timeout or default_pg_timeout, _port_of_store(lifelines))
        with waiting(job.rank, _why_no_group):
            yield
        del store
    _finish_at_exit()


def _port_of_store(lifelines: bool | int) -> int:
    return 0 if lifelines is True else lifelines + 1


def meet(job: Job, timeout: timedelta, port: int = 0) -> TCPStore:
    """Have all ranks meet, and the group use a store of this start alone; see :class:`Meeting` for
    errors.

    Under torchrun that is a fresh one, which rank 0 opens at ``port``, 0 for any free one.
    """
    meeting = Meeting(job, timeout)

    def open_store() -> dict[str, Any]:
        if not job.has_store:
            return {}
        # After a host has left, rank 0 may be on another one than the agent with the store.
        host = name_of_this_host(job.host)
        _own.append(new_store(host, port, timeout))
        return {"store": [host, _own[-1].port]}

    if store := meeting.hold(open_store).get("store"):
        # torch's `env://` reads these; the process that holds the store makes no second one.
        os.environ["MASTER_ADDR"] = store[0]
        os.environ["MASTER_PORT"] = str(store[1])
        os.environ[FROM_AGENT] = "False"
    return meeting.store


def init_process_group(
    backend: str = "gloo",
    *,
    timeout: timedelta = default_pg_timeout,
    lifelines: bool | int = True,
    **settings: Any,
) -> None:
    """Make the process group of a loop of your own: ``torch.distributed.init_process_group``, once
    the ranks have met.

    With torch's function alone a closed port, a wrong interface or a host that has not started is
    silence until the timeout. Here each rank says after 20 seconds for whom it waits, and an error
    on all ranks names what is wrong. After a restart by torchrun the ranks also use a fresh store.

    Args:
        backend: As for torch's function.
        timeout: For all ranks to come, and for each collective of the group.
        lifelines: As for DCTStrategy: a port at which rank 0 listens, by default a free one, and
            under torchrun also at the next one. False for torch's function alone. It holds for
            :class:`~lightning_dct.Updates` and :class:`~lightning_dct.Gradients` in this group,
            too.
        **settings: For torch's function, such as ``device_id``. Ranks and addresses are in the
            environment, as torchrun sets it.

    Raises:
        TypeError: A setting says otherwise how ranks meet.
        ValueError: The environment lacks a variable, or `lifelines` is no port.
        RuntimeError: The ranks cannot meet within the timeout, or cannot reach each other. Raised
            on every rank that has come.
    """
    check_lifelines(lifelines)
    for name in ("init_method", "store", "rank", "world_size"):
        if name in settings:
            raise TypeError(
                f"`lightning_dct.init_process_group` takes no `{name}`: its ranks meet at the"
                " environment's MASTER_ADDR and MASTER_PORT. Leave it out, or use"
                " `torch.distributed.init_process_group`, which names no faults."
            )
    job = _job_of_environment(backend)
    if job.world_size == 1 or not lifelines:
        dist.init_process_group(backend, timeout=timeout, **settings)
        want_lifelines_of_process(lifelines)
        return
    store = meet(job, timeout, _port_of_store(lifelines))
    with waiting(job.rank, _why_no_group):
        dist.init_process_group(backend, timeout=timeout, **settings)
    del store  # the group has it
    want_lifelines_of_process(lifelines)
    _finish_at_exit()


def _job_of_environment(backend: str) -> Job:
    """What torchrun, or the user, says in the environment of a rank."""
    environment = os.environ
    needed = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    if missing := [name for name in needed if not environment.get(name)]:
        raise ValueError(
            f"The environment of this process lacks {', '.join(missing)}. Start the script by"
            " `torchrun`, or set MASTER_ADDR, MASTER_PORT, WORLD_SIZE and a RANK of its own for"
            " each process."
        )
    return Job(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        backend="nccl" if "nccl" in backend else backend,
        has_store=environment.get(FROM_AGENT) == "True",
        local_rank=int(environment.get("LOCAL_RANK", 0)),
    )


def _finish_at_exit() -> None:
    atexit.unregister(_let_finish)
    atexit.register(_let_finish)


def _why_no_group() -> str:
    return (
        "for the process group to connect all ranks. They have met, and their hosts reach each"
        " other, so one of them has failed or been stopped since: look at the output of all ranks."
        " torch waits until its timeout."
    )


def _let_finish() -> None:
    """Let gloo's threads finish before this process ends."""
    time.sleep(LET_FINISH_S)  # other threads run meanwhile
