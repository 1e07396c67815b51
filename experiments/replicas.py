r"""Trains an experiment as many replicas in one process, without a network, and compares losses.

    python experiments/replicas.py experiment=lm --ranks 2 4 8 --steps 1000 --rates 0.005 0.01 \
        --seeds 0 1 \
        --strategy ddp --strategy dct --strategy "dct strategy.local_steps=4 strategy.density=0.1"

Each replica trains as a rank of ``strategy=dct`` would, on the same batches, and exchanges by the
package's own engine over a process group in memory. One replica runs at a time. So losses and bytes
are those of real ranks, and times are not. On a CPU, ``diloco``, ``local_sgd`` and ``sparse_loco`` train so,
too; of these the mean of all replicas is validated. A row is a number of ranks, a number of steps,
a strategy and a rate. Dense training, ``ddp``, comes first and tries all rates; the others take the
rate that is best for it. A loss is the mean of 10 validations in the last twentieth of a run. A run
that is in ``--output`` is not done again, so the same command continues a stopped one. The results
are ``table.txt`` and ``replicas.json``.

On a GPU (``--device cuda``) all trainings of one length run side by side, as CUDA graphs.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import queue
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from comparison.runs import Strategy, require_distinct
from comparison.table import Figure
from jobs import goes_on
from lightning_dct import DCTConfig
from lightning_dct.law import expected_loss
from replicated.side_by_side import train_side_by_side
from replicated.training import DENSE, Job, train
from reporting import write_result

RATE = "model.learning_rate"
_NOTHING = "-"
_POLL_S = 0.2


@dataclass(frozen=True)
class Row:
    """Trainings that differ in their seed and start only; ``results`` are by these."""

    ranks: int
    steps: int
    strategy: str
    rate: float | None
    results: dict[str, dict[str, Any]]

    @property
    def loss(self) -> float:
        """The mean over seeds and starts."""
        return statistics.fmean(result["loss"] for result in self.results.values())

    def against(self, other: "Row") -> Figure | None:
        """How much more this loses than another with the same seeds and starts, as a share of
        that.
        """
        both = self.results.keys() & other.results.keys()
        return Figure.of(self.results[one]["loss"] / other.results[one]["loss"] - 1 for one in both)


class Runs:
    """Does jobs that are not done yet, several at a time, and shows how far they are."""

    def __init__(self, folder: Path, jobs: int, threads: int) -> None:
        self.folder = folder
        self.problems = list[str]()
        self._jobs = jobs
        self._threads = threads
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, jobs: Sequence[Job]) -> list[dict[str, Any] | None]:
        """The result of each job; None for one that failed, which ``problems`` names."""
        missing = [job for job in dict.fromkeys(jobs) if not self.file_of(job).exists()]
        if missing:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=Console(stderr=True)) as progress:
                bars = [progress.add_task(_title(job), total=job.steps) for job in missing]

                def report(number: int, step: int, loss: float) -> None:
                    progress.update(
                        bars[number],
                        completed=step,
                        description=f"{_title(missing[number])} {loss:.4f}",
                    )

                self._do(missing, report)
        return [self._result(job) for job in jobs]

    def _result(self, job: Job) -> dict[str, Any] | None:
        if not self.file_of(job).exists():
            return None
        result: dict[str, Any] = json.loads(self.file_of(job).read_text())
        if result["loss"] is None:
            self.problems.append(f"{_title(job)}: the loss is not finite")
            return None
        return result

    def _do(self, jobs: Sequence[Job], report: Callable[[int, int, float], None]) -> None:
        if jobs[0].device == "cuda":
            self._do_side_by_side(jobs, report)
            return
        if self._jobs == 1:
            for number, job in enumerate(jobs):
                try:
                    _work(job, self.file_of(job), self._threads, partial(report, number))
                except Exception as error:
                    self._note(job, error)
            return
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, ProcessPoolExecutor(self._jobs, context) as pool:
            steps = manager.Queue()
            running = list[Future[None]]()
            for number, job in enumerate(jobs):
                put = partial(_put, steps, number)
                running.append(pool.submit(_work, job, self.file_of(job), self._threads, put))
            while not all(task.done() for task in running) or not steps.empty():
                with contextlib.suppress(queue.Empty):
                    report(*steps.get(timeout=_POLL_S))
        for task, job in zip(running, jobs, strict=True):
            if (error := task.exception()) is not None:
                self._note(job, error)

    def _do_side_by_side(
        self, jobs: Sequence[Job], report: Callable[[int, int, float], None]
    ) -> None:
        torch.set_float32_matmul_precision("high")

        def report_all(step: int, losses: Sequence[float]) -> None:
            for number, loss in enumerate(losses or len(jobs) * [math.nan]):
                report(number, step, loss)

        for job, figures in zip(jobs, train_side_by_side(jobs, report_all), strict=True):
            write_result(self.file_of(job), {"job": asdict(job), **figures})

    def _note(self, job: Job, error: BaseException) -> None:
        self.problems.append(f"{_title(job)}: {type(error).__name__}: {error}")

    def file_of(self, job: Job) -> Path:
        """Where the result of a job is."""
        digest = hashlib.sha256(json.dumps(asdict(job)).encode()).hexdigest()[:10]
        return self.folder / f"{job.ranks}-ranks-{job.steps}-steps-{digest}.json"


def _work(job: Job, file: Path, threads: int, report: Callable[[int, float], None]) -> None:
    """Do a job, in a process of the pool or in this one."""
    torch.set_num_threads(threads)
    write_result(file, {"job": asdict(job), **train(job, report)})


def _put(steps: Any, number: int, step: int, loss: float) -> None:
    steps.put((number, step, loss))


def _title(job: Job) -> str:
    own = [word.removeprefix("strategy.").removeprefix("model.") for word in job.overrides]
    # What makes a job differ from others comes last.
    words = " ".join(word for word in own if "experiment=" not in word) + (
        f" start={job.start}" if job.start else ""
    )
    return f"{job.ranks} ranks, {job.steps:,} steps, {words[-70:]}"


def rows_of(arguments: argparse.Namespace, runs: Runs) -> list[Row]:
    """All rows: for each length and number of ranks the dense ones by rate, then the others."""
    dense, *others = map(Strategy.parse, arguments.strategy)
    more = {"device": arguments.device, "val_rows": arguments.val_rows}
    kinds = [(steps, ranks) for steps in arguments.steps for ranks in arguments.ranks]
    Wanted = tuple[int, Strategy, float | None]

    def rows(steps: int, wanted: Sequence[Wanted]) -> list[Row]:
        starts = range(arguments.starts)
        every = [
            (one, seed, start) for one in wanted for seed in arguments.seeds for start in starts
        ]
        jobs = []
        for (ranks, strategy, rate), seed, start in every:
            own = [*arguments.overrides, *strategy.overrides, f"seed={seed}"]
            own += [] if rate is None else [f"{RATE}={rate}"]
            jobs.append(Job(tuple(own), ranks, steps, **more, start=start))
        results: dict[tuple[int, str, float | None], dict[str, dict[str, Any]]] = {}
        for ((ranks, strategy, rate), seed, start), result in zip(every, runs(jobs), strict=True):
            if result is not None:
                results.setdefault((ranks, strategy.label, rate), {})[
                    f"seed {seed} start {start}"
                ] = result
        return [
            Row(ranks, steps, label, rate, found) for (ranks, label, rate), found in results.items()
        ]

    found: list[Row] = []
    for steps in arguments.steps:
        first: list[Wanted] = [
            (ranks, dense, rate) for ranks in arguments.ranks for rate in arguments.rates
        ]
        if arguments.all_rates:
            first += [
                (ranks, one, rate)
                for ranks in arguments.ranks
                for one in others
                for rate in arguments.rates
            ]
        elif arguments.other_rates:
            given = zip(arguments.ranks, arguments.other_rates, strict=True)
            first += [(ranks, one, rate) for ranks, rate in given for one in others]
        made = rows(steps, first)
        if not (arguments.all_rates or arguments.other_rates):
            best = {ranks: [row for row in made if row.ranks == ranks] for ranks in arguments.ranks}
            rates = {
                ranks: min(own, key=lambda row: row.loss).rate for ranks, own in best.items() if own
            }
            made += rows(
                steps, [(ranks, one, rate) for ranks, rate in rates.items() for one in others]
            )
        found += made
    return sorted(found, key=lambda row: kinds.index((row.steps, row.ranks)))


def tabulate(rows: Sequence[Row]) -> Table:
    """The table of all rows, against the best dense row with as many ranks and steps."""
    heads = (
        "ranks",
        "steps",
        "strategy",
        "rate",
        "loss",
        "against best dense",
        "same rate",
        "law",
        "fewer bytes",
        "ms",
    )
    # Folded, because a figure that is cut off says something else.
    table = Table(*(Column(head, overflow="fold") for head in heads))
    for row in rows:
        group = [other for other in rows if (other.ranks, other.steps) == (row.ranks, row.steps)]
        dense = [other for other in group if other.strategy == group[0].strategy]
        best = min(dense, key=lambda other: other.loss)
        same = [other for other in dense if other.rate == row.rate and other is not row]
        first = next(iter(row.results.values()))
        law = _NOTHING
        if first["settings"] is not None:
            law = f"{expected_loss(DCTConfig(**first['settings']), row.ranks, row.steps):+.1f}%"
        apart = [
            _NOTHING if one is None else one.write("{:+.2%}")
            for one in (
                None if row is best else row.against(best),
                row.against(same[0]) if same else None,
            )
        ]
        cells = [
            str(row.ranks),
            f"{row.steps:,}",
            row.strategy,
            _NOTHING if row.rate is None else f"{row.rate:g}",
        ]
        cells += [f"{row.loss:.4f}", *apart, law]
        ratio, time = (
            statistics.fmean(result[name] for result in row.results.values())
            for name in ("ratio", "milliseconds_per_step")
        )
        table.add_row(*cells, f"{ratio:,.1f}x", f"{time:,.1f}", end_section=row is group[-1])
    return table


@goes_on
def main(words: Sequence[str] | None = None) -> int:
    """Train what is not there yet, then print and write the table; 0 when every run is there."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", help="what all runs share, as in experiment=lm model.width=64"
    )
    parser.add_argument(
        "--strategy",
        action="append",
        required=True,
        help='ddp first, then as in "dct strategy.density=0.1"',
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, nargs="+", default=[1000])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[None], help=f"{RATE} (default: the experiment's)"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--all-rates", action="store_true", help="all strategies try all rates")
    others.add_argument(
        "--other-rates",
        type=float,
        nargs="+",
        help="of all but ddp, for each of --ranks (default: the best of ddp)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="runs of a seed, from almost the same weights (default: 1)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch in each training (default: 1)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--val-rows", type=int, default=512, help="validation rows of a check (default: 512)"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/replicas"))
    arguments = parser.parse_intermixed_args(words)
    varied = {"seed": "--seeds", "trainer.max_steps": "--steps", "trainer.devices": "--ranks"}
    try:
        strategies = [Strategy.parse(text) for text in arguments.strategy]
        require_distinct(
            strategies,
            arguments.overrides,
            varied | ({RATE: "--rates"} if arguments.rates != [None] else {}),
        )
    except ValueError as error:
        parser.error(str(error))
    if strategies[0].overrides[0] != DENSE:
        parser.error("the first --strategy must be ddp, which the others are compared with")
    if min(arguments.ranks) < 2 or min(*arguments.steps, arguments.starts) < 1:
        parser.error("--ranks takes numbers from 2 on, --steps and --starts from 1 on")
    if arguments.other_rates and len(arguments.other_rates) != len(arguments.ranks):
        parser.error("--other-rates takes as many rates as --ranks has numbers")
    runs = Runs(arguments.output, arguments.jobs, arguments.threads)
    rows = rows_of(arguments, runs)
    if rows:
        noise = [
            result["noise"] / result["loss"]
            for row in rows
            for result in row.results.values()
            if result["noise"]
        ]
        starts = f", {arguments.starts} starts each" if arguments.starts > 1 else ""
        notes = [f"Seeds {arguments.seeds}{starts}; ± is the standard deviation over them."]
        if noise:
            notes.append(
                "The validations of a run's last twentieth deviate by"
                f" {statistics.fmean(noise):.2%} from their mean."
            )
        with (arguments.output / "table.txt").open("w") as file:
            for console in (Console(), Console(file=file, width=200)):
                console.print(tabulate(rows), *notes, sep="\n")
            file.writelines(f"{problem}\n" for problem in runs.problems)
        write_result(arguments.output / "replicas.json", {"rows": [asdict(row) for row in rows]})
    for problem in runs.problems:
        print(problem, file=sys.stderr)
    return 1 if runs.problems else 0


if __name__ == "__main__":
    sys.exit(main())
