import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from lightning_utilities.core.rank_zero import rank_zero_only

from distributed.forking_python import ForkingPython
from distributed.harness import PYTHON, Ranks, seed

# As Lightning has it, which not every test imports.
rank_zero_only.rank = getattr(rank_zero_only, "rank", 0)
# The worker of pytest that this process is may be forked.
FORKING = sys.executable
sys.executable = PYTHON
multiprocessing.set_executable(PYTHON)
# Small tensors gain nothing from threads, and threads that wait for each other lose much where
# others work too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Kernels for GPUs run in Triton's interpreter, which it asks for when it is imported: see
# interpreted.py.
if os.environ.get("TESTS_ON") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"
# W&B's own process is given half a minute to start: too little where others work too.
os.environ["WANDB__SERVICE_WAIT"] = "600"
# Every fit ends with a garbage collection. What is imported is large, and no garbage.
gc.disable()
# The same examples in every run, however slow the machine. `--hypothesis-profile=all`, as `make
# test-all` has it, takes more, up to what a test asks for.
EXAMPLES: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("quick", max_examples=15, **EXAMPLES)
settings.register_profile("all", max_examples=25, **EXAMPLES)
settings.load_profile("quick")

# What `make test` leaves to `make test-all`: ranks that are killed, start again or come and go,
# launchers, examples, experiments and hosts with processes of their own, trainings on four ranks,
# many ways to write a module or a loop. Single tests have the marker.
SLOW = (
    "elastic/test_experiment.py",
    "elastic/test_lost_ranks.py",
    "distributed/test_idioms.py",
    "distributed/test_launchers.py",
    "distributed/test_unusual_loops.py",
    "embedding/test_launchers.py",
    "experiments/test_benchmark.py",
    "experiments/test_error_averaging.py",
    "experiments/test_hosts.py",
    "experiments/test_jobs.py",
    "experiments/test_replicas.py",
    "experiments/test_rivals.py",
    "experiments/test_splits.py",
    "experiments/test_train.py",
    "experiments/test_translation.py",
    "experiments/test_zoo.py",
    "failures/test_process_group.py",
    "fsdp/test_bytes.py",
    "fsdp/test_checkpoints.py",
    "fsdp/test_training.py",
    "pipeline/test_idioms.py",
    "reliability/",
    "sync/test_lengths.py",
    "sync/test_coherence.py",
    "test_examples.py",
    "test_gpu_check.py",
)
# Nor has `make test` cases of more than two real ranks: of tests that say in one of these how many
# there are.
WORLD_SIZES = ("world_size", "saved", "loaded", "resumed", "world")
# These begin first: begun last, one of them would leave all workers but one with nothing to do.
LONGEST = (
    "compress/test_contract.py",
    "compress/test_contract_of_exchanges.py",
    "elastic/test_lost_ranks.py",
    "reliability/",
    "experiments/",
    "test_examples.py",
    "test_readme.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist are forked too, all from one process that has imported
    Lightning.
    """
    if (
        getattr(config.option, "tx", None)
        and not hasattr(config, "workerinput")
        and hasattr(os, "pidfd_open")
    ):
        folder = tempfile.TemporaryDirectory()
        python = ForkingPython(Path(folder.name))
        config.option.tx = [f"popen//python={python.path}"] * len(config.option.tx)
        config.add_cleanup(lambda: (python.stop(), folder.cleanup()))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def most_ranks(item: Any) -> int:
    if "ranks" not in item.fixturenames or not hasattr(item, "callspec"):
        return 0
    return max((item.callspec.params.get(name, 0) for name in WORLD_SIZES), default=0)


# Before pytest deselects by markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SLOW) or most_ranks(item) > 2:
            item.add_marker("slow")
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone: the collectives are the real ones, but nothing is sent."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(2).run(function, *arguments)``: the function in two processes, which are kept from
    test to test.
    """
    folder = tmp_path_factory.mktemp("ranks")
    started: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size, folder)
        return started[world_size]

    yield of
    for some in started.values():
        some.stop()


@pytest.fixture(scope="session")
def python_that_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if FORKING != PYTHON or not hasattr(os, "pidfd_open"):  # only Linux has it
        yield FORKING
        return
    python = ForkingPython(tmp_path_factory.mktemp("python"))
    yield str(python.path)
    python.stop()


@pytest.fixture
def quick_python(python_that_forks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that are started by ``sys.executable``, and those that they start, are
    forked.
    """
    monkeypatch.setattr(sys, "executable", python_that_forks)
