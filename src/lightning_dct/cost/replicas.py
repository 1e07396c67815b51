"""Replicas that FSDP2 shards, as ``dct_fsdp`` trains them: the shards of each rank, and the bytes that FSDP sends.

Ranks in the same place of every replica have the same shards and exchange them with each other, as the ranks of
``dct`` do with whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor, nn

from lightning_dct.cost.bytes_sent import SentBytes, Step
from lightning_dct.cost.workload import Workload
from lightning_dct.exchange.factory import NodeLayout
from lightning_dct.traffic import all_gather_bytes, bytes_between_nodes

Group = tuple[Workload, NodeLayout]
"""The tensors that the ranks of a group exchange with each other, and where they run."""


def check_shards(shards: int, world_size: int) -> None:
    """Refuse replicas that are no equal parts of the ranks, or a single one, with a ValueError."""
    if shards < 1 or world_size % shards or shards == world_size:
        possible = [str(count) for count in range(1, world_size) if world_size % count == 0]
        raise ValueError(
            f"`--shards {shards}` does not make two or more equal replicas of `--world-size {world_size}`."
            f" Give {' or '.join(filter(None, [', '.join(possible[:-1]), possible[-1]]))}"
        )


def groups_of(workload: Workload, layout: NodeLayout, shards: int, by_unit: bool) -> list[Group]:
    """The ranks that hold the same shards, by their place in a replica, whose ranks are neighbours.

    ``by_unit`` says whether each of FSDP's units is exchanged by itself, as gradients are.

    Raises:
        ValueError: FSDP2 cannot shard a parameter.
    """
    if scalars := [name for name, parameter in workload.parameters.items() if not parameter.dim()]:
        raise ValueError(f"`--shards`: FSDP2 shards no parameter without dimensions; give {scalars[0]!r} the shape [1]")
    trained = {name for name, parameter in workload.parameters.items() if parameter.requires_grad}
    units = [[name for name in unit if name in trained] for unit in workload.units] if by_unit else []
    units = [unit for unit in units if unit] or [[name for name in workload.parameters if name in trained]]
    groups = []
    for place in range(shards):
        own = {name: _shard(parameter, shards, place) for name, parameter in workload.parameters.items()}
        groups.append((Workload(own, {}, units, are_buckets=True), NodeLayout(layout.places[place::shards])))
    return groups


def step_of_all(
    make: Callable[[Workload, NodeLayout], Step], groups: Sequence[Group], fsdp: SentBytes, steps: int
) -> Step:
    """An exchange of all ranks, in their order: those of each group, and the bytes of FSDP in so many steps."""
    made, own = [make(*group) for group in groups], SentBytes(steps * fsdp.between, steps * fsdp.inside)
    # One of each group after the other, replica by replica.
    sent = tuple(one + own for replica in zip(*(step.sent for step in made), strict=True) for one in replica)
    residuals = tuple(chain.from_iterable(zip(*(step.residual_bytes for step in made), strict=True)))
    return Step(sent, max(step.entries for step in made), residuals)


def fsdp_bytes(workload: Workload, layout: NodeLayout, shards: int) -> SentBytes:
    """Bytes that each rank sends for FSDP in a step, without mixed precision.

    Shards are gathered for forward and for backward, and gradients reduced, all padded to the largest shard.
    """
    num_bytes = 0
    for parameter in workload.parameters.values():
        padded = _shard(parameter, shards, 0)
        times = 3 if parameter.requires_grad else 2
        num_bytes += times * all_gather_bytes(padded.numel() * padded.itemsize, shards)
    between = bytes_between_nodes(num_bytes, shards, len(layout.nodes[0]))
    return SentBytes(between, num_bytes - between)


def _shard(parameter: Tensor, shards: int, place: int) -> Tensor:
    # FSDP2's rule, as of torch.chunk: the last ranks may hold less, or nothing.
    rows = -(-parameter.shape[0] // shards)
    part = parameter.detach().to("meta")[place * rows : (place + 1) * rows]
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
