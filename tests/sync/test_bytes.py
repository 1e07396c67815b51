"""The bytes of exchanged updates: counted where they are sent, and as the plan says beforehand, to
the byte.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from distributed.training import Module, fit, on_two_nodes
from lightning_dct import DCTConfig, DCTStrategy
from lightning_dct.compress.bucket_plan import real_dtype
from lightning_dct.cost.forecast import compressed_step, dense_step, layout_of
from lightning_dct.cost.workload import workload_of
from lightning_dct.sync.coherence import is_measured, sample_of
from lightning_dct.sync.optimizer_clock import OptimizerClock, buckets_of, is_due
from lightning_dct.traffic import TrafficTotals, all_gather_bytes, all_reduce_bytes

STEPS = 17
FIRST = {1, 2, 4, 8, 16}


def train(settings: dict[str, Any], dtype: torch.dtype) -> tuple[TrafficTotals, int]:
    """The traffic, and the bytes that a rank holds besides its weights."""
    strategy = DCTStrategy(**settings)
    with on_two_nodes() if settings["exchange"] == "hierarchical" else nullcontext():
        run = fit(strategy, Module(None, torch.optim.Adam, lr=0.01).to(dtype), STEPS)
    weights = strategy.updates.weights
    owned = sum(piece.nbytes for pieces in run.state["owned"].values() for piece in pieces.values())
    return run.totals, owned + sum(weights.shared(name).nbytes for name in weights.parameters)


@pytest.mark.parametrize(
    ("world_size", "settings", "dtype"),
    [
        (
            2,
            {"density": 0.2, "local_steps": 4, "exchange": "all_gather", "warmup_steps": 5},
            torch.float32,
        ),
        # Owners are chosen by the densities that hold later.
        (
            4,
            {
                "density": 0.1,
                "local_steps": 5,
                "exchange": "two_phase",
                "value_format": "2bit",
                "warmup_steps": 0,
            },
            torch.float32,
        ),
        (3, {"density": 0.05, "local_steps": 1, "exchange": "all_gather"}, torch.float32),
        # Whole updates are all-reduced in fp32, whatever the weights are.
        (
            2,
            {"density": 1.0, "local_steps": 2, "exchange": "all_gather", "warmup_steps": 0},
            torch.bfloat16,
        ),
        (
            4,
            {"density": 0.1, "local_steps": 2, "exchange": "hierarchical", "warmup_steps": 0},
            torch.bfloat16,
        ),
    ],
)
def test_the_plan_says_what_is_counted(
    ranks: Any, world_size: int, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    totals, held = zip(*ranks(world_size).run(train, settings, dtype), strict=True)
    config = DCTConfig(**settings)
    workload = workload_of(Module().to(dtype))
    layout = layout_of(world_size, 2 if settings["exchange"] == "hierarchical" else world_size)
    assert compressed_step(
        settings["exchange"], config, workload, layout
    ).residual_bytes.tolist() == list(held)
    expected = [0] * world_size
    warmup = min(config.warmup_steps, STEPS)
    for first, last in ((1, warmup), (warmup + 1, STEPS)):
        length = config.length_at(last)
        now = replace(config, density=length / config.local_steps * config.density)
        sent = compressed_step(settings["exchange"], now, workload, layout).sent
        exchanges = sum(is_due(step, length) for step in range(first, last + 1))
        expected = [
            before + exchanges * sum(one)
            for before, one in zip(expected, sent.tolist(), strict=True)
        ]
    if config.local_steps == 1:
        # Samples of gradients, which all ranks need.
        weights = [parameter.detach() for parameter in Module().parameters()]
        sampled = [
            sample_of(one, step).numel()
            for one in weights
            for step in range(1, STEPS + 1)
            if is_measured(step)
        ]
        measuring = all_gather_bytes(2 * sum(sampled), world_size)
        expected = [before + measuring for before in expected]
    for step in range(1, STEPS + 1):
        if config.length_at(step) == 1 or step % config.length_at(step) == 0:
            due = range(step - config.length_at(step) + 1, step + 1)
            expected = [
                before + (not FIRST.isdisjoint(due)) * averaging(world_size) for before in expected
            ]
    assert [counted.bytes_sent + counted.bytes_inside_node for counted in totals] == expected
    dense = dense_step(workload, layout)  # by node, between nodes
    assert [counted.bytes_dense for counted in totals] == [
        STEPS * sent for sent, _ in dense.sent.tolist()
    ]


def averaging(world_size: int) -> int:
    """Bytes of an average of Adam's second moments: sums of rows and columns in bf16, and the two
    sizes of each.
    """
    shapes = [parameter.shape for parameter in Module().parameters()]
    sums = sum(
        math.prod(shape) if len(shape) < 2 else shape[0] + math.prod(shape[1:]) for shape in shapes
    )
    return all_gather_bytes(2 * sums, world_size) + all_reduce_bytes(
        8 * 2 * len(shapes), world_size
    )


def test_rounds_are_shorter_while_training_warms_up() -> None:
    for local_steps in (8, 80):
        config = DCTConfig(local_steps=local_steps, warmup_steps=3)
        assert [config.length_at(step) for step in range(1, 6)] == [
            1,
            1,
            1,
            local_steps,
            local_steps,
        ]
    assert [DCTConfig(local_steps=5, warmup_steps=0).length_at(step) for step in (1, 2)] == [5, 5]
    assert [step for step in range(1, 30) if is_due(step, 8)] == [8, 16, 24]


def test_buckets_take_turns() -> None:
    """Oracle: each of four is due once in eight steps, and never two at a time."""
    steps = {
        place: [step for step in range(8, 40) if is_due(step, 8, place, 4)] for place in range(4)
    }
    assert steps == {place: list(range(8 + 2 * place, 40, 8)) for place in range(4)}


def test_buckets_hold_one_dtype_each_and_are_of_a_size() -> None:
    tensors = [
        (f"{dtype} {index}", torch.empty(50_000, dtype=dtype))
        for index in range(8)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    tensors.append(("complex", torch.empty(1000, dtype=torch.complex64)))
    tensors.append(("empty", torch.empty(0)))
    buckets = buckets_of(tensors, 4)
    by_name = dict(tensors)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(by_name)
    for bucket in buckets:
        assert len({real_dtype(by_name[name]) for name in bucket}) == 1
        assert sum(by_name[name].numel() for name in bucket) <= 201_000 + 1000
    assert len(buckets) == 5


def test_what_ddp_would_send_follows_the_ranks_and_the_kind_of_gradient() -> None:
    """Oracle: by hand, for a dense tensor of 100 entries and a table of 1,000 whose first gradient
    comes late.
    """
    parameters = {
        "dense": torch.nn.Parameter(torch.ones(100)),
        "rows": torch.nn.Parameter(torch.ones(500, 2)),
    }
    clock = OptimizerClock(names=["dense", "rows"])
    parameters["dense"].grad = torch.ones(100)
    assert [clock.bytes_under_ddp(parameters, ranks) for ranks in (4, 2, 1)] == [6600, 4400, 0]
    # One row: an int64 index and two numbers.
    parameters["rows"].grad = torch.sparse_coo_tensor([[3]], torch.ones(1, 2), (500, 2))
    assert clock.bytes_under_ddp(parameters, 2) == 400 + 16
    parameters["rows"].grad = None
    assert clock.bytes_under_ddp(parameters, 2) == 400
