"""Names the rank for which all others wait, from the times that every rank reports through its lifeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class SlowRank(NamedTuple):
    """The slowest rank.

    Attributes:
        rank: Its number.
        share_of_step: The part of a step in which the others wait for it alone, from 0 to 1.
        share_of_waiting: The same as a part of all the time that the others wait.
    """

    rank: int
    share_of_step: float
    share_of_waiting: float


def slowest_rank(paces: Mapping[int, tuple[float, float]]) -> SlowRank | None:
    """The slowest rank; None if fewer than two ranks have reported or nobody waits.

    ``paces`` are seconds of a step and those of them that the rank waits, by rank. A rank waits for the network and for
    slower ranks, so the slowest waits the least. What the next one waits longer would be saved without it.
    """
    by_waiting = sorted((waiting, rank) for rank, (_, waiting) in paces.items())
    if len(by_waiting) < 2 or by_waiting[-1][0] <= 0.0:
        return None
    (least, rank), *others = by_waiting
    lost = others[0][0] - least
    step = sum(total for total, _ in paces.values()) / len(paces)
    return SlowRank(rank, lost / step, lost * len(others) / sum(waiting for waiting, _ in others))
