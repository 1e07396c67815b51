"""What `auto` chooses, and that its estimates are the bytes that are counted."""

from collections.abc import Callable

import pytest
import torch

from emulated_ranks import EmulatedRanks
from lightning_dct.compress.bucket_plan import BucketPlan, plan_bucket
from lightning_dct.exchange.factory import INSIDE_IS_FASTER, NodeLayout, choose, costs_of

SIZES = {"a": 40_000, "b": 30, "c": 9_000}


def planner(density: float, sizes: dict[str, int] = SIZES) -> Callable[[float], BucketPlan]:
    return lambda link_traversals: plan_bucket(
        list(sizes), list(sizes.values()), [density] * len(sizes), torch.float32, "bf16", 400, link_traversals
    )


def nodes(*ranks: int) -> NodeLayout:
    return NodeLayout(tuple((node, local) for node, count in enumerate(ranks) for local in range(count)))


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
    assert "8 ranks on 2 nodes, not by node: the nodes have different numbers of ranks: 5, 3;" in reason
    reason = choose(planner(0.1), nodes(8, 8)).reason
    assert "bytes between nodes (those inside count a 100th)" in reason
    assert "hierarchical" in reason


@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize(
    ("exchange", "layout", "ranks_per_node"),
    [
        ("all_gather", nodes(3), 1),
        ("two_phase", nodes(3), 1),
        ("two_phase", nodes(8), 1),
        ("hierarchical", nodes(2, 2, 2), 2),
    ],
)
def test_estimates_are_what_is_counted(exchange: str, layout: NodeLayout, ranks_per_node: int, density: float) -> None:
    world_size = len(layout.places)
    # Dense gradients would travel in bf16, too.
    settings = {"value_format": "bf16" if density < 1 else "fp32", "min_tensor_size": 400}
    ranks = EmulatedRanks(SIZES, world_size, exchange, ranks_per_node, density=density, **settings)
    noise = torch.Generator().manual_seed(0)
    ranks.step([{name: torch.randn(n, generator=noise) for name, n in SIZES.items()} for _ in range(world_size)])
    totals = [synchronizer.traffic.totals for synchronizer in ranks.synchronizers]
    counted = sum(total.bytes_sent + total.bytes_inside_node / INSIDE_IS_FASTER for total in totals) / world_size
    # Headers and rounding up, once a shard.
    assert costs_of(planner(density), layout)[exchange] == pytest.approx(counted, rel=0.05)
