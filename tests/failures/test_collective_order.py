"""What one rank tells the hub when it comes to a place."""

from typing import Any

from lightning_dct.failures.collective_order import CollectiveOrder

ALL = (0, 1, 2, 3)


def test_a_rank_that_has_been_asked_asks_too() -> None:
    """Rank 2 of another pipeline has asked about the end, to which rank 0 comes next.

    Oracle: rank 0 agrees, and asks as well: it shares places with rank 1 that rank 2 does not.
    """
    sent: list[dict[str, Any]] = []
    order = CollectiveOrder(0, sent.append)
    asked = {"place": 1, "what": "the end", "said": "", "peers": ALL, "rank": 2, "counts": [(ALL, 1)]}
    assert order.hear({"ask": asked}) == ""
    assert order.come_to("the end", "the end of training", ALL, patience_s=0.0) == ""
    agrees, asks = sent
    assert agrees == {"agrees": 1, "peers": ALL, "apart": ""}
    assert (asks["place"], asks["what"], asks["rank"]) == (1, "the end", 0)
