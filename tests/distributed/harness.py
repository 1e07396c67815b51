"""Ranks to run tests on: processes that are started once and then run one function after another.

``Ranks(2).run(function, *arguments)`` runs ``function`` in two processes that form a gloo group and
see the environment that ``torchrun`` gives, so that a Lightning Trainer takes them as its ranks.
What it returns comes back as a list by rank. When a rank fails, dies or takes too long, all of them
are killed, the test fails and says why, and the next ``run`` starts new ones. Every function begins
with the same seeds, whatever ran before it.
"""

import contextlib
import gc
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

# Far more than anything takes on a quiet machine; a busy one may have a tenth of its speed.
TIMEOUT_S = 400.0
# How long the other ranks may take to report their own failure after one rank has reported one.
GRACE_S = 3.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["distributed.preloaded"])
TESTS = Path(__file__).parents[1]
# What `sys.executable` is before `forking_python` takes its place.
PYTHON = sys.executable


class RankFailure(AssertionError):
    """A function did not return on every rank."""


class Ranks:
    """Some processes in one process group."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank and return what each of them returned."""
        if not self._processes:
            self._start()
        task = pickle.dumps((function.__module__, function.__qualname__, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has died, and so it answers
                pipe.send_bytes(task)
        results, failures = self._answers(timeout_s)
        if failures:
            self.stop()
            raise RankFailure(f"{function.__qualname__}{arguments}\n{self._told(failures)}")
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """Kill the processes; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes = []
        self._pipes = []

    def _start(self) -> None:
        failures: dict[int, str] = {}
        for _ in range(2):  # somebody may have taken the port before rank 0 has
            port = free_port()
            for rank in range(self.world_size):
                ours, theirs = CONTEXT.Pipe()
                process = started(
                    _serve, rank, self.world_size, port, theirs, self._log_path(rank), daemon=True
                )
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            _, failures = self._answers(TIMEOUT_S)
            if not failures:
                return
            self.stop()
        raise RankFailure(f"the ranks have not started\n{self._told(failures)}")

    def _answers(self, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """By rank, what it answers, or how it has failed."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                for rank in waiting.values():
                    failures.setdefault(
                        rank, f"no answer after {timeout_s:.0f} s:\n{self._log(rank)}"
                    )
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    succeeded = False
                    answer = f"the process died:\n{self._log(rank)}"
                if succeeded:
                    results[rank] = answer
                else:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return results, failures

    def _told(self, failures: dict[int, str]) -> str:
        return "\n".join(
            f"--- rank {rank} of {self.world_size}: {failures[rank]}" for rank in sorted(failures)
        )

    def _log_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}-of-{self.world_size}.log"

    def _log(self, rank: int) -> str:
        path = self._log_path(rank)
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def started(function: Callable[..., Any], *arguments: Any, daemon: bool = False) -> Any:
    """A new process that calls ``function(*arguments)`` and in which :mod:`distributed.preloaded`
    is imported already.

    A fork server of Python before 3.12.9 looks for what it shall import in ``PYTHONPATH`` alone. It
    says nothing when it does not find it, and then every process imports everything by itself.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    # This process is one of its forks.
    if server._forkserver_pid is None and server._forkserver_address is not None:
        server.ensure_running = lambda: None
    with patch.dict(
        os.environ, PYTHONPATH=f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ):
        server.ensure_running()
    process = CONTEXT.Process(target=_begin, args=(function, *arguments), daemon=daemon)
    process.start()
    return process


def _begin(function: Callable[..., Any], *arguments: Any) -> None:
    assert "distributed.preloaded" in sys.modules, (
        "the fork server has not found it: every process imports everything"
    )
    # What it starts is started as elsewhere, by no fork server.
    multiprocessing.set_start_method(None, force=True)
    function(*arguments)


def free_port() -> int:
    """A TCP port nobody listens on, below all that kernels give away: nobody else takes it before
    it is bound.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def seed() -> None:
    """What a test draws depends neither on the tests before it nor on chance."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def elastic_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What ``torchrun`` sets for one of its workers."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }


class _FromAnyDevice(pickle.Pickler):
    """Whoever asks gets all tensors on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        return (
            obj.cpu().__reduce_ex__(2)
            if isinstance(obj, torch.Tensor) and obj.is_cuda
            else NotImplemented
        )


def begin_rank(log: TextIO, rank: int, world_size: int, port: int) -> TextIO:
    """In the process of a rank: write all output to a log, and make this rank known to torch."""
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    os.environ.update(elastic_environment(rank, world_size, port))
    return log


def _destroy_groups() -> None:
    """End the groups that the last task has left, such as a mesh's: each has threads that take a
    share of the cores.

    All ranks have done that task, so all of them have connected. A mesh that equals an earlier one
    would get what DTensor remembers of that, its groups among it.
    """
    left = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in left:
        dist.destroy_process_group(group)
    if left and "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    if left:
        gc.collect()


def _end_lifelines() -> None:
    """End those of plain loops, which last as long as a process: the next task finds none, whatever
    ran before.
    """
    if (loaded := sys.modules.get("lightning_dct.failures.lifeline")) is not None:
        for lifeline in filter(None, loaded._of_processes.values()):
            lifeline.close()
        loaded._of_processes.clear()


def _serve(rank: int, world_size: int, port: int, pipe: Connection, log_path: Path) -> None:
    log = begin_rank(log_path.open("w"), rank, world_size, port)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    pipe.send_bytes(pickle.dumps((True, None)))  # it has started
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            module, name, arguments = pickle.loads(pipe.recv_bytes())
            _end_lifelines()
            _destroy_groups()
            seed()
            try:
                answer = True, getattr(importlib.import_module(module), name)(*arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            log.flush()
            told = io.BytesIO()
            _FromAnyDevice(told).dump(answer)
            pipe.send_bytes(told.getvalue())
    # Not by the usual way out: gloo's threads may abort a process that ends while a
    # DistributedDataParallel is alive.
    os._exit(0)
