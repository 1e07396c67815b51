"""What one rank tells the hub when it comes to a place."""

import json
import sys
import threading
from typing import Any

import pytest

from lightning_dct.failures import collective_order
from lightning_dct.failures.collective_order import EXCHANGE, CollectiveOrder

ALL = (0, 1, 2, 3)


def test_a_rank_that_has_been_asked_asks_too() -> None:
    """Rank 2 of another pipeline has asked about the end, to which rank 0 comes next.

    Oracle: rank 0 agrees, and asks as well: it shares places with rank 1 that rank 2 does not.
    """
    sent: list[dict[str, Any]] = []
    order = CollectiveOrder(0, sent.append)
    asked = {
        "place": 1,
        "what": "the end",
        "said": "",
        "peers": ALL,
        "rank": 2,
        "counts": [(ALL, 1)],
    }
    assert order.hear({"ask": asked}) == ""
    assert order.check_order("the end", "the end of training", ALL, patience_s=0.0) == ""
    agrees, asks = sent
    assert agrees == {"agrees": 1, "peers": ALL, "apart": ""}
    assert (asks["place"], asks["what"], asks["rank"]) == (1, "the end", 0)


def order_of(rank: int, sent: list[dict[str, Any]]) -> CollectiveOrder:
    return CollectiveOrder(rank, lambda message: sent.append(json.loads(json.dumps(message))))


def exchange(order: CollectiveOrder, step: int, batch: int) -> str:
    said = f"an exchange, in optimizer step {step}"
    return order.check_order(
        EXCHANGE, said, (0, 1), patience_s=0.0, batch=(batch, f"batch {batch - 1} of epoch 0")
    )


@pytest.mark.parametrize("pace", [1, 3])
def test_a_rank_that_leaves_out_a_step_asks_at_its_next_exchange(pace: int) -> None:
    """Oracle: nothing is sent before it, and the answer names both batches, and the rank that has
    made fewer steps.
    """
    sent: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    orders = [order_of(rank, sent[rank]) for rank in (0, 1)]
    for step in range(1, 21):
        for order in orders:
            assert exchange(order, step, pace * step) == ""
    asked = sent[1][-1]
    for messages in sent.values():
        # Only while the order was new.
        assert sum("ask" in one or "what" in one for one in messages) < 12
        messages.clear()
    assert exchange(orders[0], 21, pace * 21) == ""
    assert not sent[0]
    assert exchange(orders[1], 21, pace * 22) == ""
    (asked,) = sent[1]
    said = orders[0].hear({"ask": asked})
    assert said.startswith(
        "The ranks are out of step: rank 0 at an exchange, in optimizer step 21, in batch"
        f" {21 * pace - 1} of epoch 0 and rank 1 at an exchange, in optimizer step 21, in batch"
        f" {22 * pace - 1} of epoch 0. Rank 1 has made fewer"
    )
    assert sent[0] == [{"agrees": 21, "peers": [0, 1], "apart": said}]


def test_a_rank_that_leaves_out_a_step_with_all_others_goes_on() -> None:
    sent: list[dict[str, Any]] = []
    orders = [order_of(0, []), order_of(1, sent)]
    for step, batch in enumerate([*range(1, 21), 22, 23, 24], start=1):
        for order in orders:
            assert exchange(order, step, batch) == ""
    asked = [one for one in sent if one.get("place") == 21]
    assert len(asked) == 1
    assert orders[0].hear({"ask": asked[0]}) == ""


def test_buckets_of_one_batch_are_no_steps_left_out() -> None:
    """A rank that comes several times to an exchange in a batch asks no more than while the order
    is new.
    """
    sent: list[dict[str, Any]] = []
    order = order_of(0, sent)
    for step in range(1, 40):
        for _ in range(3):
            exchange(order, step, step)
    assert len(sent) < 12


def test_a_frame_that_has_ended_is_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread goes on while it is looked at: what is found there may be any object."""
    main = threading.main_thread().ident
    monkeypatch.setattr(sys, "_current_frames", lambda: {main: ("a tuple",)})
    assert collective_order._own_collective() == ""
