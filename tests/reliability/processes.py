"""Runs a function as every rank of a job that may not survive it, and says how each of them
ended.
"""

import multiprocessing.util
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from distributed.harness import begin_rank, free_port, started


class Ended(NamedTuple):
    """How one rank ended, how long after the start of the job, and what it printed.

    The status is negative for a signal, as ``multiprocessing`` gives it; None when it had to be
    killed.
    """

    exit_status: int | None
    seconds: float
    output: str


def run_to_the_end(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    failing: int,
    folder: Path,
    timeout_s: float,
) -> list[Ended]:
    """Call ``function(*arguments)`` in fresh processes that see what ``torchrun`` sets; wait until
    they have ended.

    The one that fails is not waited for, but killed when the others have ended.
    """
    port = free_port()
    paths = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    start = time.monotonic()
    processes = [
        started(_run, rank, world_size, port, paths[rank], function, arguments)
        for rank in range(world_size)
    ]
    seconds: dict[int, float] = {}
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while set(running.values()) - {failing} and (left := start + timeout_s - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            seconds[running.pop(sentinel)] = time.monotonic() - start  # type: ignore[index]
    ended = []
    for rank, process in enumerate(processes):
        if rank in running.values():
            process.kill()
        # What it has forked may live on and hide its end.
        process.join(1.0 if rank == failing else None)
        output = paths[rank].read_text(errors="replace") if paths[rank].exists() else ""
        ended.append(
            Ended(
                process.exitcode if rank in seconds else None, seconds.get(rank, timeout_s), output
            )
        )
    return ended


def _run(
    rank: int,
    world_size: int,
    port: int,
    path: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    log = begin_rank(path.open("w"), rank, world_size, port)
    import torch

    torch.set_num_threads(1)
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    log.flush()
    # As any process does that ends: lifelines without a Trainer leave, and rank 0's hub with them.
    multiprocessing.util._run_finalizers(0)
    # Not by the usual way out: gloo's threads may abort a process that ends while a
    # DistributedDataParallel is alive.
    os._exit(status)
