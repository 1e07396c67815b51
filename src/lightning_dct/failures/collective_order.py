r"""Compares the order in which ranks do things together, before they wait for each other in
different collectives.

A rank comes to *places*: exchanges, and anything else that takes several ranks, such as a barrier.
It numbers the places that it shares with another rank, and at the same number both must do the
same. Mostly they do, and say nothing. A rank *asks* the others if it does something for the first
time in this order, or if ranks with uneven batches would do it at different places. It waits until
all have come to that place:

    rank 0    9: exchange --- 10: barrier, asks ---- waits ---------------- ends, with the places of both ranks
    rank 1    9: exchange --- 10: exchange, waits for rank 0 -- is asked -- ends

Ranks that train with a Trainer also tell in which *batch* they come to an exchange. If one of them
leaves out an optimizer step, its next exchange would meet that of an earlier batch. It notices that
it has had more batches than usual since its last such exchange, and asks:

    rank 0    9: exchange, batch 9 --- 10: exchange, batch 10 - is asked -- ends
    rank 1    9: exchange, batch 9 --- skips batch 10 --- 10: exchange, batch 11, asks -- ends

A rank that stays at a place for ``LATE_S`` asks as well, without waiting: it may be in a collective
that another rank does not come to, such as one more of what all have done before. Another rank may
be in a collective of the user's own instead. It says so after as long a time. If all ranks that are
missing at a place say so, none of them will come.

If any rank receives a signal, all ranks act on it at the same *stop point*, such as the end of a
step. The hub asks each rank how many stop points it has passed, and answers with the largest count
plus one. Until then a rank waits at its next stop point:

    rank 0    7 passed -- asked: 7 ----------- point 8: waits, receives 9 --- point 9: acts
    rank 1    8 passed ---- asked: 8 -- receives 9 ------------------------- point 9: acts
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType

from lightning_dct.failures.messages import (
    ActOn,
    Agreed,
    Ask,
    Batch,
    Elsewhere,
    FromRank,
    Peers,
    Place,
    Where,
)

# Places that a rank remembers. It can be ahead of another by no more than the exchanges it has in
# flight.
REMEMBERED = 1024
ORDER = 8  # places before one that make it another
# Seconds at a place after which a rank asks about it. A step may take longer, and then an answer
# says that all is well.
LATE_S = 10.0
SAME_BATCHES = (
    "Give every rank the same number of batches, step in the same of them (a loss scaler must not"
    " skip one on one rank alone), and let all ranks log, gather, stop, validate and save after the"
    " same step"
)
SAME_PARAMETERS = (
    "Change `requires_grad` and the optimizers' `param_groups` on every rank alike, before the same"
    " optimizer step"
)
SAME_STEPS = "Step the same optimizers in the same order on every rank"
ALL_STEP = (
    "has made fewer optimizer steps in as many batches. Decide alike on all ranks whether to step,"
    " as by the largest gradient norm of all, `strategy.reduce(norm, reduce_op='max')`; or set this"
    " rank's gradients to zero, and step"
)
EXCHANGE = "an exchange"
IN_FORWARD = f"{EXCHANGE} in forward"


class CollectiveOrder:
    """One rank's places and stop points, shared by its main thread and the one that listens to the
    hub.

    ``counts`` has how many places this rank has come to, by the ranks that share them.
    """

    def __init__(self, rank: int, send: Callable[[FromRank], None]) -> None:
        self._rank = rank
        self._send = send
        self._turn = threading.Condition()
        self.counts: Counter[Peers] = Counter()
        # The last of these places that all agree on.
        self._agreed: Counter[Peers] = Counter()
        self._done: deque[Place] = deque(maxlen=REMEMBERED)
        self._asked: list[Place] = []
        self._since: float | None = (
            None  # when it has come to its last place, unless it has asked about it
        )
        # The collective of the user's own in which this rank was found last, after how many places,
        # and since when.
        self._found = (0, "")
        self._found_since = 0.0
        # The last things that this rank has done, and all that it has done in such an order.
        self._recent: deque[str] = deque(ORDER * [""], maxlen=ORDER)
        # By exchange, the batch in which this rank made it last, and the batches from the time
        # before until then.
        self._batches: dict[str, tuple[int, int]] = {}
        self._usual: set[tuple[str, ...]] = set()
        # Stop points that this rank has passed, signals of which it does not know yet where all
        # act, and those it does.
        self._passed = 0
        self._signals: set[int] = set()
        self._due: dict[int, list[int]] = {}
        self._released = False

    def check_order(
        self,
        name: str,
        description: str,
        peers: Sequence[int],
        patience_s: float | None = None,
        batch: Batch | None = None,
    ) -> str:
        """Come to the next place, and wait for the others if this rank or one of them asks; how
        they differ, if so.

        ``name`` is what this rank and its ``peers``, this one included, do there, ``description``
        the same in words. Exchanges begin with ``EXCHANGE``, and are asked about only if they
        follow others in a new order. The wait ends after ``patience_s``; None for no limit.
        ``batch`` is the number of this rank's batch, the same on all ranks, and a name for it; None
        if batches are not known.
        """
        ranks = tuple(peers)
        with self._turn:
            self.counts[ranks] += 1
            place = self.counts[ranks]
            mine: Place = {
                "place": place,
                "what": name,
                "said": description,
                "peers": ranks,
                "rank": self._rank,
                "counts": list(self.counts.items()),
                "batch": batch,
            }
            self._done.append(mine)
            is_exchange = name.startswith(EXCHANGE)
            order = (*self._recent, name)
            self._recent.append(name if is_exchange else "")
            has_left_out = batch is not None and self._has_left_out(name, batch[0])
            is_usual = order in self._usual and not has_left_out
            self._since = time.monotonic() if is_usual else None
            asked = [theirs for theirs in self._asked if _same_number(theirs, mine)]
            self._asked = [theirs for theirs in self._asked if theirs not in asked]
        for theirs in asked:
            if difference := self._answer(theirs, mine):
                return difference
        if not is_usual:
            # Also when asked: this rank may share other places with the others than the one that
            # asks.
            self._send(mine)
        elif not asked:
            return ""
        with self._turn:
            self._turn.wait_for(lambda: self._agreed[ranks] >= place or self._released, patience_s)
        if is_exchange and len(self._usual) < REMEMBERED:
            self._usual.add(order)
        return ""

    def _has_left_out(self, name: str, batch: int) -> bool:
        """Whether more batches than usual have passed since this rank's last exchange."""
        of_optimizer = " ".join(name.split()[:3])  # whatever is exchanged
        before, usual = self._batches.get(of_optimizer, (batch, 0))
        passed = batch - before
        # It may come several times in a batch.
        self._batches[of_optimizer] = batch, passed or usual
        return usual > 0 and passed > usual

    def ask_if_late(self) -> float:
        """Ask about the last place if this rank has been there for long; the seconds after which to
        look again.

        If others have asked about a place to which this rank has not come, tell them if it is
        elsewhere for long.
        """
        now = time.monotonic()
        found = _own_collective()
        with self._turn:
            if self._found != (here := (self.counts.total(), found)):
                self._found = here
                self._found_since = now
            where = found if now - self._found_since >= LATE_S else ""
            messages: list[Elsewhere | Place] = [
                {"elsewhere": where, "place": one["place"], "peers": one["peers"]}
                for one in self._asked
            ]
            left = LATE_S if self._since is None else self._since + LATE_S - now
            if left <= 0.0:
                self._since = None
                left = LATE_S
                messages.append(self._done[-1])
        for message in messages:
            self._send(message)
        return left

    def hear(self, message: Ask | Agreed | Where | ActOn) -> str:
        """Act on the hub's message about a place or a stop point; how this rank differs from the
        one that asks, if so.

        A question is answered now, or when this rank comes to that place. Asked for its stop
        points, this rank tells how many it has passed, and waits at the next one until it knows
        where all act on the signal.
        """
        theirs: Place | None = None
        mine: Place | None = None
        with self._turn:
            passed = self._passed
            if "ask" in message:
                theirs = message["ask"]
                mine = next((one for one in self._done if _same_number(theirs, one)), None)
                if mine is None:
                    self._asked.append(theirs)
            elif "agreed" in message:
                peers = tuple(message["peers"])
                self._agreed[peers] = max(self._agreed[peers], message["agreed"])
            elif "where" in message:
                self._signals.add(message["where"])
            elif "act_on" in message:
                self._signals.discard(message["act_on"])
                self._due.setdefault(message["place"], []).append(message["act_on"])
            self._turn.notify_all()
        if "where" in message:
            self._send({"asked": message["where"], "passed": passed})
        return "" if theirs is None or mine is None else self._answer(theirs, mine)

    def pass_stop_point(self) -> list[int]:
        """Pass one more, once the signals that all ranks act on there are known."""
        with self._turn:
            self._passed += 1
            self._turn.wait_for(lambda: self._released or not self._signals)
            return sorted(self._due.pop(self._passed, []))

    def release(self) -> None:
        """Stop waiting: no answer will come."""
        with self._turn:
            self._released = True
            self._turn.notify_all()

    def _answer(self, theirs: Place, mine: Place) -> str:
        difference = ""
        own_batch = mine["batch"]
        their_batch = theirs.get("batch")
        if (theirs["what"], *theirs["peers"]) != (mine["what"], *mine["peers"]):
            both = sorted((theirs, mine), key=lambda one: one["rank"])
            places = " and ".join(f"rank {one['rank']} at {one['said']}" for one in both)
            alike = all(
                one["what"].startswith(EXCHANGE) and "values" not in one["what"] for one in both
            )
            remedy = SAME_PARAMETERS if alike and "parameters" in places else SAME_BATCHES
            if (
                places.count(" of optimizer ") == 2
                and theirs["what"].split()[:3] != mine["what"].split()[:3]
            ):
                remedy = SAME_STEPS
            difference = f"The ranks are out of step: {places}. {remedy}"
        elif their_batch and own_batch and their_batch[0] != own_batch[0]:
            batches = sorted(
                [
                    (theirs["rank"], theirs["said"], their_batch),
                    (mine["rank"], mine["said"], own_batch),
                ]
            )
            places = " and ".join(
                f"rank {rank} at {said}, in {name}" for rank, said, (_, name) in batches
            )
            behind = max(batches, key=lambda one: one[2][0])[0]
            difference = f"The ranks are out of step: {places}. Rank {behind} {ALL_STEP}"
        self._send({"agrees": theirs["place"], "peers": theirs["peers"], "apart": difference})
        return difference


def _own_collective() -> str:
    """The collective of torch.distributed in which the main thread waits, and the line that calls
    it; empty if there is none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    called = ""
    # The main thread goes on meanwhile. What follows a frame that has ended may be anything.
    while isinstance(frame, FrameType) and _is_of_torch(frame):
        name = frame.f_code.co_name
        frame = frame.f_back
        called = called if name == "wrapper" else name  # of a decorator
    # A rank may leave others, such as a broadcast, while the rest is still busy with it.
    if not isinstance(frame, FrameType) or not called.startswith(
        ("all_", "barrier", "reduce_scatter")
    ):
        return ""
    return f"`{called}`, called in {frame.f_code.co_filename}, line {frame.f_lineno}"


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")


def _same_number(theirs: Place, mine: Place) -> bool:
    """Whether two ranks' places have the same number, counted among the places that both share."""
    if mine["rank"] not in theirs["peers"] or theirs["rank"] not in mine["peers"]:
        return False
    return _number(theirs, mine) == _number(mine, theirs)


def _number(one: Place, other: Place) -> int:
    return sum(count for ranks, count in one["counts"] if other["rank"] in ranks)
