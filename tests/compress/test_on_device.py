"""The way for GPUs does what the ordinary way does on a CPU: on the CPU too, or on a card."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from emulated_ranks import EmulatedRanks
from lightning_dct.compress import awaited
from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, Received
from lightning_dct.compress.memory import Memory
from lightning_dct.compress.on_host import compress, decompress
from lightning_dct.wire.payload import unpack
from one_card import DEVICE
from strategies_for_hypothesis import FORMATS, examples

WAYS = {"ordinary": set[str](), "on the device": {DEVICE.type}}
PLAN = BucketPlan(("a", "b", "c", "d"), (300, 50, 200, 1), (6, 0, 10, 0), torch.float32, "bf16")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def device_of(way: str) -> torch.device:
    return DEVICE if WAYS[way] else torch.device("cpu")


class Rank:
    """One rank that sends bucket after bucket one of the two ways, to itself, beside what it has sent before."""

    def __init__(self, way: str, plan: BucketPlan, guard: bool = True) -> None:
        self.way, self.plan = WAYS[way], plan
        self.device = device_of(way)
        self.memory = Memory({}, guard, undoable=False)
        self.before: Tensor | None = None
        length = plan.bounds[-1][1] if plan.sizes else 1
        self.residual = torch.zeros(length + 2, dtype=plan.residual_dtype, device=self.device)

    def step(self, gradient: Tensor, deferred: set[int], scale: float = 1.0) -> tuple[Tensor, int, bool, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(awaited, "WITHOUT_WAITING", self.way)
            gradient = gradient.to(self.device)
            bucket, self.memory.selected = Bucket([gradient.clone()], [self.residual], scale), False
            sent = compress(self.memory, bucket, self.plan, deferred)
            payloads = torch.stack([sent.payload, sent.payload if self.before is None else self.before])
            self.before = sent.payload
            means = []
            for self.memory.lengthening in (1.0, 1.3, None):
                received = Received(payloads, self.plan, 0.5 / scale, own=0)
                means.append(decompress(self.memory, received, gradient.clone()))
            self.memory.awaited.synchronize()
        return sent.payload.cpu(), int(sent.num_entries) + sent.num_dense, self.memory.selected, torch.cat(means).cpu()


def assert_same_ways(
    plan: BucketPlan, steps: list[tuple[Tensor, set[int]]], guard: bool = True, scale: float = 1.0
) -> None:
    """The same payloads, means and residuals to the last bit, and the same thresholds to the last but one."""
    ordinary, on_device = (Rank(way, plan, guard) for way in WAYS)
    for gradient, deferred in steps:
        payload, num_entries, selected, mean = ordinary.step(gradient, deferred, scale)
        other_payload, other_num_entries, other_selected, other_mean = on_device.step(gradient, deferred, scale)
        assert (num_entries, selected) == (other_num_entries, other_selected)
        # Which of its many bit patterns a NaN has depends on its place in the processor's vectors.
        sent, other_sent = unpack(plan.layout, payload), unpack(plan.layout, other_payload)
        assert torch.equal(payload, other_payload) or bool(sent.values.isnan().any())
        assert torch.equal(sent.positions, other_sent.positions)
        assert torch.equal(sent.values.nan_to_num(nan=7.0), other_sent.values.nan_to_num(nan=7.0))
        assert torch.equal(mean.nan_to_num(nan=7.0), other_mean.nan_to_num(nan=7.0))
        assert torch.equal(bits(on_device.residual.cpu()), bits(ordinary.residual))
        expected, found = ordinary.memory.thresholds.state_dict(), on_device.memory.thresholds.state_dict()
        assert expected["targets"] == found["targets"]
        assert found["values"] == pytest.approx(expected["values"], rel=1e-13)


def on(device: torch.device, tensors: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tensors)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32)


def noise(plan: BucketPlan, steps: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(plan.bounds[-1][1] + 2, generator=generator).to(plan.dtype)


@pytest.mark.parametrize(("value_format", "dtype"), list(zip(FORMATS, DTYPES, strict=True)))
def test_many_steps_are_those_of_the_ordinary_way(value_format: str, dtype: torch.dtype) -> None:
    plan = replace(PLAN, value_format=value_format, dtype=dtype, starts=(1, 301, 360, 561))
    deferred = [set(), set(), {0}, set(), {1, 2}, {0, 2}, set()]
    assert_same_ways(plan, list(zip(noise(plan, len(deferred)), deferred, strict=True)), scale=0.5)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_infinite_and_nan_entries_arrive_and_spare_the_residual(broken: float, value_format: str) -> None:
    plan = replace(PLAN, value_format=value_format)
    gradients = list(noise(plan, 4))
    gradients[1][[5, 7, 310]] = broken
    gradients[2][300:] = broken
    assert_same_ways(plan, [(gradient, set()) for gradient in gradients])


@pytest.mark.parametrize(
    ("world_size", "exchange", "ranks_per_node"), [(2, "all_gather", 1), (3, "sharded", 1), (4, "by_node", 2)]
)
def test_whole_runs_of_every_exchange_are_those_of_the_ordinary_way(
    world_size: int, exchange: str, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over other buckets, a tensor that is not used, a step that is lost and a refresh."""
    sizes = {"a": 1400, "b": 50, "c": 700, "d": 120}
    settings = {"density": 0.1, "min_tensor_size": 60, "value_format": "2bit"}
    runs = {
        way: EmulatedRanks(
            sizes, world_size, exchange, ranks_per_node, loss_scale=lambda: 4.0, defer_unused=True, **settings
        )
        for way in WAYS
    }
    noise = torch.Generator().manual_seed(1)
    for step, buckets in enumerate([[["d", "c", "b", "a"]], [["c"], ["b", "a"], ["d"]]] * 3):
        gradients = [
            {name: torch.randn(size, generator=noise).pow(3) for name, size in sizes.items()} for _ in range(world_size)
        ]
        gradients[0]["c"][:] = 0.0
        if step == 3:
            gradients[1]["a"][5] = math.inf
        means = []
        for way, ranks in runs.items():
            monkeypatch.setattr(awaited, "WITHOUT_WAITING", WAYS[way])
            if step == 4:
                ranks.request_refresh()
            means.append(on(torch.device("cpu"), ranks.step(on(device_of(way), gradients), buckets)))
        for expected_mean, mean in zip(*means, strict=True):
            assert all(torch.equal(expected_mean[name].nan_to_num(7.0), mean[name].nan_to_num(7.0)) for name in sizes)
        for expected, found in zip(*(ranks.synchronizers for ranks in runs.values()), strict=True):
            thresholds = expected.thresholds.state_dict()["values"]
            assert found.thresholds.state_dict()["values"] == pytest.approx(thresholds, rel=1e-12)
    for expected_state, state in zip(
        *(on(torch.device("cpu"), ranks.state_dicts()) for ranks in runs.values()), strict=True
    ):
        times = {"seconds": 0, "seconds_waiting": 0}
        assert {**state["traffic"], **times} == {**expected_state["traffic"], **times}
        assert state["thresholds"]["targets"] == expected_state["thresholds"]["targets"]
        assert state["residuals"].keys() == expected_state["residuals"].keys()
        assert state["owned"].keys() == expected_state["owned"].keys()
        for name, residual in expected_state["residuals"].items():
            assert torch.equal(bits(residual), bits(state["residuals"][name]))
        for name, pieces in expected_state["owned"].items():
            assert all(torch.equal(bits(piece), bits(state["owned"][name][start])) for start, piece in pieces.items())


numbers = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1e-40, 3e38]) | st.floats(width=32, allow_nan=False)
rarely_broken = st.sampled_from([0.5, -1.0, math.nan, math.inf])


@given(data=st.data())
@examples(60)
def test_whatever_the_numbers_and_sizes(data: st.DataObject) -> None:
    """Ties, denormals, overflowing sums, empty and full selections."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)))
    targets = tuple(data.draw(st.integers(0, size)) for size in sizes)
    dtype, value_format = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(FORMATS))
    plan = BucketPlan(tuple("abcd"[: len(sizes)]), sizes, targets, dtype, value_format)
    kind = data.draw(st.sampled_from([numbers, numbers, rarely_broken]))
    steps = [
        (
            torch.tensor(data.draw(st.lists(kind, min_size=sum(sizes) + 2, max_size=sum(sizes) + 2))).to(dtype),
            data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=1)),
        )
        for _ in range(2)
    ]
    assert_same_ways(plan, steps, guard=data.draw(st.booleans()))


def test_with_too_many_picks_the_largest_go_and_the_rest_stays() -> None:
    plan = BucketPlan(("a",), (1000,), (10,), torch.float32, "fp32")
    rank = Rank("on the device", plan)
    rank.memory.thresholds.set("a", 10, 0.5)
    gradient = torch.arange(1, 1003) / 1000.0
    payload, num_entries, _, _ = rank.step(gradient, set())
    # A sample of the 501 says that about ten reach 0.99: 11 do, of which all but the first are left.
    largest = list(range(990, 1000))
    assert num_entries == 10
    assert unpack(plan.layout, payload).positions.tolist() == largest
    kept = gradient.clone()
    kept[largest] = 0.0
    kept[1000:] = 0.0
    assert torch.equal(rank.residual.cpu(), kept)
    # That is the next threshold, because far too many have reached this one.
    assert rank.memory.thresholds.values()[0] == pytest.approx(0.99)
