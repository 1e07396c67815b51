"""Which exchange suits a run, by counted bytes: from the number of ranks, where they run, and what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightning_dct.gradients.exchanges.all_gather import all_gather_link_traversals
from lightning_dct.gradients.exchanges.by_node import by_node_link_traversals
from lightning_dct.gradients.exchanges.nodes import NodeLayout
from lightning_dct.gradients.exchanges.sharded import SHARDED_LINK_TRAVERSALS
from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.traffic import all_gather_bytes, all_reduce_bytes

# In the sharded exchange entries wait at a second threshold, and a second round waits for the network. So it has to
# send 1 / 1.75 of the bytes or less: with four ranks it does, with three it does not.
SHARDED_SAVES = 1.75
# How many times as fast links inside a node are assumed to be as a rank's share of the link between nodes: GPUs with
# NVLink beside Ethernet or a shared network adapter.
INSIDE_IS_FASTER = 100

# The plan of the whole model for given link traversals; see :func:`~lightning_dct.gradients.plan.plan_bucket`.
Planner = Callable[[float], BucketPlan]


class Choice(NamedTuple):
    """The name of an exchange (``"all_gather"``, ``"sharded"`` or ``"by_node"``), and the reason, for the user."""

    name: str
    reason: str


def choose(plan_for: Planner, layout: NodeLayout) -> Choice:
    """Choose between the exchanges, the same on every rank, for two ranks or more."""
    costs = costs_of(plan_for, layout)
    name = "sharded" if SHARDED_SAVES * costs["sharded"] <= costs["all_gather"] else "all_gather"
    if costs.get("by_node", costs[name]) < costs[name]:
        name = "by_node"
    ranks = f"{len(layout.places)} ranks on {len(layout.nodes)} node{'s' if len(layout.nodes) > 1 else ''}"
    what = "bytes sent"
    if layout.obstacle is None:
        what = f"bytes between nodes (those inside count a {INSIDE_IS_FASTER}th)"
    elif len(layout.nodes) > 1:
        ranks += f", not by node: {layout.obstacle}"
    counted = ", ".join(f"{other} {cost / 1000:,.1f} kB" for other, cost in costs.items())
    return Choice(name, f"{ranks}; {what} by a rank in an exchange: {counted}")


def costs_of(plan_for: Planner, layout: NodeLayout) -> dict[str, float]:
    """Bytes a rank sends in a step, by exchange; bytes inside nodes of several ranks count at a discount."""
    world_size = len(layout.places)
    by_node = layout.obstacle is None
    nodes, per_node = (len(layout.nodes), layout.ranks_per_node) if by_node else (world_size, 1)

    def ring(num_bytes: float) -> float:
        # In the order of the nodes: one rank of a node sends to another node.
        return _cost(num_bytes / per_node, num_bytes - num_bytes / per_node)

    def dense(plan: BucketPlan) -> float:
        return ring(all_reduce_bytes(sum(plan.sizes) * plan.dtype.itemsize, world_size))

    gathered = plan_for(all_gather_link_traversals(world_size))
    sharded = plan_for(SHARDED_LINK_TRAVERSALS)
    payload = 2 * sharded.layout.num_bytes / world_size
    costs = {
        "all_gather": dense(gathered)
        if gathered.is_dense
        else ring(all_gather_bytes(gathered.layout.num_bytes, world_size)),
        "sharded": dense(sharded)
        if sharded.is_dense
        else _cost((world_size - per_node) * payload, (per_node - 1) * payload),
    }
    if by_node:
        plan = plan_for(by_node_link_traversals(nodes, per_node))
        inside = all_reduce_bytes(sum(plan.sizes) * plan.dtype.itemsize, per_node)
        payload = plan.layout.num_bytes / per_node
        costs["by_node"] = (
            dense(plan) if plan.is_dense else _cost((nodes - 1) * payload, inside + (per_node - 1) * nodes * payload)
        )
    return costs


def _cost(between: float, inside: float) -> float:
    return between + inside / INSIDE_IS_FASTER
