"""What each optimizer's clock says, and what of its parameters is on its way; and how that is saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_dct.gradients.exchanges.base import Pending
from lightning_dct.gradients.plan import real_numel


@dataclass(eq=False)
class Travelling:
    """What some parameters have moved, on its way.

    Attributes:
        names: The parameters.
        due: The optimizer's step after which it is applied.
        pending: Its way; None once it has arrived.
        mean: Shape ``[n]``: what all ranks have sent, averaged; holds it once it has arrived.
        own: Shape ``[n]``: what this rank has sent, and what it forgets of its residual.
    """

    names: Sequence[str]
    due: int
    pending: Pending | None
    mean: Tensor
    own: Tensor


@dataclass
class Turns:
    """One optimizer's parameters and its clock.

    Attributes:
        steps: Steps it has made.
        names: Its parameters, of those that take part.
        buckets: The same in the groups that travel together.
        dense_bytes: What the dense exchange of its gradients in fp32 would send in a step.
        sparse: Parameters with sparse gradients, of which that exchange sends the rows that a step has used.
        travelling: What is on its way.
    """

    steps: int = 0
    names: list[str] = field(default_factory=list)
    buckets: list[list[str]] = field(default_factory=list)
    dense_bytes: int = 0
    sparse: list[Tensor] = field(default_factory=list)
    travelling: list[Travelling] = field(default_factory=list)


def save_turns(
    turns: Mapping[int, Turns], parameters: Mapping[str, Tensor], to_refresh: Collection[str]
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Clocks as numbers, and what is on its way, which has arrived, as CPU tensors by parameter.

    Args:
        turns: By the number of the optimizer.
        parameters: By name.
        to_refresh: Parameters whose thresholds are to be selected anew when they are next sent.
    """
    clocks = {f"refresh {name}": 1 for name in to_refresh}
    in_flight: dict[str, Tensor] = {}
    for number, own_turns in turns.items():
        clocks[f"steps of {number}"] = own_turns.steps
        for item in own_turns.travelling:
            sizes = [real_numel(parameters[name]) for name in item.names]
            for name, mean, own in zip(item.names, item.mean.split(sizes), item.own.split(sizes), strict=True):
                clocks[f"due in {number} {name}"] = item.due
                in_flight |= {f"mean of {name}": mean.cpu().clone(), f"own of {name}": own.cpu().clone()}
    return clocks, in_flight


def load_turns(
    clocks: Mapping[str, int], in_flight: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> tuple[dict[int, Turns], set[str]]:
    """Turns as they were saved, by the number of the optimizer, and what is to be refreshed."""
    turns: dict[int, Turns] = {}
    to_refresh = set()
    for key, value in clocks.items():
        what, _, of = key.partition(" ")
        if what == "refresh":
            to_refresh.add(of)
        elif what == "steps":
            turns.setdefault(int(of.split(" ")[1]), Turns()).steps = value
        else:
            _, number, name = of.split(" ", 2)
            if name in parameters and f"mean of {name}" in in_flight:
                device = parameters[name].device
                mean, own = (in_flight[f"{part} of {name}"].to(device) for part in ("mean", "own"))
                turns.setdefault(int(number), Turns()).travelling.append(Travelling([name], value, None, mean, own))
    return turns, to_refresh
