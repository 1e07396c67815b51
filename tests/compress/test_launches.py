"""What a bucket costs on a GPU, on the CPU: how many operations a host starts, and that they do the same twice."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import emulated_ranks
from emulated_ranks import EmulatedRanks, EmulatedWork
from lightning_dct.compress import awaited
from lightning_dct.sync.gradients import GradientSynchronizer
from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.payloads_on_device import SideBySide
from strategies_for_hypothesis import FORMATS

# "b" and "e" are sent dense.
SIZES = {"a": 14000, "b": 50, "c": 7000, "d": 1200, "e": 40, "f": 3000}
# Ranks, and how many of them share a node.
WORLDS = {
    "all_gather": [(2, 1), (4, 1), (8, 1)],
    "sharded": [(2, 1), (4, 1), (8, 1)],
    "by_node": [(4, 2), (8, 2), (8, 4)],
}
# Two rounds of compression where sums are thresholded again.
MOST = {"all_gather": 140, "sharded": 335, "by_node": 163}


class Counting(TorchDispatchMode):
    """Counts the operations that work on a tensor's entries; views and room for new ones cost a GPU nothing."""

    # Those beside views: numbers that stay on the host.
    FREE = ("empty", "new_empty", "empty_like", "scalar_tensor", "detach", "alias", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name.removeprefix("aten::") not in self.FREE:
            self.started[func._schema.name.removeprefix("aten::")] += 1
            if isinstance(result, Tensor):
                self.largest = max(self.largest, result.numel() * result.element_size())
        return result


class SameTwice(TorchDispatchMode):
    """Raises where a GPU may add in another order the next time, or keep another of several values.

    By the list of ``torch.use_deterministic_algorithms``. What it lists for repeated indices only may run where no
    index is repeated; what adds, also where all but one number for an index are zeros.
    """

    NEVER = ("scatter_add", "scatter_add_", "put_", "histc", "kthvalue", "median", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.NEVER
        if name in ("cumsum", "cumsum_"):
            assert not args[0].dtype.is_floating_point
        if name in ("scatter_reduce", "scatter_reduce_"):
            assert args[4] in ("amax", "amin")
        if name in ("index_add", "index_add_") and args[0].dtype.is_floating_point:
            assert_distinct(args[2][args[3] != 0])
        if name in ("index_copy", "index_copy_") or (name in ("scatter", "scatter_") and isinstance(args[3], Tensor)):
            assert_distinct(args[2])
        if name in ("index_put", "index_put_", "_index_put_impl_") and not (args[3:] and args[3]):
            assert_distinct(args[1][0])
        return func(*args, **(kwargs or {}))


def assert_distinct(indices: Tensor) -> None:
    assert indices.unique().numel() == indices.numel()


class UnwatchedWork(EmulatedWork):
    """What the network does is not the host's."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__(_disable_current_modes()(finish))


def second_step(
    watched: Callable[[], AbstractContextManager[Any]],
    world_size: int,
    exchange: str,
    ranks_per_node: int,
    value_format: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Rank 0 under watch in its second step; thresholds are selected in the first."""
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", {"cpu"})
    monkeypatch.setattr(emulated_ranks, "EmulatedWork", UnwatchedWork)
    settings: dict[str, Any] = {"density": 0.05, "min_tensor_size": 60, "value_format": value_format}
    ranks = EmulatedRanks(SIZES, world_size, exchange, ranks_per_node, **settings)
    noise = torch.Generator().manual_seed(1)
    watch, hook = watched(), GradientSynchronizer.hook

    def hook_under_watch(self: GradientSynchronizer, *args: Any) -> Any:
        with watch if self is ranks.synchronizers[0] and self.synchronisations else nullcontext():
            return hook(self, *args)

    monkeypatch.setattr(GradientSynchronizer, "hook", hook_under_watch)
    for _ in range(2):
        ranks.step([{n: torch.randn(size, generator=noise) for n, size in SIZES.items()} for _ in range(world_size)])
    return watch


@pytest.mark.parametrize("exchange", WORLDS)
def test_operations_do_not_grow_with_the_ranks(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = [
        second_step(Counting, world_size, exchange, per_node, "1bit", monkeypatch).started
        for world_size, per_node in WORLDS[exchange]
    ]
    assert started[0] == started[1] == started[2]
    assert 0 < started[0].total() <= MOST[exchange]


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize(("exchange", "world_size", "ranks_per_node"), [("sharded", 3, 1), ("by_node", 4, 2)])
def test_a_gpu_would_do_the_same_twice(
    exchange: str, world_size: int, ranks_per_node: int, value_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_step(SameTwice, world_size, exchange, ranks_per_node, value_format, monkeypatch)


@pytest.mark.parametrize("operation", ["index_add_", "scatter_add_"])
def test_another_order_would_be_noticed(operation: str) -> None:
    with SameTwice(), pytest.raises(AssertionError):
        getattr(torch.zeros(3), operation)(0, torch.tensor([1, 1]), torch.ones(2))


def test_the_bits_of_positions_take_no_more_room_than_the_positions() -> None:
    """Nine bits a position that are sent as they are: eight bytes for each would be 72 a slot."""
    layout = PayloadLayout((1 << 20,), (1 << 10,), "1bit")
    assert layout.position_code.low_bits == 9
    side = SideBySide([layout], torch.device("cpu"))
    in_use = side.numbers < layout.capacity
    with Counting() as counting:
        positions = side.encode_positions(side.spare, in_use)
        payload = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        payload[sum(layout.part_sizes[:2]) :][: positions.numel()] = positions
        assert side.unpack(payload.unsqueeze(0)).in_use.sum() == layout.capacity
    assert counting.largest <= 40 * side.numbers.numel()
