"""A run is told about itself: on real ranks, once, by rank 0."""

import contextlib
import io
import logging
import logging.handlers
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero

from distributed.training import Module, fit, rank
from lightning_dct import DCTStrategy
from lightning_dct.forecast.timing import SIZES, measure_link


def train(settings: dict[str, Any], batches: int) -> tuple[str, list[str], int]:
    """What is printed and logged on this rank, and the bytes that are counted."""
    printed, told = io.StringIO(), logging.handlers.MemoryHandler(1000)
    logger = rank_zero.log
    level = logger.level
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(printed):
            run = fit(DCTStrategy(**settings), Module(), batches)
    finally:
        logger.removeHandler(told)
        logger.setLevel(level)
    return printed.getvalue(), [record.getMessage() for record in told.buffer], run.totals.bytes_sent


def look(settings: dict[str, Any], batches: int) -> Any:
    return rank(), *train(settings, batches)


def measured() -> tuple[float, float, int]:
    link = measure_link(dist.group.WORLD, torch.device("cpu"))
    return link.seconds, link.seconds_per_byte, link.num_bytes


def test_all_ranks_find_the_same_link(ranks: Any) -> None:
    """Oracle: the slowest rank's time counts, so that all of them stop at the same size."""
    one, other = ranks(2).run(measured)
    assert one == other
    assert one[0] > 0
    assert one[1] >= 0
    assert one[2] in SIZES[1:]


def test_a_run_is_told_once_at_the_start_and_once_at_the_end(ranks: Any) -> None:
    for settings in ({"local_steps": 4, "density": 0.5}, {"compress": "gradients", "density": 0.1}):
        for number, printed, told, _ in ranks(2).run(look, settings, 30):
            assert sum("This run is short: 30 optimizer steps" in note for note in told) == (number == 0)
            assert not any("exchange='auto'" in note for note in told)
            assert printed.count("ms compressing") == printed.count("; with DDP ") == (number == 0)
            rows = [line.partition("  ")[0] for line in printed.splitlines()[2:]]
            summary = ["bytes sent", "compression ratio", "entries sent", "time of a step", "verdict"]
            assert rows == (summary if number == 0 else [])


def test_few_steps_are_not_judged_and_timing_the_link_is_no_traffic_of_theirs(ranks: Any) -> None:
    """Oracle: the bytes of 2 steps are far fewer than those of the smallest tensor that is timed."""
    for _, printed, _, sent in ranks(2).run(look, {"compress": "gradients", "density": 0.1}, 2):
        assert "time of a step" not in printed
        assert 0 < sent < SIZES[0]
