import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.traffic import (
    Clock,
    Traffic,
    TrafficTotals,
    all_gather_bytes,
    all_reduce_bytes,
    bytes_between_nodes,
)
from strategies_for_hypothesis import examples

SOME: dict[str, Any] = {
    "steps": 4,
    "bytes_sent": 100,
    "bytes_dense": 5000,
    "entries_sent": 30,
    "entries": 1000,
    "seconds": 0.5,
    "seconds_waiting": 0.25,
    "refreshes": 2,
    "bytes_inside_node": 700,
}


@given(num_bytes=st.integers(0, 10_000), world_size=st.integers(1, 9))
@examples(60)
def test_all_gather_passes_every_other_message_on_once(num_bytes: int, world_size: int) -> None:
    sent = 0
    for _ in range(world_size - 1):  # rounds of a ring: each rank passes one message on
        sent += num_bytes
    assert all_gather_bytes(num_bytes, world_size) == sent


@given(num_bytes=st.integers(0, 10**15), world_size=st.integers(1, 1000))
@examples(60)
def test_all_reduce_rounds_up_without_floats(num_bytes: int, world_size: int) -> None:
    sent = all_reduce_bytes(num_bytes, world_size)
    assert 0 <= sent * world_size - 2 * (world_size - 1) * num_bytes < world_size


def test_a_single_process_sends_nothing() -> None:
    assert all_reduce_bytes(1000, 1) == all_gather_bytes(1000, 1) == 0


@given(num_bytes=st.integers(0, 1000), nodes=st.integers(1, 4), ranks=st.integers(1, 4))
@examples(60)
def test_a_ring_in_the_order_of_the_nodes_leaves_each_node_once(
    num_bytes: int, nodes: int, ranks: int
) -> None:
    world_size = nodes * ranks
    crossing = [
        rank for rank in range(world_size) if rank // ranks != (rank + 1) % world_size // ranks
    ]
    if ranks == 1 or world_size == 1:
        assert bytes_between_nodes(num_bytes, world_size, 1) == num_bytes
    else:
        mean = -(-num_bytes * len(crossing) // world_size)
        assert bytes_between_nodes(num_bytes, world_size, ranks) == mean


def test_ratio_and_density() -> None:
    totals = TrafficTotals(**SOME)
    assert totals.compression_ratio == 50.0
    assert totals.density == 0.03


@pytest.mark.parametrize(
    "totals", [TrafficTotals(), TrafficTotals(steps=1)], ids=["at first", "of one process"]
)
def test_where_nothing_is_sent_there_is_no_ratio(totals: TrafficTotals) -> None:
    assert all(math.isnan(x) for x in (totals.compression_ratio, totals.density))


def test_subtraction_leaves_what_lies_between() -> None:
    later = TrafficTotals(
        steps=7, bytes_sent=300, bytes_dense=9000, entries_sent=33, entries=1001, seconds=2.0
    )
    between = later - TrafficTotals(
        steps=4, bytes_sent=100, bytes_dense=5000, entries_sent=30, entries=1000
    )
    assert between == TrafficTotals(3, 200, 4000, 3, 1, 2.0, 0)
    assert between.compression_ratio == 20.0


def test_every_number_adds_up() -> None:
    traffic = Traffic()
    before = traffic.totals
    for _ in range(3):
        for name, value in SOME.items():
            traffic.add(**{name: value})
    assert traffic.totals == TrafficTotals(**{name: 3 * value for name, value in SOME.items()})
    assert before == TrafficTotals()  # totals taken earlier do not change


def test_state_round_trip() -> None:
    traffic = Traffic()
    resumed = Traffic()
    traffic.add(**SOME)
    resumed.add(steps=99)
    resumed.load_state_dict(traffic.state_dict())
    assert resumed.totals == traffic.totals
    assert traffic.state_dict() == {
        **SOME,
        "admitted_rows": 0,
        "evicted_rows": 0,
        "bytes_of_buffers": 0,
    }


def test_a_copy_has_no_marks_of_a_gpu() -> None:
    """Callbacks that average weights copy the model, whose split points count in such a counter."""

    class Stream(Clock):
        mark = staticmethod(lambda: torch.Event("cpu"))

        def has_passed(self, mark: Any) -> bool:
            return False

    traffic = Traffic(clock=Stream())
    traffic.add(bytes_sent=7)
    with traffic.timed():
        pass
    assert copy.deepcopy(traffic).read_clocks().bytes_sent == 7
