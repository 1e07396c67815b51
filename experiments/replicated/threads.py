"""Threads of this process that are the ranks of a process group, with torch's own group for them.

``torch.distributed`` means another world in each thread, so the package runs in them as it runs in processes: it packs,
exchanges and adds the same payloads. Sums are made in the order of the ranks.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded


class ThreadedRanks:
    """So many ranks in this process; use it as a context. A process has one at a time."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __enter__(self) -> "ThreadedRanks":
        threaded._install_threaded_pg()
        _set_thread_isolation_mode(True)  # each thread names its groups by itself
        threaded.ProcessLocalGroup.reset()
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(self.world_size)]
        store = dist.HashStore()

        def join(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=self.world_size, store=store)

        self.run(join)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.shutdown()
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What a function of the rank returns on each of them, by rank. One that fails ends the others."""
        tasks = [thread.submit(function, rank) for rank, thread in enumerate(self._threads)]
        failed = [task for task in wait(tasks, return_when=FIRST_EXCEPTION).done if task.exception() is not None]
        if failed:
            # The others may wait for it in a collective.
            threaded.ProcessLocalGroup.exception_handle(None)
            wait(tasks)
            failed[0].result()
        return [task.result() for task in tasks]
