"""Finds which ranks share a node, chooses the exchange of a run, and makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import Tensor
from torch.nn import Module

from lightning_dct.agreement import gather_objects, without_bound_device
from lightning_dct.compress.bucket_plan import BucketPlan, OwnedPiece, Plans, real_dtype, real_numel
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.base import Exchange
from lightning_dct.exchange.collectives import Link
from lightning_dct.exchange.compressed import AllGather, Hierarchical, TwoPhase, link_traversals
from lightning_dct.exchange.sharding import share_out, sums_of
from lightning_dct.failures.lifeline import Lifeline
from lightning_dct.kernels import check_kernel
from lightning_dct.traffic import Traffic, all_gather_bytes, all_reduce_bytes

# The exchange in two phases has a second threshold and a second collective. So it must send at most
# 1 / 1.5 of the bytes, which it does from six ranks on.
TWO_PHASE_SAVES = 1.5
# Assumed speed of a link inside a node over a rank's share of the link between nodes, as of NVLink
# over Ethernet.
INSIDE_IS_FASTER = 100


@dataclass(frozen=True)
class NodeLayout:
    """Where ranks run: ``places`` has each rank's node and its number on that node."""

    places: tuple[tuple[int, int], ...]

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        ranks: dict[int, list[int]] = {
            node: [] for node in sorted({node for node, _ in self.places})
        }
        for rank, (node, _) in enumerate(self.places):
            ranks[node].append(rank)
        return tuple(map(tuple, ranks.values()))

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks on each node if they can exchange by node, else 1."""
        return len(self.nodes[0]) if self.obstacle is None else 1

    @cached_property
    def obstacle(self) -> str | None:
        """Why ranks cannot exchange by node, or None."""
        if len(set(self.places)) < len(self.places):
            return "the launcher gives several ranks the same node and the same local rank"
        if len(self.nodes) == 1:
            return "all ranks are on one node"
        counts = [len(ranks) for ranks in self.nodes]
        if len(set(counts)) > 1:
            return f"the nodes have different numbers of ranks: {', '.join(map(str, counts))}"
        return "every node has one rank only" if counts[0] == 1 else None


class Host(Protocol):
    """What synchronisation asks of a strategy, or of a plain loop."""

    traffic: Traffic
    # Of process groups that are made here.
    _timeout: timedelta | None
    # Brings weights back into their bounds; compares what the ranks do.
    project: Callable[[Module], None] | None
    lifeline: Lifeline | None

    @property
    def config(self) -> DCTConfig:
        """The settings."""

    @property
    def node_rank(self) -> int:
        """The number of this rank's node, as the launcher gives it."""

    @property
    def local_rank(self) -> int:
        """This rank's number on that node."""


def make_exchange(
    host: Host, names: Mapping[Tensor, str], group: dist.ProcessGroup, defer_unused: bool = False
) -> Exchange:
    """Make the exchange that the settings name; all ranks of the job call this together.

    With ``overlap_steps`` it gets a group of its own. Under NCCL the collectives of a group run one
    after the other, so what a step logs from all ranks would wait for the updates in flight.

    ``names`` are those of all parameters that are synchronised, now or after unfreezing, in the
    model's order. :class:`~lightning_dct.sync.gradients.GradientSynchronizer` explains
    ``defer_unused``.

    Raises:
        ValueError: ``exchange="hierarchical"`` does not work with these ranks, or the kernel not on
            this device.
    """
    config = host.config
    traffic = host.traffic
    timeout = host._timeout
    for device in {parameter.device.type for parameter in names}:
        check_kernel(config.kernel, device)
    parameters = {name: parameter for parameter, name in names.items()}
    everyone = Link(group, traffic)
    may_make = config.overlap_steps or config.exchange in ("auto", "hierarchical")
    if everyone.size == 1 or not parameters:
        if may_make:  # other groups of the job may need this rank for theirs
            make_groups([], group, timeout)
        return AllGather(everyone)
    name: str = config.exchange
    members = dist.get_process_group_ranks(group)
    wanted = [tuple(members)] if config.overlap_steps else []
    if name in ("auto", "hierarchical"):
        layout = NodeLayout(tuple(gather_objects((host.node_rank, host.local_rank), group)))
        if name == "auto":
            choice = choose_for_model(config, parameters, layout)
            rank_zero_debug(f"`exchange='auto'` takes {choice.name!r}: {choice.reason}.")
            name = choice.name
        elif layout.obstacle is not None:
            raise ValueError(
                "`exchange='hierarchical'` needs several nodes with the same number of ranks, two"
                f" or more, on each, but {layout.obstacle}. Use `exchange='auto'`, or change what"
                " the launcher starts."
            )
        if name == "hierarchical":
            nodes = [tuple(members[rank] for rank in ranks) for ranks in layout.nodes]
            wanted += [*nodes, *zip(*nodes, strict=True)]
    made = make_groups(wanted, group, timeout) if may_make else []
    ranks_per_node = layout.ranks_per_node if name == "hierarchical" else 1
    everyone = Link(made[0] if config.overlap_steps else group, traffic, ranks_per_node)
    exchange: Exchange
    if name == "hierarchical":
        inside = Link(made[-2], traffic, layout.ranks_per_node)
        between = Link(made[-1], traffic)
        pieces = share_model(
            config, parameters, link_traversals(name, everyone.size, inside.size), inside.size
        )
        exchange = Hierarchical(everyone, inside, between, pieces, defer_unused)
    elif name == "two_phase":
        pieces = share_model(
            config, parameters, link_traversals(name, everyone.size), everyone.size
        )
        exchange = TwoPhase(everyone, pieces, defer_unused)
    else:
        exchange = AllGather(everyone)
    exchange.own_groups = made
    return exchange


def plan_model(
    config: DCTConfig, parameters: Mapping[str, Tensor], traversals: float
) -> BucketPlan:
    """The plan of all tensors after warm-up, as if they were in one bucket."""
    tensors = list(parameters.values())
    plans = Plans(config, traversals)
    return plans.of(
        list(parameters), [real_numel(tensor) for tensor in tensors], real_dtype(tensors[0])
    )


def share_model(
    config: DCTConfig, parameters: Mapping[str, Tensor], traversals: float, owners: int
) -> dict[str, tuple[OwnedPiece, ...]]:
    """Divide a model among owners; frozen and trained parameters separately, so that both are
    spread evenly.
    """
    pieces: dict[str, tuple[OwnedPiece, ...]] = {}
    for trained in (True, False):
        some = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.requires_grad == trained
        }
        if some:
            pieces |= share_out(plan_model(config, some, traversals), owners)
    return pieces


def choose_for_model(
    config: DCTConfig, parameters: Mapping[str, Tensor], layout: NodeLayout
) -> ExchangeChoice:
    """The choice of ``exchange="auto"`` for a model's trained parameters, or for all if none is
    trained.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    return choose(partial(plan_model, config, trained or parameters), layout)


class ExchangeChoice(NamedTuple):
    """The name of an exchange, as ``"two_phase"``, and the reason, for a message."""

    name: str
    reason: str


def choose(plan_for: Callable[[float], BucketPlan], layout: NodeLayout) -> ExchangeChoice:
    """Choose an exchange for two or more ranks, the same on each; ``plan_for`` plans the model by
    link traversals.
    """
    costs = costs_of(plan_for, layout)
    name = (
        "two_phase" if TWO_PHASE_SAVES * costs["two_phase"] <= costs["all_gather"] else "all_gather"
    )
    if costs.get("hierarchical", costs[name]) < costs[name]:
        name = "hierarchical"
    ranks = (
        f"{len(layout.places)} ranks on {len(layout.nodes)}"
        f" node{'s' if len(layout.nodes) > 1 else ''}"
    )
    measure = "bytes sent"
    if layout.obstacle is None:
        measure = f"bytes between nodes (those inside count a {INSIDE_IS_FASTER}th)"
    elif len(layout.nodes) > 1:
        ranks += f" ({layout.obstacle})"
    counted = ", ".join(f"{other} {cost / 1000:,.1f} kB" for other, cost in costs.items())
    if costs[name] > costs["two_phase"]:
        counted += " ('two_phase' must save a third)"
    return ExchangeChoice(name, f"{ranks}; {measure} by a rank in an exchange: {counted}")


def costs_of(plan_for: Callable[[float], BucketPlan], layout: NodeLayout) -> dict[str, float]:
    """Bytes a rank sends in an exchange, by exchange; bytes inside a node count 1 /
    ``INSIDE_IS_FASTER``.
    """
    world_size = len(layout.places)
    nodes = len(layout.nodes)
    per_node = layout.ranks_per_node

    def ring(num_bytes: float) -> float:
        # Ranks are in the order of the nodes, so one rank of a node sends to another node.
        return _cost(num_bytes / per_node, num_bytes - num_bytes / per_node)

    def cost(plan: BucketPlan, compressed: float) -> float:
        dense = ring(all_reduce_bytes(sum(plan.sizes) * plan.dtype.itemsize, world_size))
        return dense if plan.is_dense else compressed

    gathered = plan_for(link_traversals("all_gather", world_size))
    two_phase = plan_for(link_traversals("two_phase", world_size))
    payload = (two_phase.layout.num_bytes + sums_of(two_phase).layout.num_bytes) / world_size
    costs = {
        "all_gather": cost(gathered, ring(all_gather_bytes(gathered.layout.num_bytes, world_size))),
        "two_phase": cost(
            two_phase, _cost((world_size - per_node) * payload, (per_node - 1) * payload)
        ),
    }
    if layout.obstacle is None:
        plan = plan_for(link_traversals("hierarchical", world_size, per_node))
        payload = plan.layout.num_bytes / per_node
        inside = (
            all_reduce_bytes(sum(plan.sizes) * plan.dtype.itemsize, per_node)
            + (per_node - 1) * nodes * payload
        )
        costs["hierarchical"] = cost(plan, _cost((nodes - 1) * payload, inside))
    return costs


def _cost(between: float, inside: float) -> float:
    return between + inside / INSIDE_IS_FASTER


def make_groups(
    wanted: Sequence[tuple[int, ...]], group: dist.ProcessGroup, timeout: timedelta | None
) -> list[dist.ProcessGroup]:
    """Make groups, and return those with this rank, in the order of ``wanted``.

    All ranks of the job call this together. ``group`` has all of them or some, such as those of a
    pipeline's stage. ``wanted`` lists the ranks of each group that a rank of ``group`` wants; it is
    the same on all of these ranks.
    """
    to_make = list(wanted)
    if group.size() < dist.get_world_size():
        # Every rank of the job takes part in making every group.
        to_make = sorted({ranks for theirs in gather_objects(to_make) for ranks in theirs})
    backend = dist.get_backend(group)
    with without_bound_device() if backend == "gloo" else nullcontext():
        made = {
            ranks: dist.new_group(list(ranks), timeout=timeout, backend=backend)
            for ranks in to_make
        }
    # A rank that destroys a group at once, as after a fit of no steps, would disconnect others that
    # still connect.
    gather_objects(None, group)
    return [made[ranks] for ranks in wanted if dist.get_rank() in ranks]
