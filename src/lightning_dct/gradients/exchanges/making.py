"""Makes the exchange that the settings ask for, once the ranks are up."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.collectives import Link
from lightning_dct.gradients.exchanges.all_gather import AllGather
from lightning_dct.gradients.exchanges.auto import Choice, choose
from lightning_dct.gradients.exchanges.base import Exchange
from lightning_dct.gradients.exchanges.by_node import ByNode, by_node_link_traversals
from lightning_dct.gradients.exchanges.nodes import NodeLayout, find_layout, make_groups
from lightning_dct.gradients.exchanges.sharded import SHARDED_LINK_TRAVERSALS, Sharded
from lightning_dct.gradients.plan import BucketPlan, plan_bucket, real_dtype, real_numel
from lightning_dct.gradients.sharding import Piece, share_out
from lightning_dct.traffic import Traffic


def make_exchange(
    config: DCTConfig,
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    place: tuple[int, int],
    traffic: Traffic,
    defer_unused: bool,
    timeout: timedelta | None = None,
) -> Exchange:
    """Make the exchange; all ranks of the job call this at the same time.

    Args:
        config: The settings.
        parameters: All that are synchronised, now or once they are unfrozen, by name in the model's order.
        group: The ranks whose gradients are exchanged.
        place: The number of this rank's node, and its own number on that node, as the launcher gives them.
        traffic: Where bytes are counted.
        defer_unused: See :class:`~lightning_dct.gradients.GradientSynchronizer`.
        timeout: Of the groups inside and between nodes, where there are any.

    Raises:
        ValueError: The settings ask for ``"by_node"``, and these ranks cannot do that.
    """
    everyone = Link(group, traffic)
    if everyone.size == 1:
        return AllGather(everyone)
    name: str = config.exchange
    layout = None
    if name in ("auto", "by_node"):
        layout = find_layout(place, group)
        name = _resolve(config, parameters, layout)
        groups = make_groups(layout if name == "by_node" else None, group, timeout)
    if name == "by_node":
        assert layout is not None
        assert groups is not None
        inside = Link(groups[0], traffic, layout.ranks_per_node)
        between = Link(groups[1], traffic)
        pieces = share_model(config, parameters, by_node_link_traversals(between.size, inside.size), inside.size)
        return ByNode(Link(group, traffic, layout.ranks_per_node), inside, between, pieces, defer_unused)
    if name == "sharded":
        pieces = share_model(config, parameters, SHARDED_LINK_TRAVERSALS, everyone.size)
        return Sharded(everyone, pieces, defer_unused)
    return AllGather(everyone)


def plan_model(config: DCTConfig, parameters: Mapping[str, Tensor], link_traversals: float) -> BucketPlan:
    """The plan of all tensors once warm-up is over, as if they lay in one bucket."""
    names = list(parameters)
    sizes = [real_numel(parameter) for parameter in parameters.values()]
    dtype = real_dtype(next(iter(parameters.values())))
    densities = [config.density_of(name) for name in names]
    return plan_bucket(names, sizes, densities, dtype, config.value_format, config.min_tensor_size, link_traversals)


def share_model(
    config: DCTConfig, parameters: Mapping[str, Tensor], link_traversals: float, owners: int
) -> dict[str, tuple[Piece, ...]]:
    """Share a model out; frozen parameters apart from the others, so that both are spread evenly."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    for trained in (True, False):
        some = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad == trained}
        if some:
            pieces |= share_out(plan_model(config, some, link_traversals), owners)
    return pieces


def choose_for_model(config: DCTConfig, parameters: Mapping[str, Tensor], layout: NodeLayout) -> Choice:
    """The choice of ``exchange="auto"`` for a model, by its trained parameters, or by all where none is trained."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    return choose(partial(plan_model, config, trained or parameters), layout)


def _resolve(config: DCTConfig, parameters: Mapping[str, Tensor], layout: NodeLayout) -> str:
    if config.exchange == "by_node":
        if layout.obstacle is not None:
            raise ValueError(
                "`exchange='by_node'` needs several nodes with the same number of ranks, two or more, on each, but"
                f" {layout.obstacle}. Use `exchange='auto'`, or change what the launcher starts."
            )
        return "by_node"
    choice = choose_for_model(config, parameters, layout)
    rank_zero_info(f"`exchange='auto'` takes {choice.name!r}: {choice.reason}.")
    return choice.name
