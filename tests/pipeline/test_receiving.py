"""Receives are posted early, which changes nothing but when bytes travel; the results of a step
arrive complete.
"""

import os
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.pipelining import PipelineStage

from lightning_dct.pipeline import schedule
from lightning_dct.pipeline.mesh import PipelineMesh, StepResults
from lightning_dct.pipeline.schedule import EarlyReceiver
from pipeline.split_models import MICRO_BATCHES, train

INT8 = {"density": 0.3, "forward_format": "int8", "backward_format": "int4"}


def train_watched(stages: int, name: str, early: bool) -> tuple[list[str], list[int]]:
    """Hashes of this rank's weights after each step, and the receives posted before each of its
    micro-batches.
    """
    posted = []
    computed = []
    start = schedule._post
    compute = schedule.Stage.compute

    def counted_start(op: Any) -> Any:
        posted.append(op)
        return start(op)

    def counted_compute(stage: Any, *arguments: Any) -> Any:
        computed.append(len(posted))
        return compute(stage, *arguments)

    with (
        patch.object(schedule, "EarlyReceiver", EarlyReceiver if early else PipelineStage),
        patch.object(schedule, "_post", counted_start),
        patch.object(schedule.Stage, "compute", counted_compute),
    ):
        return train(stages, name, stages, INT8, count=2).hashes, computed


@pytest.mark.parametrize(("stages", "name"), [(2, "gpipe"), (3, "1f1b")])
def test_receives_are_posted_at_once(ranks: Any, stages: int, name: str) -> None:
    """Oracle: the stage of torch, which posts a receive when it needs the message."""
    found = ranks(stages).run(train_watched, stages, name, True)
    usual = ranks(stages).run(train_watched, stages, name, False)
    assert [hashes for hashes, _ in found] == [hashes for hashes, _ in usual]
    for stage, (_, posted) in enumerate(found):
        # Forward two messages, backward one: before anything is computed.
        a_step = MICRO_BATCHES * (2 * (stage > 0) + (stage < stages - 1))
        assert posted == [a_step] * MICRO_BATCHES + [2 * a_step] * MICRO_BATCHES


RESULTS = ["a", list(range(10_000)), "", {"loss": 1.5}, "b" * 200, "c" * 201]


def share_all(stages: int) -> list[Any]:
    results = StepResults(PipelineMesh(stages, "cpu", timedelta(minutes=1)))
    received = []
    for value in RESULTS:
        results.post_receive()
        received.append(
            results.share(value if int(os.environ["RANK"]) % stages == stages - 1 else None)
        )
    return received


def test_all_stages_receive_the_results_of_the_last(ranks: Any) -> None:
    assert ranks(4).run(share_all, 2) == [RESULTS] * 4
    assert ranks(3).run(share_all, 3) == [RESULTS] * 3
