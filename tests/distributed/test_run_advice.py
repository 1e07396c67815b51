"""A run is told about itself: on real ranks, once, by rank 0."""

import contextlib
import io
import logging
import logging.handlers
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning_utilities.core import rank_zero

from distributed.training import Module, fit, rank, trainer_for
from embedding.hybrid import EVERYTHING, Hybrid, batches
from fsdp.training import Plain, fsdp, train
from lightning_dct import DCTStrategy
from lightning_dct.callbacks import run_advice
from lightning_dct.cost.timing import SIZES, MeasuredLink, measure_link


@contextlib.contextmanager
def heard() -> Iterator[tuple[io.StringIO, list[str]]]:
    """What is printed and logged on this rank."""
    printed = io.StringIO()
    messages = []
    told = logging.handlers.MemoryHandler(1000)
    logger = rank_zero.log
    level = logger.level
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(printed):
            yield printed, messages
    finally:
        messages += [record.getMessage() for record in told.buffer]
        logger.removeHandler(told)
        logger.setLevel(level)


def look(settings: dict[str, Any], batches: int) -> Any:
    with heard() as (printed, told):
        run = fit(DCTStrategy(**settings), Module(), batches)
    return rank(), printed.getvalue(), told, run.totals.bytes_sent


def recommend() -> tuple[str, list[str]]:
    """The end and the start of a recommender's run, on a link on which nothing takes any time."""
    link = MeasuredLink(2, 1e-9, 0.0)
    with patch.object(run_advice, "measure_link", lambda *_: link), heard() as (printed, told):
        trainer_for(DCTStrategy()).fit(Hybrid(EVERYTHING), batches(30))
    return printed.getvalue(), told


class SavesWeights(Callback):
    """Saves weights alone after a batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 5:
            trainer.save_checkpoint(self.path, weights_only=True)


def pauses(path: Path) -> int:
    """How often the time of steps pauses in a run without validations that saves weights once."""
    counted: list[Any] = []
    with patch.object(run_advice.StepClock, "pause", lambda clock: counted.append(clock)):
        fit(DCTStrategy(), Module(), 10, callbacks=[SavesWeights(path)])
    return len(counted)


def test_a_save_of_weights_alone_is_no_part_of_a_step(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(pauses, tmp_path / "x.ckpt") == [1, 1]


class Sleeps(Module):
    """Rank 1 takes far longer for a step than rank 0."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2 * rank())
        return super().training_step(batch, batch_idx)


def wait_for_rank_1() -> tuple[str, list[str]]:
    with (
        patch.object(run_advice, "REPORT_EVERY_S", 0.0),
        warnings.catch_warnings(record=True) as caught,
        heard() as (printed, _),
    ):
        warnings.simplefilter("always")
        fit(DCTStrategy(), Sleeps(), 15)
    return printed.getvalue(), [
        str(warning.message) for warning in caught if "wait for it" in str(warning.message)
    ]


def test_a_slow_rank_is_named_while_it_trains_and_at_the_end(ranks: Any) -> None:
    """Oracle: the rank that sleeps, in one warning and in the table of rank 0."""
    (printed, (warned,)), (of_other, warned_other) = ranks(2).run(wait_for_rank_1)
    assert "Rank 1 slows down all others" in warned
    assert "rank 1: " in next(line for line in printed.splitlines() if "slowest rank" in line)
    assert "slowest rank" not in of_other
    assert warned_other == []


def alone() -> list[str]:
    with heard() as (_, told):
        train(fsdp(replicas=1), Plain(), 3)
    return told


def measured() -> MeasuredLink:
    return measure_link(dist.group.WORLD, torch.device("cpu"))


def test_all_ranks_find_the_same_link(ranks: Any) -> None:
    """Oracle: the slowest rank's time counts, so that all of them stop at the same size."""
    one, other = ranks(2).run(measured)
    assert one == other
    assert min(one.latency, one.seconds_per_byte) >= 0
    assert one.all_reduce_seconds(SIZES[1]) > 0


def test_a_run_is_told_once_at_the_start_and_once_at_the_end(ranks: Any) -> None:
    for settings in ({"local_steps": 4, "density": 0.5}, {"compress": "gradients", "density": 0.1}):
        for number, printed, told, _ in ranks(2).run(look, settings, 30):
            assert sum("This run is short" in note for note in told) == (number == 0)
            assert not any("exchange='auto'" in note for note in told)
            assert printed.count("ms compressing") == printed.count("; with DDP ") == (number == 0)
            # By chance.
            rows = [
                line.partition("  ")[0]
                for line in printed.splitlines()[2:]
                if "slowest rank" not in line
            ]
            summary = [
                "bytes sent",
                "compression ratio",
                "entries sent",
                "time of a step",
                "verdict",
            ]
            assert rows == (summary if number == 0 else [])


def test_few_steps_are_not_judged_and_timing_the_link_is_no_traffic_of_theirs(ranks: Any) -> None:
    """Oracle: the bytes of 2 steps are far fewer than those of the smallest tensor that is
    timed.
    """
    for _, printed, _, sent in ranks(2).run(look, {"compress": "gradients", "density": 0.1}, 2):
        assert "time of a step" not in printed
        assert 0 < sent < SIZES[0]


def test_what_is_advised_can_be_followed(ranks: Any) -> None:
    """Under DDP the tables have no rows; one replica has nobody to send to, and no setting of
    compression helps.
    """
    dense = "the dense exchange (compress='gradients', density=1.0)"
    (first, told), (other, told_other) = ranks(2).run(recommend)
    (line,) = [line for line in first.splitlines() if line.startswith("verdict")]
    assert f"{dense} is faster" in line
    assert sum(f"On this link, {dense} is likely faster" in note for note in told) == 1
    assert other == ""
    assert not any("On this link" in note for note in told_other)
    told, _ = ranks(2).run(alone)
    assert sum("Give `replicas=2` or more." in note for note in told) == 1
    assert not any("short" in note for note in told)


@pytest.mark.parametrize("compress", ["updates", "gradients"])
def test_one_rank_that_sends_nothing_has_no_table(ranks: Any, compress: str) -> None:
    ((_, printed, *_),) = ranks(1).run(look, {"compress": compress}, 30)
    assert printed == ""
