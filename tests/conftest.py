import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from distributed.harness import Ranks, seed

# Small tensors gain nothing from threads, and threads that wait for each other lose much where others work too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# W&B's own process is given half a minute to start: too little where others work too.
os.environ["WANDB__SERVICE_WAIT"] = "600"
# Every fit ends with a garbage collection. What is imported is large, and no garbage.
gc.disable()
# The same examples in every run, however slow the machine.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Files that take longest come first: begun last, one of them would leave all workers but one with nothing to do.
LONGEST = {
    "test_lost_ranks.py",
    "test_readme.py",
    "test_examples.py",
    "test_restarts.py",
    "test_launchers.py",
    "test_refusals.py",
    "test_hosts.py",
    "test_jobs.py",
    "test_benchmark.py",
    "test_kill_and_resume.py",
}


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone: the collectives are the real ones, but nothing is sent."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(2).run(function, *arguments)``: the function in two processes, which are kept from test to test."""
    folder = tmp_path_factory.mktemp("ranks")
    started: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size, folder)
        return started[world_size]

    yield of
    for some in started.values():
        some.stop()
