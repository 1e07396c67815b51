"""Which ranks share a node, and the process groups inside and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist


@dataclass(frozen=True)
class NodeLayout:
    """Where ranks run: ``places`` has each rank's node and its number on that node."""

    places: tuple[tuple[int, int], ...]

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        numbers = sorted({node for node, _ in self.places})
        return tuple(tuple(rank for rank, (node, _) in enumerate(self.places) if node == number) for number in numbers)

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks on each node; only valid without an obstacle."""
        return len(self.nodes[0])

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


def find_layout(place: tuple[int, int], group: dist.ProcessGroup) -> NodeLayout:
    """Gather the places of all ranks of a group; a collective call."""
    places: list[tuple[int, int]] = [(0, 0)] * group.size()
    dist.all_gather_object(places, place, group=group)
    return NodeLayout(tuple(places))


def make_groups(
    layout: NodeLayout | None, group: dist.ProcessGroup, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Make the groups inside and between nodes; all ranks of the job call this together.

    Args:
        layout: Of the ranks of ``group``, without an obstacle; None if this group needs none.
        group: The ranks that take part: all ranks of the job, or some of them, such as those of a pipeline's stage.
        timeout: Of the new groups' collectives.

    Returns:
        This rank's group inside its node, and that of the ranks with its local number on all nodes.
    """
    members = dist.get_process_group_ranks(group)
    wanted: list[tuple[int, ...]] = []
    if layout is not None:
        inside = [tuple(members[rank] for rank in ranks) for ranks in layout.nodes]
        wanted = [*inside, *zip(*inside, strict=True)]
    if group.size() < dist.get_world_size():
        # Every rank of the job takes part in making every group.
        everyone: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, wanted)
        wanted = sorted({ranks for theirs in everyone for ranks in theirs})
    backend = dist.get_backend(group)
    made = {ranks: dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in wanted}
    # A rank that destroys a group at once, as after a fit of no steps, would disconnect others that still connect.
    dist.all_gather_object([None] * group.size(), None, group=group)
    if layout is None:
        return None
    own = [ranks for ranks in made if dist.get_rank() in ranks]
    own.sort(key=lambda ranks: ranks not in inside)
    return made[own[0]], made[own[1]]
