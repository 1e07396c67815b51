"""On a pretended GPU: nobody waits for it, and what it has to tell is told late."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import interpreted  # noqa: F401
from emulated_ranks import EmulatedRanks, fake_bucket
from lightning_dct import DCTConfig
from lightning_dct.activations.codec import decode_forward
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.compress import awaited, codec, on_gpu
from lightning_dct.compress.awaited import Awaited
from lightning_dct.exchange import base, collectives
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.wire.positions import PayloadError
from strategies_for_hypothesis import FORMATS

# "a" is cut for two owners and "b" is sent dense.
SIZES = {"a": 1400, "b": 50, "c": 700, "d": 120}
# Ranks, exchange, ranks per node.
EXCHANGES = [(2, "all_gather", 1), (2, "two_phase", 1), (4, "hierarchical", 2)]
EVERY_EXCHANGE = pytest.mark.parametrize(("world_size", "exchange", "ranks_per_node"), EXCHANGES)


class Waits(Exception):
    pass


class NoWaitingOperation(TorchDispatchMode):
    """Raises where the host would wait for a GPU: results whose shape or value it needs, copies
    from or to it.

    A tensor on torch's "meta" device stands for one on a GPU: it has no values that anybody could
    look at.
    """

    WAITING = {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "equal",
        "bincount",
        "repeat_interleave",
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in self.WAITING:
            raise Waits(name)
        if name in ("index", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise Waits(f"{name} with a mask")
        devices = {
            part.device.type for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)
        }
        if name == "_to_copy" and kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if len(devices) > 1:
            raise Waits(f"{name} between {' and '.join(sorted(devices))}")
        return func(*args, **(kwargs or {}))


class NoTensorFromNumbers(TorchFunctionMode):
    """Raises where numbers would be copied to a GPU. Operations on "meta" do not show that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.frombuffer, torch.from_numpy):
            raise Waits(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_waits() -> Iterator[None]:
    with NoWaitingOperation(), NoTensorFromNumbers():
        yield


@pytest.mark.parametrize(
    "waiting",
    [
        lambda numbers: numbers.sum().item(),
        lambda numbers: bool((numbers > 0).any()),
        lambda numbers: numbers.tolist(),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: numbers.index_put_((numbers > 0,), numbers),
        lambda numbers: (numbers > 0).nonzero(),
        lambda numbers: torch.bincount(numbers.long()),
        lambda numbers: numbers.cpu(),
        lambda numbers: numbers.copy_(torch.ones(5)),
        lambda numbers: torch.ones(5).copy_(numbers),
        lambda numbers: torch.tensor([1.0, 2.0], device="meta"),
        lambda numbers: numbers[torch.arange(3)],
    ],
)
def test_waiting_would_be_noticed(waiting: Callable[[Tensor], object]) -> None:
    """What the tests after this one rely on."""
    numbers = torch.empty(5, device="meta")
    with nobody_waits(), pytest.raises(Waits):
        waiting(numbers)


class Streams:
    """Two streams of a pretended GPU; ``told`` has who waits for what, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.backward, self.beside = (SimpleNamespace(name=name) for name in ("backward", "beside"))
        for stream in (self.backward, self.beside):
            stream.wait_stream = lambda other, name=stream.name: self.told.append(
                (name, other.name)
            )
        self.current = self.backward

    @contextmanager
    def switched_to(self, stream: Any) -> Iterator[None]:
        before = self.current
        self.current = stream
        yield
        self.current = before

    def wait(self) -> None:
        """What a collective's work does: the host goes on."""
        self.told.append((self.current.name, "network"))


class Connected:
    """Collectives that bring anything, at once."""

    @staticmethod
    def all_gather_single(output: Tensor, mine: Tensor, **_: Any) -> Any:
        return SimpleNamespace(
            wait=lambda: output.copy_(mine.repeat(output.numel() // mine.numel()))
        )

    @staticmethod
    def all_to_all_single(output: Tensor, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(wait=lambda: output.fill_(1))

    @staticmethod
    def all_reduce(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.beside)
    monkeypatch.setattr(torch.cuda, "stream", streams.switched_to)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", {"meta"})
    monkeypatch.setattr(codec, "threshold_from", lambda values, size, target: 1.0)
    monkeypatch.setattr(on_gpu, "_launch", lambda *_, **__: None)
    monkeypatch.setattr(collectives, "dist", Connected)
    monkeypatch.setattr(
        base, "Future", lambda devices: SimpleNamespace(set_result=lambda mean: None)
    )
    # It copies to the host without waiting, but here there is nothing that could be copied.
    monkeypatch.setattr(Awaited, "poll", lambda self: None)
    return streams


def step(ranks: EmulatedRanks, dtype: torch.dtype, bucket_sizes: list[int]) -> None:
    """Rank 0 hands its buckets over, of so many parameters each."""
    parameters: list[nn.Parameter] = list(ranks._parameters[0].values())
    for index, count in enumerate(bucket_sizes):
        part = parameters[:count]
        parameters = parameters[count:]
        buffer = torch.empty(
            sum(parameter.numel() for parameter in part), dtype=dtype, device="meta"
        )
        ranks.synchronizers[0].hook(None, fake_bucket(index, buffer, part, is_last=not parameters))  # type: ignore[arg-type]


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("value_format", "dtype"),
    [*((name, torch.float32) for name in FORMATS), ("bf16", torch.bfloat16)],
)
@EVERY_EXCHANGE
def test_nobody_waits_for_a_gpu(
    world_size: int, exchange: str, ranks_per_node: int, value_format: str, dtype: torch.dtype
) -> None:
    ranks = EmulatedRanks(
        SIZES,
        world_size,
        exchange,
        ranks_per_node,
        density=0.1,
        min_tensor_size=60,
        value_format=value_format,
    )
    # The first time, thresholds are selected, and what is the same in every step is copied to the
    # device.
    step(ranks, dtype, [3, 1])
    with nobody_waits():
        step(ranks, dtype, [3, 1])
        step(ranks, dtype, [3, 1])
    assert ranks.synchronizers[0].synchronisations == 3


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("density", [0.3, 0.1])
@EVERY_EXCHANGE
def test_an_exchange_of_updates_waits_for_nothing(
    world_size: int,
    exchange: str,
    ranks_per_node: int,
    density: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In warm-up, in which own weights lose a part of what is not sent, and after it.

    It makes no future of torch either, which on a GPU would pickle all that is received.
    """
    monkeypatch.setattr(base, "Future", None)
    config = DCTConfig(local_steps=1, warmup_steps=3, density=density, min_tensor_size=60)
    parameters = {
        name: nn.Parameter(torch.empty(size, device="meta")) for name, size in SIZES.items()
    }
    optimizer = torch.optim.SGD(parameters.values())
    made = EmulatedRanks(SIZES, world_size, exchange, ranks_per_node)._exchange(
        exchange, 0, ranks_per_node, config
    )
    names = {parameter: name for name, parameter in parameters.items()}
    synchronizer = UpdateSynchronizer(
        config, names, made, Buffers(), lambda: [optimizer], parameters.values
    )
    for first in (True, False, False, False, False):
        synchronizer.before_step(optimizer)
        with nullcontext() if first else nobody_waits():
            synchronizer.after_step(optimizer)
    assert synchronizer.synchronisations == 5


@EVERY_EXCHANGE
def test_backward_does_not_wait_for_the_network_before_its_end(
    world_size: int,
    exchange: str,
    ranks_per_node: int,
    pretended_gpu: Streams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived = SimpleNamespace(wait=pretended_gpu.wait)
    for name in ("all_gather_single", "all_to_all_single", "all_reduce"):
        monkeypatch.setattr(Connected, name, staticmethod(lambda *_, **__: arrived))
    ranks = EmulatedRanks(
        SIZES, world_size, exchange, ranks_per_node, density=0.1, min_tensor_size=60
    )
    step(ranks, torch.float32, [2, 1, 1])
    *before, last = pretended_gpu.told
    assert last == ("backward", "beside")
    waits = 3 * ranks.synchronizers[0].exchange.num_collectives
    assert sorted(before) == [("beside", "backward")] * 3 + [("beside", "network")] * waits


@pytest.mark.usefixtures("pretended_gpu")
def test_a_backward_that_is_captured_as_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="Leave backward out of the graph, or use `compress='updates'`"
    ):
        step(EmulatedRanks(SIZES), torch.float32, [4])


def gradients(world_size: int) -> list[dict[str, Tensor]]:
    noise = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(size, generator=noise) for name, size in SIZES.items()}
        for _ in range(world_size)
    ]


def test_norms_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is read at once; every number by itself would wait anew."""
    ranks = EmulatedRanks(SIZES, 2, "two_phase", density=0.1, min_tensor_size=60)
    ranks.step(gradients(2))
    weights = SharedWeights()
    for name, size in SIZES.items():
        weights.adopt(name, torch.ones(size))
    with NoWaitingOperation():
        assert set(ranks.synchronizers[0].norms()) == set(SIZES)
        assert weights.norms() == dict.fromkeys(SIZES, 0.0)


@pytest.mark.parametrize("formats", [("int8", "int4"), ("bf16", "fp32")])
def test_a_border_that_sends_everything_waits_for_nothing(
    formats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the receiver read the header: it knows what must be there."""
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", {"meta"})
    split = SplitPoint(1.0, forward_format=formats[0], backward_format=formats[1])
    activations = torch.empty(6, 8, device="meta", requires_grad=True)
    split(activations)
    with NoWaitingOperation():
        split(activations).backward(torch.empty(6, 8, device="meta"))


@pytest.mark.parametrize("saved", [True, False])
def test_a_corrupt_header_is_reported_in_the_next_step_and_before_anything_is_saved(
    saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "WITHOUT_WAITING", {"cpu"})
    split = SplitPoint(1.0)
    layout = split.layout((6, 8))
    sent = torch.randn(6, 8)
    payload, _ = split.encode(layout, sent)
    for place, corrupt in ((None, False), (4, True)):
        if place is not None:
            payload[place] += 1
        received, _ = decode_forward(layout, payload, awaited=split.awaited)
        assert torch.equal(received, sent.bfloat16().float())
        split.advance(1)  # copies begin
        copy.deepcopy(split).compression_state()  # which has received nothing
        with (
            pytest.raises(PayloadError, match="of an earlier step is corrupt")
            if corrupt
            else nullcontext()
        ):
            split.compression_state() if saved else split.advance(2)


def test_told_in_order_and_only_once() -> None:
    awaited = Awaited()
    told = list[list[int]]()
    awaited.on_ready(torch.tensor([3, 4]), told.append)
    awaited.on_ready(torch.tensor([True]), told.append)
    awaited.poll()
    assert told == []
    awaited.on_ready(torch.tensor([5]), told.append)
    awaited.poll()
    assert told == [[3, 4], [1]]
    awaited.on_ready(torch.tensor([], dtype=torch.int64), told.append)
    awaited.synchronize()
    awaited.synchronize()
    assert told == [[3, 4], [1], [5], []]


def test_norms_on_two_devices_are_read_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resume, residuals that nothing was sent of yet are still on the host."""
    monkeypatch.setattr(Tensor, "tolist", lambda self: [2.0 if self.is_meta else 1.0] * len(self))
    numbers = {
        name: torch.zeros((), device=device)
        for name, device in (("a", "cpu"), ("b", "meta"), ("c", "cpu"))
    }
    found = awaited.read_together(numbers)
    assert (list(found), list(found.values())) == (["a", "b", "c"], [1.0, 2.0, 1.0])
    assert awaited.read_together({}) == {}
