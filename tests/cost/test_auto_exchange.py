"""What `auto` chooses; its estimates are those of the forecast: test_bytes_sent.py."""

from collections.abc import Callable

import pytest
import torch

from lightning_dct.compress.bucket_plan import BucketPlan, plan_bucket
from lightning_dct.exchange.factory import NodeLayout, choose

SIZES = {"a": 40_000, "b": 30, "c": 9_000}


def planner(density: float) -> Callable[[float], BucketPlan]:
    return lambda link_traversals: plan_bucket(
        list(SIZES),
        list(SIZES.values()),
        [density] * len(SIZES),
        torch.float32,
        "bf16",
        400,
        link_traversals,
    )


def nodes(*ranks: int) -> NodeLayout:
    return NodeLayout(
        tuple((node, local) for node, count in enumerate(ranks) for local in range(count))
    )


@pytest.mark.parametrize(
    ("ranks", "density", "expected"),
    [
        ((2,), 0.01, "all_gather"),
        ((3,), 0.01, "all_gather"),
        ((4,), 0.01, "all_gather"),
        ((8,), 0.001, "two_phase"),
        ((1, 1), 0.01, "all_gather"),
        ((1,) * 8, 0.01, "two_phase"),
        ((2, 2), 0.01, "all_gather"),
        ((8, 8), 0.01, "all_gather"),
        ((8, 8), 0.1, "hierarchical"),
        ((4, 4, 4, 4), 0.2, "hierarchical"),
        ((5, 3), 0.1, "two_phase"),
        ((2,), 1.0, "all_gather"),
        ((8,), 1.0, "all_gather"),
    ],
)
def test_choices(ranks: tuple[int, ...], density: float, expected: str) -> None:
    assert choose(planner(density), nodes(*ranks)).name == expected


def test_what_it_says() -> None:
    reason = choose(planner(0.01), nodes(4)).reason
    assert reason.startswith("4 ranks on 1 node; bytes sent by a rank in an exchange: all_gather ")
    assert "two_phase" in reason
    assert "hierarchical" not in reason
    reason = choose(planner(0.01), nodes(5, 3)).reason
    assert "8 ranks on 2 nodes (the nodes have different numbers of ranks: 5, 3);" in reason
    reason = choose(planner(0.1), nodes(8, 8)).reason
    assert "bytes between nodes (those inside count a 100th)" in reason
    assert "hierarchical" in reason
