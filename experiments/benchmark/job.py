"""The files between a benchmark's command and its ranks: the job, and the runs that they have
measured.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmark.timeline import Span, typical_step
from network.hosts import Host, Link, shared_folder
from network.running import run_ranks

MILLISECONDS = 1e3
QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
"""Arguments of a Trainer that only trains."""


@dataclass(frozen=True)
class Job:
    """One start of torchrun, which trains the same model under each synchronisation, in this order.

    Attributes:
        synchronisations: Names of :data:`benchmark.synchronisations.SYNCHRONISATIONS`, of
            :data:`benchmark.recommenders.RECOMMENDERS`, or of :data:`benchmark.stages.CROSSINGS`.
        warm_up_steps: Steps before measuring: buckets are rebuilt, thresholds selected, kernels
            compiled.
        steps: Most steps to measure.
        seconds: After which a run should end that has not measured so many steps; None for no
            limit.
        score: Whether to compute the loss on held-out text at the end.
        batch_size: Rows a rank.
        width: Units of the model's hidden layers; of a recommender, entries a row.
        has_links: Whether each rank has a network interface of its own.
        table_rows: Rows of each table of a recommender.
        micro_batches: Parts of a pipeline's batch.
        schedule: Of a pipeline.
    """

    synchronisations: list[str]
    warm_up_steps: int
    steps: int
    seconds: float | None
    score: bool
    batch_size: int
    width: int
    has_links: bool = False
    table_rows: int = 0
    micro_batches: int = 1
    schedule: str = ""


@dataclass(frozen=True)
class Run:
    """One synchronisation in one round: the figures of one rank, or the largest of all ranks.

    Attributes:
        synchronisation: Its name.
        steps: Steps measured.
        seconds: Their wall time, from all ranks being ready to all ranks being done.
        counted_bytes: Bytes that the strategy has counted as sent meanwhile.
        interface_bytes: Bytes that the interface has sent, less headers; None without an interface
            of its own.
        compressing_seconds: Time spent compressing and decompressing meanwhile.
        selecting_seconds: The same in the first step, which selects thresholds.
        losses: Training loss of each step from the first, warm-up included: rank 0's batches.
        score: Loss on held-out text at the end, mean over the ranks; None if the job has no score.
        megabits: Rate of the links, 10^6 bits a second; None without a limit.
        round: Which round, from 0.
        parts: What the model itself has counted meanwhile, by name.
        spans: Of a rank in a pipeline, its spans in each measured step (:mod:`benchmark.timeline`);
            of all ranks together, those of each rank in a step of median length.
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
    def link(self) -> Link:
        return Link(self.megabits, self.delay_ms)

    @property
    def step_ms(self) -> float:
        """Milliseconds a step, the mean over the measured steps."""
        return MILLISECONDS * self.seconds / self.steps

    @property
    def compressing_ms(self) -> float:
        return MILLISECONDS * self.compressing_seconds / self.steps

    @property
    def sent_bytes(self) -> float:
        """Bytes sent a step: at the interface, or counted if there is none."""
        return (
            self.counted_bytes if self.interface_bytes is None else self.interface_bytes
        ) / self.steps


def of_all_ranks(runs: Sequence[Run], link: Link, round: int) -> Run:
    """Join the figures of one run, which are given by rank."""
    interfaces = [run.interface_bytes for run in runs if run.interface_bytes is not None]
    largest = {
        name: max(getattr(run, name) for run in runs)
        for name in ("seconds", "counted_bytes", "compressing_seconds", "selecting_seconds")
    }
    return replace(
        runs[0],
        **largest,
        interface_bytes=max(interfaces, default=None),
        megabits=link.megabits,
        delay_ms=link.delay_ms,
        round=round,
        parts={name: max(run.parts[name] for run in runs) for name in runs[0].parts},
        spans=typical_step([run.spans for run in runs]),
    )


def run_job(
    hosts: Sequence[Host],
    script: str,
    job: Mapping[str, Any],
    ranks_per_host: int = 1,
    threads: int = 1,
    **more: Any,
) -> list[Any]:
    """Run a script that calls :func:`do_job` on each host, and return the result of each rank.

    ``more`` are further arguments of :func:`network.running.run_ranks`. A FileNotFoundError means
    that a rank has written no result.
    """
    with shared_folder() as folder:
        file = folder / "job.json"
        file.write_text(json.dumps(job))
        run_ranks(hosts, [script, "--job", str(file)], ranks_per_host, threads, **more)
        files = [folder / f"rank{rank}.json" for rank in range(len(hosts) * ranks_per_host)]
        return [json.loads(file.read_text()) for file in files]


def do_job(file: str, do: Callable[[dict[str, Any]], Any]) -> None:
    """As a rank, do the job of a file, and write the result beside it."""
    # Warnings of torch and Lightning are for users who can change their scripts.
    warnings.simplefilter("ignore")
    result = do(json.loads(Path(file).read_text()))
    Path(file).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
