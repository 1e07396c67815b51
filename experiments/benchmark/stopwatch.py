"""Measures some steps in the middle of a run: wall time, bytes and the time spent compressing."""

from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from benchmark.job import Job, Run
from lightning_dct import DCTPipelineStrategy
from lightning_dct.traffic import TrafficTotals
from network.hosts import HEADER_BYTES, sent_by_interface

FEWEST_STEPS = 3


def local_steps_of(strategy: Strategy) -> int:
    """Steps from one exchange to the next."""
    config = getattr(strategy, "config", None)
    return 1 if config is None else int(config.local_steps)


def totals_of(strategy: Strategy) -> TrafficTotals:
    """The totals of a strategy; for a single pipeline, of the traffic between its stages."""
    traffic: Any = (
        strategy.split_traffic if isinstance(strategy, DCTPipelineStrategy) else strategy.traffic
    )
    return traffic.totals


class Stopwatch(Callback):
    """Lets the warm-up pass, measures the steps after it, and ends the run.

    The clock starts when all ranks have come to the first of these steps, and stops when all have
    done the last.
    """

    reads_weights = False

    def __init__(self, job: Job) -> None:
        self._job = job
        self._losses: list[float] = []
        self._last_step = -1
        self._before = self._after = (TrafficTotals(), 0, {})
        self._started = self._seconds = self._selecting_seconds = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int
    ) -> None:
        if trainer.global_step != self._job.warm_up_steps:
            return
        self._last_step = self._job.warm_up_steps + self._steps_to_measure(trainer)
        trainer.strategy.barrier()
        self._before = self._sent_so_far(trainer)
        self._started = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._losses.append(float(outputs["loss"]))
        if trainer.global_step == 1:
            # The first step takes another time than the rest.
            self._started = perf_counter()
        if trainer.global_step == local_steps_of(trainer.strategy):
            self._selecting_seconds = totals_of(trainer.strategy).seconds
        if trainer.global_step == self._last_step:
            trainer.strategy.barrier()
            self._seconds = perf_counter() - self._started
            self._after = self._sent_so_far(trainer)
            trainer.should_stop = True

    def run(self, synchronisation: str, score: float | None) -> Run:
        """The figures of the run; ``score`` is the loss on held-out text, if known."""
        counted = self._after[0] - self._before[0]
        return Run(
            synchronisation=synchronisation,
            steps=self._last_step - self._job.warm_up_steps,
            seconds=self._seconds,
            counted_bytes=counted.bytes_sent,
            interface_bytes=self._after[1] - self._before[1] if self._job.has_links else None,
            compressing_seconds=counted.seconds,
            selecting_seconds=self._selecting_seconds,
            losses=self._losses,
            score=score,
            parts={name: value - self._before[2][name] for name, value in self._after[2].items()},
        )

    def _steps_to_measure(self, trainer: Trainer) -> int:
        """As many as fit into the time there is, in whole rounds of exchanges; rank 0 decides for
        all.
        """
        if self._job.seconds is None or self._job.warm_up_steps < 2:
            return self._job.steps
        step_seconds = (perf_counter() - self._started) / (self._job.warm_up_steps - 1)
        fitting = min(max(int(self._job.seconds / step_seconds), FEWEST_STEPS), self._job.steps)
        length = local_steps_of(trainer.strategy)
        return trainer.strategy.broadcast(max(fitting // length, 1) * length)

    def _sent_so_far(self, trainer: Trainer) -> tuple[TrafficTotals, int, dict[str, float]]:
        """The strategy's counts, the bytes that the interface has sent, less headers, and the
        model's counts.
        """
        frames, packets = sent_by_interface() if self._job.has_links else (0, 0)
        counted = getattr(trainer.lightning_module, "measured", dict)()
        return totals_of(trainer.strategy), frames - HEADER_BYTES * packets, counted
