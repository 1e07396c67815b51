"""When a rank of a pipeline computes micro-batches in a step, and when it waits for the network."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from time import perf_counter
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.pipelining import PipelineStage, schedules

from lightning_dct.pipeline.mesh import StepResults

FORWARD = "forward"
BACKWARD = "backward"
WAITING = "waiting"
SHARING = "sharing the loss"
"""The kinds of spans: a micro-batch, compression included; waits for sends and receives; sending
the loss to all.
"""

# None of them has a hook.
_WATCHED: tuple[tuple[Any, str, str], ...] = (
    (PipelineStage, "forward_one_chunk", FORWARD),
    (PipelineStage, "backward_one_chunk", BACKWARD),
    (schedules, "_wait_batch_p2p", WAITING),
    (StepResults, "share", SHARING),
)

Span = tuple[str, int, float, float]
"""The kind, the number of the micro-batch (-1 for none), and when it began and ended, in seconds.

All hosts on a machine share its clock.
"""


class Timeline(Callback):
    """Keeps the spans of every step of training; a span takes microseconds to keep."""

    reads_weights = False

    def __init__(self) -> None:
        self.steps: list[list[Span]] = []
        self._watching = ExitStack()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for owner, name, what in _WATCHED:
            self._watching.enter_context(
                patch.object(owner, name, self._watched(getattr(owner, name), what))
            )

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int
    ) -> None:
        self.steps.append([])

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._watching.close()

    def _watched(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(function)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            began = perf_counter()
            result = function(*arguments, **keywords)
            number = arguments[1] if what in (FORWARD, BACKWARD) else -1
            self.steps[-1].append((what, number, began, perf_counter()))
            return result

        return watched


def typical_step(ranks: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """The step of median length: each rank's spans in it, which begin at 0 s."""
    steps = [[list(spans) for spans in step] for step in zip(*ranks, strict=True)]
    if not steps:
        return []

    def ends(step: list[list[Span]]) -> tuple[float, float]:
        spans = [span for rank in step for span in rank]
        return min(span[2] for span in spans), max(span[3] for span in spans)

    by_length = sorted(steps, key=lambda step: ends(step)[1] - ends(step)[0])
    step = by_length[len(steps) // 2]
    start = ends(step)[0]
    return [
        [(what, number, began - start, ended - start) for what, number, began, ended in rank]
        for rank in step
    ]
