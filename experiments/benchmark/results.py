"""What a run in the benchmark has shown, and figures over several rounds of runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark.synchronisations import DDP, NOTHING, SYNCHRONISATIONS
from benchmark.timeline import Span, typical_step

MILLISECONDS = 1e3


@dataclass(frozen=True)
class Run:
    """One synchronisation in one round: one rank's figures, or those of the slowest and the busiest of all.

    Attributes:
        synchronisation: Its name.
        steps: Steps measured.
        seconds: Wall time of these, from all ranks being ready to all ranks being done.
        counted_bytes: What the strategy has counted as sent meanwhile.
        interface_bytes: What the interface has sent, less headers; None without an interface of its own.
        compressing_seconds: Time spent compressing and decompressing meanwhile.
        selecting_seconds: The same in the run's first step: thresholds are selected there, and again every
            ``refresh_every`` steps, which these short runs do not reach.
        losses: Training loss of each step from the first, warm-up included: rank 0's batches.
        score: Loss on held-out text at the end, mean over the ranks; None where it was not asked for.
        megabits: Rate of the links, 10^6 bits a second; None without a limit.
        round: Which round, from 0.
        parts: What the model itself has counted meanwhile, by name.
        spans: Of a rank in a pipeline, what it did in each measured step (:mod:`benchmark.timeline`); of all ranks
            together, what each did in a step of median length.
        delay_ms: That frames travel each way, in milliseconds.
    """

    synchronisation: str
    steps: int
    seconds: float
    counted_bytes: int
    interface_bytes: int | None
    compressing_seconds: float
    selecting_seconds: float
    losses: list[float]
    score: float | None
    megabits: float | None = None
    round: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    spans: list[list[Span]] = field(default_factory=list)
    delay_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """Milliseconds a step, the mean over the measured steps."""
        return MILLISECONDS * self.seconds / self.steps

    @property
    def compressing_ms(self) -> float:
        """Milliseconds spent compressing, a step."""
        return MILLISECONDS * self.compressing_seconds / self.steps

    @property
    def sent_bytes(self) -> float:
        """Bytes sent a step: the interface's figure where there is one, else what was counted."""
        return (self.counted_bytes if self.interface_bytes is None else self.interface_bytes) / self.steps


def of_all_ranks(runs: Sequence[Run], megabits: float | None, round: int) -> Run:
    """Put the ranks' figures of one run together.

    Args:
        runs: By rank.
        megabits: Rate of the links.
        round: Which round.
    """
    interfaces = [run.interface_bytes for run in runs if run.interface_bytes is not None]
    return Run(
        synchronisation=runs[0].synchronisation,
        steps=runs[0].steps,
        seconds=max(run.seconds for run in runs),
        counted_bytes=max(run.counted_bytes for run in runs),
        interface_bytes=max(interfaces, default=None),
        compressing_seconds=max(run.compressing_seconds for run in runs),
        selecting_seconds=max(run.selecting_seconds for run in runs),
        losses=runs[0].losses,
        score=runs[0].score,
        megabits=megabits,
        round=round,
        parts={name: max(run.parts[name] for run in runs) for name in runs[0].parts},
        spans=typical_step([run.spans for run in runs]),
    )


def read_runs(folder: Path, count: int, megabits: float | None, round: int) -> list[Run]:
    """What the ranks of a job have written, put together.

    Raises:
        FileNotFoundError: A rank has written nothing.
    """
    ranks = [[Run(**run) for run in json.loads((folder / f"rank{rank}.json").read_text())] for rank in range(count)]
    return [of_all_ranks(runs, megabits, round) for runs in zip(*ranks, strict=True)]


def names_in(runs: Iterable[Run]) -> list[str]:
    """The synchronisations that occur, in the order in which they are shown."""
    there = {run.synchronisation for run in runs}
    return [name for name in SYNCHRONISATIONS if name in there]


@dataclass(frozen=True)
class Figure:
    """One figure over the rounds: its median, and the smallest and the largest value."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Figure | None:
        """Over these values; None when there is none."""
        found = sorted(values)
        return Figure(statistics.median(found), found[0], found[-1]) if found else None


@dataclass(frozen=True)
class Summary:
    """What the rounds have shown of one synchronisation on one kind of link; None where there is no such figure.

    Attributes:
        step_ms: Milliseconds a step.
        against_nothing: Times the step without synchronisation, each round's by that round's.
        faster_than_ddp: The step of DDP in fp32 over this one, likewise.
        sent_bytes: Bytes sent a step.
        fewer_than_ddp: Those of DDP in fp32 over these, likewise.
        compressing_ms: Milliseconds spent compressing, a step.
        selecting_ms: The same in the first step of a run.
        off_by: Bytes at the interface over those counted, less 1.
    """

    step_ms: Figure | None
    against_nothing: Figure | None
    faster_than_ddp: Figure | None
    sent_bytes: Figure | None
    fewer_than_ddp: Figure | None
    compressing_ms: Figure | None
    selecting_ms: Figure | None
    off_by: Figure | None


def summarise(runs: Sequence[Run], synchronisation: str) -> Summary:
    """The figures of one synchronisation.

    Ratios are taken within each round: what slows the machine down for a while slows both.

    Args:
        runs: All runs on one kind of link.
        synchronisation: Which one.
    """
    mine = {run.round: run for run in runs if run.synchronisation == synchronisation}
    nothing = {run.round: run for run in runs if run.synchronisation == NOTHING}
    ddp = {run.round: run for run in runs if run.synchronisation == DDP}
    beside_ddp = [(run, ddp[round]) for round, run in mine.items() if round in ddp]
    return Summary(
        step_ms=Figure.of(run.step_ms for run in mine.values()),
        against_nothing=Figure.of(
            run.step_ms / nothing[round].step_ms for round, run in mine.items() if round in nothing
        ),
        faster_than_ddp=Figure.of(theirs.step_ms / run.step_ms for run, theirs in beside_ddp),
        sent_bytes=Figure.of(run.sent_bytes for run in mine.values()),
        fewer_than_ddp=Figure.of(theirs.sent_bytes / run.sent_bytes for run, theirs in beside_ddp if run.counted_bytes),
        compressing_ms=Figure.of(run.compressing_ms for run in mine.values()),
        selecting_ms=Figure.of(MILLISECONDS * run.selecting_seconds for run in mine.values()),
        off_by=Figure.of(
            run.interface_bytes / run.counted_bytes - 1
            for run in mine.values()
            if run.interface_bytes is not None and run.counted_bytes
        ),
    )


def write_report(file: Path, about: dict[str, Any], runs: Sequence[Run], scored: Sequence[Run]) -> None:
    """Write everything that was measured as JSON."""
    measured = {"runs": [asdict(run) for run in runs], "scored": [asdict(run) for run in scored]}
    file.write_text(json.dumps({**about, **measured}, indent=1) + "\n")
