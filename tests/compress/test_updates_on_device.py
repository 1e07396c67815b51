"""An exchange of updates on a GPU does what it does on a CPU, in few operations: on the CPU too, or on a card."""

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from test_launches import Counting, UnwatchedWork
from test_on_device import WAYS, device_of, on
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import emulated_ranks
from emulated_ranks import EmulatedDist, EmulatedRanks, assert_same_bits
from lightning_dct import DCTConfig
from lightning_dct.compress import awaited, bucket_plan
from lightning_dct.compress.adding import name_broken_sender
from lightning_dct.exchange import collectives
from lightning_dct.sync import rounds, updates
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.wire import payloads_on_device

# "b" and "e" are sent dense.
SIZES = {"a": 1400, "b": 50, "c": 700, "d": 120, "e": 16}
CPU = torch.device("cpu")
EXCHANGES = [(2, "all_gather", 1), (5, "all_gather", 1), (3, "sharded", 1), (4, "by_node", 2)]
# By exchange and density: operations of a bucket, and of a step beside those of its buckets: the guard works once.
MOST = {
    ("all_gather", 0.3): (83, 20),
    ("all_gather", 0.05): (112, 20),
    ("sharded", 0.3): (249, 17),
    ("sharded", 0.05): (346, 17),
}
DENSITIES = [0.3, 0.05]


class UpdatingRanks:
    """The ranks of an exchange, each with its own weights; all changes are random."""

    def __init__(
        self,
        world_size: int,
        exchange: str,
        ranks_per_node: int,
        sizes: dict[str, int],
        device: torch.device = CPU,
        **given: Any,
    ) -> None:
        settings = {"local_steps": 1, "min_tensor_size": 60, **given}
        emulated = EmulatedRanks(sizes, world_size, exchange, ranks_per_node)
        self.noise, self.synchronizers, self.optimizers = torch.Generator().manual_seed(1), [], []
        for rank in range(world_size):
            parameters = {name: nn.Parameter(torch.linspace(-1, 1, size).to(device)) for name, size in sizes.items()}
            optimizer, config = torch.optim.SGD(parameters.values(), lr=1.0), DCTConfig(**settings)
            self.optimizers.append(optimizer)
            self.synchronizers.append(
                UpdateSynchronizer(
                    config,
                    {parameter: name for name, parameter in parameters.items()},
                    emulated._exchange(exchange, rank, ranks_per_node, config),
                    Buffers(),
                    lambda own=[optimizer]: own,
                    lambda own=parameters: own.values(),
                )
            )

    def step(self, broken: float | None = None, watch: Any = None) -> None:
        changes = [
            [torch.randn(p.shape, generator=self.noise).pow(3) for p in optimizer.param_groups[0]["params"]]
            for optimizer in self.optimizers
        ]
        if broken is not None:
            changes[1][0][[3, 5, 9]] = broken
        with mock.patch.object(collectives, "dist", EmulatedDist), ThreadPoolExecutor(len(changes)) as threads:
            done = [threads.submit(self._step, rank, own, watch) for rank, own in enumerate(changes)]
            for rank in done:
                rank.result()

    def _step(self, rank: int, changes: list[Tensor], watch: Any) -> None:
        optimizer, synchronizer = self.optimizers[rank], self.synchronizers[rank]
        synchronizer.before_step(optimizer)
        for parameter, change in zip(optimizer.param_groups[0]["params"], changes, strict=True):
            parameter.data.add_(change.to(parameter.device))
        with watch if watch is not None and rank == 0 else nullcontext():
            synchronizer.after_step(optimizer)

    def state_dicts(self) -> list[dict[str, Any]]:
        states = []
        for own in self.synchronizers:
            state, weights = own.state_dict(), own.weights
            shared = {name: weights.shared(name) for name in weights.parameters}
            states.append(on(CPU, {part: state[part] for part in ("weights", "owned")} | {"shared": shared}))
        return states


@pytest.mark.parametrize(("value_format", "density"), [("1bit", 0.3), ("1bit", 0.05), ("2bit", 0.4), ("bf16", 0.3)])
@pytest.mark.parametrize(("world_size", "exchange", "ranks_per_node"), EXCHANGES)
def test_the_weights_are_those_of_the_ordinary_way(
    world_size: int,
    exchange: str,
    ranks_per_node: int,
    value_format: str,
    density: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In warm-up and after it, over several buckets, and after an infinite entry on one rank."""
    monkeypatch.setattr(rounds, "LARGEST_BUCKET", 1500)
    settings = {"value_format": value_format, "density": density, "warmup_steps": 2}
    runs = {way: UpdatingRanks(world_size, exchange, ranks_per_node, SIZES, device_of(way), **settings) for way in WAYS}
    for step in range(6):
        for way, ranks in runs.items():
            monkeypatch.setattr(awaited, "WITHOUT_WAITING", WAYS[way])
            ranks.step(broken=float("inf") if step == 5 else None)
        expected, found = (ranks.state_dicts() for ranks in runs.values())
        assert_same_bits(expected, found)
    assert all(state["shared"]["c"].isfinite().all() for state in found)


@pytest.mark.parametrize(("value_format", "density"), [("1bit", 0.3), ("1bit", 0.05), ("2bit", 0.3)])
@pytest.mark.parametrize(("world_size", "exchange", "ranks_per_node"), EXCHANGES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_rank_that_sends_nan_is_named_once_its_numbers_are_known(
    world_size: int,
    exchange: str,
    ranks_per_node: int,
    value_format: str,
    density: float,
    broken: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", WAYS["on the device"])
    name_broken_sender.cache_clear()
    settings = {"value_format": value_format, "density": density, "warmup_steps": 0}
    ranks = UpdatingRanks(world_size, exchange, ranks_per_node, SIZES, device_of("on the device"), **settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ranks.step()
        assert not said
        ranks.step(broken)
        ranks.step()
    # By node a rank sends the mean of its node's own.
    number = 0 if exchange == "by_node" else 1
    assert any(
        f"Updates from rank {number} of the process group are infinite or NaN" in str(one.message) for one in said
    )


def watched(
    watch: TorchDispatchMode,
    buckets: int,
    world_size: int,
    density: float,
    monkeypatch: pytest.MonkeyPatch,
    exchange: str = "all_gather",
    tensors: Mapping[str, int] = SIZES | {"f": 1800},
) -> None:
    """Rank 0 under watch in its third exchange, of so many buckets with the same tensors and about 4,000 entries."""
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", {"cpu"})
    monkeypatch.setattr(emulated_ranks, "EmulatedWork", UnwatchedWork)
    monkeypatch.setattr(rounds, "LARGEST_BUCKET", 1 << 12)
    monkeypatch.setattr(updates, "MOST_IN_FLIGHT", 1 << 13)
    sizes = {f"{name} of {number}": size for number in range(buckets) for name, size in tensors.items()}
    ranks = UpdatingRanks(world_size, exchange, 1, sizes, density=density, warmup_steps=0)
    for last in (False, False, True):
        ranks.step(watch=watch if last else None)
    assert len(ranks.synchronizers[0]._rounds[0].buckets) == buckets


@pytest.mark.parametrize(("exchange", "density"), MOST)
def test_operations_of_an_exchange(exchange: str, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressing, reading what all ranks have sent, and adding that to both sets of weights."""

    def started(buckets: int, world_size: int) -> int:
        watch = Counting()
        watched(watch, buckets, world_size, density, monkeypatch, exchange)
        return watch.started.total()

    two, five = started(2, 2), started(5, 2)
    assert exchange == "sharded" or started(2, 8) == two
    a_bucket = (five - two) / 3
    assert 0 < a_bucket <= MOST[exchange, density][0]
    assert two - 2 * a_bucket <= MOST[exchange, density][1]


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made under watch have at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {part.untyped_storage()._cdata for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and (storage := part.untyped_storage())._cdata not in given:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._known.values()))
        return result


@pytest.mark.parametrize("density", DENSITIES)
def test_memory_of_an_exchange_is_that_of_the_buckets_in_flight(
    density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many buckets there are: with 80 bytes an entry of a bucket, 0.09 an entry of a billion."""
    found = []
    for buckets in (4, 12):
        watch = PeakMemory()
        watched(watch, buckets, 2, density, monkeypatch)
        found.append(watch.most)
    assert found[0] <= 80 * (1 << 12)
    # Each payload, which the emulated network keeps, and a few numbers of each bucket until the host knows them.
    assert found[1] - found[0] <= 8 * 1200


@pytest.mark.parametrize(("exchange", "most"), [("all_gather", 24), ("sharded", 46)])
@pytest.mark.slow
def test_memory_for_a_large_tensor_does_not_grow_with_the_ranks(
    exchange: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes an entry, of which many times as many are read as at once."""
    monkeypatch.setattr(payloads_on_device, "AT_ONCE", 1 << 12)
    for world_size in (2, 8):
        watch = PeakMemory()
        watched(watch, 1, world_size, 0.3, monkeypatch, exchange, {"a": 1 << 17})
        assert watch.most <= most * (1 << 17)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("density", DENSITIES)
def test_a_large_tensor_is_sent_as_its_pieces_would_be(
    way: str, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a model that has the pieces as parameters."""
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", WAYS[way])
    monkeypatch.setattr(bucket_plan, "MOST_AT_ONCE", 400)
    pieces = {f"a{number}": 400 for number in range(3)}
    runs = [
        UpdatingRanks(3, "all_gather", 1, sizes, device_of(way), density=density, warmup_steps=2)
        for sizes in ({"a": 1200}, pieces)
    ]
    for optimizer in runs[1].optimizers:
        parts = torch.linspace(-1, 1, 1200).split(400)
        for parameter, part in zip(optimizer.param_groups[0]["params"], parts, strict=True):
            parameter.data.copy_(part)
    for _ in range(5):
        for ranks in runs:
            ranks.step()
    for whole, parts in zip(*(ranks.state_dicts() for ranks in runs), strict=True):
        for kind in ("weights", "shared"):
            assert torch.equal(whole[kind]["a"], torch.cat([parts[kind][name] for name in pieces]))
    assert sorted(runs[0].synchronizers[0].thresholds.by_label()) == ["a[0:400]", "a[400:800]", "a[800:1200]"]


@pytest.mark.parametrize(("exchange", "world_size", "most"), [("all_gather", 2, 0.55), ("sharded", 8, 1.25)])
@pytest.mark.slow
def test_memory_for_a_tensor_sent_in_pieces_is_that_of_a_piece(
    exchange: str, world_size: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, payloads, which the emulated network keeps, too, an owner's sum, and 16 bytes for a piece's tag."""
    monkeypatch.setattr(bucket_plan, "MOST_AT_ONCE", 1 << 12)
    monkeypatch.setattr(payloads_on_device, "AT_ONCE", 1 << 12)
    found = []
    for pieces in (16, 32):
        watch = PeakMemory()
        watched(watch, 1, world_size, 0.3, monkeypatch, exchange, {"a": pieces << 12})
        found.append(watch.most)
    assert found[1] - found[0] <= most * (16 << 12)
    assert found[0] <= (16 * most + 60) * (1 << 12)


@pytest.mark.parametrize(("world_size", "exchange", "ranks_per_node"), EXCHANGES)
def test_pieces_on_a_device_end_as_on_a_cpu(
    world_size: int, exchange: str, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several pieces of an owner in several groups, and tensors that fit together in one."""
    monkeypatch.setattr(bucket_plan, "MOST_AT_ONCE", 200)
    settings = {"density": 0.3, "warmup_steps": 2}
    runs = {way: UpdatingRanks(world_size, exchange, ranks_per_node, SIZES, device_of(way), **settings) for way in WAYS}
    for _ in range(4):
        for way, ranks in runs.items():
            monkeypatch.setattr(awaited, "WITHOUT_WAITING", WAYS[way])
            ranks.step()
        assert_same_bits(*(ranks.state_dicts() for ranks in runs.values()))
