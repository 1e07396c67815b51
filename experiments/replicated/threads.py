"""A thread for each replica, whose collectives wait for all of them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

Arrive = Callable[[list[tuple[Tensor, Any]]], Any]


class Work:
    """A collective that this rank has started."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.wait = finish


class ThreadGroup:
    """The process group of one thread of several: a collective returns when all threads have come
    to it.
    """

    def __init__(self, rank: int, brought: list[Any], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._brought = brought
        self._barrier = barrier

    def size(self) -> int:
        return self._barrier.parties

    def rank(self) -> int:
        return self._rank

    def bring(self, tensor: Tensor, sizes: Any, arrive: Arrive) -> Work:
        """Bring a tensor to a collective, and wait for what arrives."""
        self._brought[self._rank] = tensor, sizes
        self._barrier.wait()
        arrived = arrive(list(self._brought))
        self._barrier.wait()
        return Work(lambda: arrived)


class Threads:
    """The threads of some replicas.

    Attributes:
        groups: The process group of each.
    """

    def __init__(self, replicas: int) -> None:
        threads = torch.get_num_threads()
        brought = replicas * [None]
        self._barrier = threading.Barrier(replicas)
        self._pool = ThreadPoolExecutor(
            replicas, initializer=lambda: torch.set_num_threads(threads)
        )
        self.groups = [ThreadGroup(rank, brought, self._barrier) for rank in range(replicas)]

    def run(self, function: Callable[[int], object]) -> None:
        """Call a function with the number of each replica, in its thread, on the caller's stream.

        Raises:
            Exception: What a replica has raised. The others do not wait for it.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def call(rank: int) -> None:
            try:
                with torch.cuda.stream(stream):
                    function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        calls = [self._pool.submit(call, rank) for rank in range(len(self.groups))]
        wait(calls)
        problems = [problem for one in calls if (problem := one.exception()) is not None]
        for problem in sorted(
            problems, key=lambda one: isinstance(one, threading.BrokenBarrierError)
        ):
            raise problem
