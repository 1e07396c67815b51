"""The costs of a step of a run: its time, and the shares of compressing and waiting."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from lightning_dct.traffic import TrafficTotals

SKIPPED = 3
"""First steps that are left out: they compile, allocate, and let DistributedDataParallel rebuild its buckets."""
FEWEST = 10
"""With fewer steps there are no means."""


@dataclass(frozen=True)
class StepCosts:
    """Means over the steps of a run; seconds.

    Attributes:
        total: From the end of a step to the end of the next.
        compressing: Of that, compressing and decompressing.
        waiting: Of that, waiting for the network and for ranks that come later.
    """

    total: float
    compressing: float
    waiting: float

    @property
    def synchronising(self) -> float:
        """Both together."""
        return self.compressing + self.waiting


class StepClock:
    """Adds up the costs of steps, except the first ``skipped``, without pauses between them such as a validation.

    Attributes:
        steps: Steps that have been added up; with less than ``fewest`` there are no means.
    """

    def __init__(self, skipped: int = SKIPPED, fewest: int = FEWEST) -> None:
        self.steps = 0
        self._skipped, self._fewest = skipped, fewest
        self._before: tuple[float, TrafficTotals] | None = None
        self._seen = 0
        self._total = self._compressing = self._waiting = 0.0

    def after_step(self, totals: TrafficTotals) -> None:
        """Note the end of a step, with the totals until now."""
        now = perf_counter()
        self._seen += 1
        if self._before is not None and self._seen > self._skipped:
            then, before = self._before
            self.steps += totals.steps - before.steps
            self._total += now - then
            self._compressing += totals.seconds - before.seconds
            self._waiting += totals.seconds_waiting - before.seconds_waiting
        self._before = now, totals

    def pause(self) -> None:
        """Leave out the time from the last step to the next."""
        self._before = None

    def restart(self) -> None:
        """Add up anew from the next step on."""
        self.steps, self._total, self._compressing, self._waiting = 0, 0.0, 0.0, 0.0

    @property
    def costs(self) -> StepCosts | None:
        """The means; None after too few steps."""
        if self.steps < self._fewest:
            return None
        return StepCosts(*(seconds / self.steps for seconds in (self._total, self._compressing, self._waiting)))
