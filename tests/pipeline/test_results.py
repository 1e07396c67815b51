"""The last stage's results arrive complete, whether they are longer or shorter than those of the step before."""

import os
from datetime import timedelta
from typing import Any

from lightning_dct.pipeline.mesh import PipelineMesh, StepResults

RESULTS = ["a", list(range(10_000)), "", {"loss": 1.5}, "b" * 200, "c" * 201]


def share_all(stages: int) -> list[Any]:
    results = StepResults(PipelineMesh(stages, "cpu", timedelta(minutes=1)))
    received = []
    for value in RESULTS:
        results.post_receive()
        received.append(results.share(value if int(os.environ["RANK"]) % stages == stages - 1 else None))
    return received


def test_all_stages_receive_the_results_of_the_last(ranks: Any) -> None:
    assert ranks(4).run(share_all, 2) == [RESULTS] * 4
    assert ranks(3).run(share_all, 3) == [RESULTS] * 3
