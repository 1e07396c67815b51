"""The forecast's bytes and residuals are those that synchronisers count and hold: no tolerance."""

import pytest
import torch
from torch import nn

from emulated_ranks import EmulatedRanks
from lightning_dct import DCTConfig
from lightning_dct.cost.forecast import compressed_step, dense_step, layout_of, link_seconds
from lightning_dct.cost.workload import Workload, one_tensor
from lightning_dct.exchange.factory import costs_of, plan_model

# a is cut for several owners, b is sent dense, c and d are cut for few; a DDP of small buckets
# would part them.
SIZES = {"a": 14_003, "b": 50, "c": 700, "d": 120}
BUCKETS = (("d", "c", "b"), ("a",))
# Ranks, exchange, nodes.
EXCHANGES = [
    (3, "all_gather", 3),
    (5, "two_phase", 5),
    (6, "hierarchical", 3),
    (6, "hierarchical", 2),
]


class InBuckets(Workload):
    """With buckets of the test's own."""

    buckets = BUCKETS


def workload() -> Workload:
    return InBuckets(
        {name: nn.Parameter(torch.empty(n, device="meta")) for name, n in SIZES.items()}, {}
    )


@pytest.mark.parametrize(
    ("density", "value_format"), [(0.01, "1bit"), (0.2, "2bit"), (1.0, "fp32")]
)
@pytest.mark.parametrize(("world_size", "exchange", "nodes"), EXCHANGES)
def test_bytes_and_residuals_are_those_of_synchronisers(
    world_size: int, exchange: str, nodes: int, density: float, value_format: str
) -> None:
    settings = {"density": density, "value_format": value_format, "min_tensor_size": 60}
    ranks = EmulatedRanks(SIZES, world_size, exchange, world_size // nodes, **settings)
    noise = torch.Generator().manual_seed(0)
    ranks.step(
        [
            {n: torch.randn(size, generator=noise) for n, size in SIZES.items()}
            for _ in range(world_size)
        ],
        BUCKETS,
    )

    layout = layout_of(world_size, nodes)
    step = compressed_step(
        exchange, DCTConfig(compress="gradients", **settings), workload(), layout
    )
    dense = dense_step(workload(), layout)
    for rank, synchronizer in enumerate(ranks.synchronizers):
        counted = synchronizer.traffic.totals
        assert step.sent[rank].tolist() == [counted.bytes_sent, counted.bytes_inside_node]
        assert dense.sent[rank, 0] == counted.bytes_dense
        state = synchronizer.state_dict()
        held = [
            *state["residuals"].values(),
            *(piece for parts in state["owned"].values() for piece in parts.values()),
        ]
        assert step.residual_bytes[rank] == sum(
            tensor.numel() * tensor.element_size() for tensor in held
        )


def test_where_bytes_go_when_nodes_have_several_ranks() -> None:
    """By hand: four equal shards; two of a rank's three partners are on the other node."""
    config = DCTConfig(compress="gradients")
    tensor = one_tensor(40_000)
    apart = layout_of(4, 4)
    together = layout_of(4, 2)
    for exchange, share in (("two_phase", 2 / 3), ("all_gather", 1 / 2)):
        total = compressed_step(exchange, config, tensor, apart).sent
        split = compressed_step(exchange, config, tensor, together).sent
        assert total[:, 1].tolist() == [0] * 4
        assert split.sum(1).tolist() == total[:, 0].tolist()
        assert split[:, 0].tolist() == pytest.approx((share * total[:, 0]).tolist(), abs=1)
    on_one_node = compressed_step("two_phase", config, tensor, layout_of(4, 1)).sent
    assert torch.equal(on_one_node, compressed_step("two_phase", config, tensor, apart).sent)


@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize(
    ("world_size", "nodes"), [(2, 2), (3, 1), (8, 8), (8, 2), (16, 4), (64, 8)]
)
def test_links_are_busy_for_what_auto_reckons_with(
    world_size: int, nodes: int, density: float
) -> None:
    config = DCTConfig(compress="gradients", density=density)
    tensor = one_tensor(20_000_000)
    layout = layout_of(world_size, nodes)
    local = world_size // nodes if 1 < nodes < world_size else 1
    for exchange, cost in costs_of(
        lambda traversals: plan_model(config, tensor.parameters, traversals), layout
    ).items():
        sent = compressed_step(exchange, config, tensor, layout).sent
        # `auto` leaves out headers and rounding up, once a shard.
        assert link_seconds(sent, layout, 8e6) == pytest.approx(local * cost / 1e6, rel=0.03)
