"""Which ranks share a node, and when that is of no use."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.training import rank
from lightning_dct.agreement import gather_objects
from lightning_dct.exchange.factory import NodeLayout, make_groups


def layout(*places: tuple[int, int]) -> NodeLayout:
    return NodeLayout(places)


def test_nodes_are_found_whatever_the_order_of_the_ranks() -> None:
    mixed = layout((1, 0), (0, 1), (1, 1), (0, 0))
    assert mixed.nodes == ((1, 3), (0, 2))
    assert mixed.ranks_per_node == 2
    assert mixed.obstacle is None


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (((0, 0), (0, 1)), "all ranks are on one node"),
        (((0, 0), (1, 0), (2, 0)), "every node has one rank only"),
        (((0, 0), (0, 1), (1, 0)), "the nodes have different numbers of ranks: 2, 1"),
        (
            ((0, 0), (0, 0), (1, 0), (1, 1)),
            "the launcher gives several ranks the same node and the same local rank",
        ),
    ],
)
def test_obstacles(places: tuple[tuple[int, int], ...], reason: str) -> None:
    assert layout(*places).obstacle == reason


def groups_of(pairs_of_stages: bool) -> Any:
    """Ranks 0, 1 and 2, 3 share a node; or 0, 2 and 1, 3 exchange gradients, and only the first two
    want groups.
    """
    group = dist.group.WORLD
    mine = []
    if pairs_of_stages:
        group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank() % 2]
    found = NodeLayout(tuple(gather_objects(divmod(rank(), 2), group)))
    if not pairs_of_stages:
        mine = [*found.nodes, *zip(*found.nodes, strict=True)]
    elif rank() % 2 == 0:
        mine = [(0, 2), (0,), (2,)]
    made = make_groups(mine, group, None)
    members = [dist.get_process_group_ranks(some) for some in made]
    for some in made:
        dist.destroy_process_group(some)
    return [list(ranks) for ranks in found.nodes], members


@pytest.mark.parametrize("pairs_of_stages", [False, True])
def test_groups(ranks: Any, pairs_of_stages: bool) -> None:
    """All ranks of the job make all groups, also those of other ranks' exchanges."""
    if pairs_of_stages:
        nodes = [[0], [1]]
        expected = [(nodes, [[0, 2], [0]]), (nodes, []), (nodes, [[0, 2], [2]]), (nodes, [])]
    else:
        nodes = [[0, 1], [2, 3]]
        expected = [
            (nodes, made)
            for made in ([[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]])
        ]
    assert ranks(4).run(groups_of, pairs_of_stages) == expected


def groups_beside_a_bound_device() -> list[int]:
    """Lightning binds a GPU to the default group, whatever its backend, and other ranks than a
    group's own split it.
    """
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cuda", 0)
    made = make_groups([(0,), (1,)], default, None)
    assert default.bound_device_id == torch.device("cuda", 0)
    default.bound_device_id = None
    sizes = [group.size() for group in made]
    for group in made:
        dist.destroy_process_group(group)
    return sizes


def test_gloo_makes_groups_on_gpus(ranks: Any) -> None:
    assert ranks(2).run(groups_beside_a_bound_device) == [[1], [1]]
