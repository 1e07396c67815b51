"""What the last stage tells arrives whole, whether it is longer or shorter than what it has told before."""

import os
from datetime import timedelta
from typing import Any

from lightning_dct.pipeline.mesh import PipelineMesh
from lightning_dct.pipeline.telling import Telling

TOLD = ["a", list(range(10_000)), "", {"loss": 1.5}, "b" * 200, "c" * 201]


def tell(stages: int) -> list[Any]:
    telling = Telling(PipelineMesh.create(stages, "cpu", timedelta(minutes=1)))
    heard = []
    for value in TOLD:
        telling.ask()
        heard.append(telling.share(value if int(os.environ["RANK"]) % stages == stages - 1 else None))
    return heard


def test_all_stages_hear_what_the_last_one_tells(ranks: Any) -> None:
    assert ranks(4).run(tell, 2) == [TOLD] * 4
    assert ranks(3).run(tell, 3) == [TOLD] * 3
