import os
from collections.abc import Callable, Iterator

import pytest
import torch

from distributed.harness import Ranks

# Small tensors gain nothing from threads, and threads that wait for each other lose much where others work too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


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
