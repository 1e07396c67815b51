r"""What the ranks do together, in order: compared before they can wait for each other in different collectives.

A rank numbers its *places*: exchanges, and whatever else takes all ranks, such as a barrier. At the same number every
rank must do the same. Mostly they do, and say nothing. A rank *asks* the others if it does what it has not done before,
or if ranks with uneven batches would do it at different places. It waits until all have come to that place:

    rank 0    9: exchange --- 10: barrier, asks ---- waits ---------------- ends, with the places of both ranks
    rank 1    9: exchange --- 10: exchange, waits for rank 0 -- is asked -- ends

The hub passes the questions and the answers on. There is a time limit at the end of training only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

# Places that a rank remembers. It can be ahead of another by no more than the exchanges it has in flight.
MEMORY = 1024
SAME_BATCHES = (
    "Give every rank the same number of batches, and let all ranks stop, validate and save after the same step"
)
SAME_PARAMETERS = (
    "Change `requires_grad` and the optimizers' `param_groups` on every rank alike, before the same optimizer step"
)
EXCHANGE = "an exchange"


class Course:
    """One rank's places, shared by its main thread and the one that listens to the hub.

    ``send`` sends a message to the hub.
    """

    def __init__(self, rank: int, send: Callable[[dict[str, Any]], None]) -> None:
        self._rank = rank
        self._send = send
        self._turn = threading.Condition()
        self._place = 0
        self._agreed = 0
        self._done: dict[int, dict[str, Any]] = {}
        self._asked: dict[int, dict[str, Any]] = {}
        self._usual: set[str] = set()
        self._released = False

    def come_to(self, what: str, said: str, peers: Sequence[int], patience_s: float | None = None) -> str:
        """Come to the next place, and wait for the others if this rank or one of them asks.

        Args:
            what: What this rank does there. Exchanges begin with ``EXCHANGE``, and are asked about only once.
            said: The same in words.
            peers: The ranks that do the same, this one included.
            patience_s: How long this rank waits for the others if one of them asks; None for no limit.

        Returns:
            How this rank and another one differ, or an empty string.
        """
        with self._turn:
            self._place += 1
            place = self._place
            mine = {"place": place, "what": what, "said": said, "peers": peers, "rank": self._rank}
            self._done[place] = mine
            self._done.pop(place - MEMORY, None)
            asked = self._asked.pop(place, None)
        if asked is not None:
            if difference := self._answer(asked, mine):
                return difference
        elif what not in self._usual:
            self._send(mine)
        else:
            return ""
        with self._turn:
            self._turn.wait_for(lambda: self._agreed >= place or self._released, patience_s)
        if what.startswith(EXCHANGE):
            self._usual.add(what)
        return ""

    def ask(self, theirs: dict[str, Any]) -> str:
        """Answer another rank, now or when this one comes to that place; return how they differ."""
        with self._turn:
            mine = self._done.get(theirs["place"])
            if mine is None:
                self._asked[theirs["place"]] = theirs
                return ""
        return self._answer(theirs, mine)

    def agree(self, place: int) -> None:
        """All ranks do the same up to this place."""
        with self._turn:
            self._agreed = max(self._agreed, place)
            self._turn.notify_all()

    def release(self) -> None:
        """Stop waiting: no answer will come."""
        with self._turn:
            self._released = True
            self._turn.notify_all()

    def _answer(self, theirs: dict[str, Any], mine: dict[str, Any]) -> str:
        difference = ""
        if theirs["what"] != mine["what"]:
            both = sorted((theirs, mine), key=lambda one: one["rank"])
            places = " and ".join(f"rank {one['rank']} to {one['said']}" for one in both)
            alike = all(one["what"].startswith(EXCHANGE) for one in both)
            difference = f"The ranks have come apart: {places}. {SAME_PARAMETERS if alike else SAME_BATCHES}"
        self._send({"agrees": theirs["place"], "peers": theirs["peers"], "apart": difference})
        return difference
