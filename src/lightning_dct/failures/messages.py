"""The messages between ranks and the hub, one JSON object a line.

The first field of a message tells its kind: no two kinds in one direction share it.
"""

from __future__ import annotations

from typing import TypedDict, final

Peers = tuple[int, ...]  # of the ranks that share a place; a list after its way as JSON
Batch = tuple[int, str]  # the number of a rank's batch since training began, and a name for it


# From a rank to the hub.


@final
class Hello(TypedDict):
    """The first message of a rank."""

    token: str  # the secret of the job's ranks
    rank: int
    who: str  # how messages to users call the rank


@final
class Failed(TypedDict):
    """This rank has failed: why."""

    failed: str


@final
class Left(TypedDict):
    """This rank is done: how many places it has come to, by the ranks that share them."""

    left: list[tuple[Peers, int]]


@final
class Signalled(TypedDict):
    """This rank has received a signal: its number."""

    signal: int


@final
class Passed(TypedDict):
    """The stop points that this rank had passed when it was asked because of a signal."""

    asked: int
    passed: int


@final
class Pace(TypedDict):
    """The seconds of a step here, and of waiting in it."""

    pace: tuple[float, float]


@final
class Elsewhere(TypedDict):
    """In which collective of the user's own this rank has been for long, empty if in none.

    It is the answer to a question about a place.
    """

    elsewhere: str
    place: int
    peers: Peers


@final
class Place(TypedDict):
    """A place that this rank has come to, which is the question whether the others do the same."""

    place: int  # its number among those that the peers share
    what: str  # what is done there: the same on all ranks
    said: str  # that in words, for errors
    peers: Peers
    rank: int
    counts: list[tuple[Peers, int]]  # how many places it has come to, by the ranks that share them
    batch: Batch | None


@final
class Agrees(TypedDict):
    """Whether this rank does the same as one that asks: ``apart`` is empty, or says how not."""

    agrees: int
    peers: Peers
    apart: str


# From the hub to a rank.


@final
class Welcome(TypedDict):
    """The hub's answer to a rank's hello."""

    welcome: bool


@final
class Ask(TypedDict):
    """A question of another rank."""

    ask: Place


@final
class Agreed(TypedDict):
    """All ranks agree on the places up to this one."""

    agreed: int
    peers: Peers


@final
class Where(TypedDict):
    """How many stop points has the rank passed? Some rank has received this signal."""

    where: int


@final
class ActOn(TypedDict):
    """All ranks act on a signal at this stop point."""

    act_on: int
    place: int


@final
class Failure(TypedDict):
    """The first failure, and the ranks to blame for it."""

    blamed: list[int]
    failure: str


@final
class Over(TypedDict):
    """The hub ends: empty if all is well, or its error."""

    over: str


FromRank = Failed | Left | Signalled | Passed | Pace | Elsewhere | Place | Agrees
FromHub = Ask | Agreed | Where | ActOn | Failure | Over
