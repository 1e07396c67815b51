r"""Trains what is hard for a mean of updates beside dense training, as ranks whose data differ.

    python experiments/unlike_ranks.py --only gpt2 classes --ranks 2 4 --seeds 0 1 2 \
        --strategy ddp --strategy dct

The first strategy is the baseline. A strategy is ``ddp``, or ``dct`` with settings of
``lightning_dct.Updates``, as in ``"dct density=0.3"``. A loss is the mean of five validations in
the last tenth of a run. A run whose result is in ``--output`` is not done again, so the same
command continues a stopped one. The results are ``table.csv``, and a table.
"""

import argparse
import csv
import datetime
import json
import re
import socket
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from comparison.table import Figure
from jobs import goes_on
from reporting import write_result
from unlike.cases import CASES
from unlike.loop import train


class Run(NamedTuple):
    """One training."""

    case: str
    ranks: int
    strategy: str
    seed: int
    steps: int | None

    def file(self, folder: Path) -> Path:
        """Where its result is."""
        strategy = re.sub(r"[^\w.]+", "-", self.strategy)
        steps = "" if self.steps is None else f"-{self.steps}-steps"
        return folder / self.case / f"{self.ranks}-ranks-{strategy}-{self.seed}{steps}.json"


@goes_on
def main(words: Sequence[str] | None = None) -> int:
    """Do the runs that are missing, and print and write the table."""
    given = make_parser().parse_args(words)
    runs = [
        Run(case, ranks, strategy, seed, given.steps)
        for seed in given.seeds
        for case in given.only
        for ranks in given.ranks
        for strategy in given.strategy
    ]
    for ranks in given.ranks:
        missing = [
            run for run in runs if run.ranks == ranks and not run.file(given.output).exists()
        ]
        if missing:
            mp.spawn(_rank, (ranks, _free_port(), missing, given.output), nprocs=ranks)
    results = {run: json.loads(run.file(given.output).read_text()) for run in runs}
    show(results, given.strategy[0])
    with (given.output / "table.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow([*Run._fields, "loss", "ratio"])
        rows.writerows([*run, result["loss"], result["ratio"]] for run, result in results.items())
    return 0


def _rank(rank: int, ranks: int, port: int, runs: Sequence[Run], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hour = datetime.timedelta(hours=1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", hour, world_size=ranks, rank=rank)
    for run in runs:
        result = train(run.case, run.strategy, run.seed, run.steps)
        if rank == 0:
            write_result(run.file(folder), result)
            print(
                f"{run}: {result['loss']:.4f}, {result['ratio']:.1f}x", file=sys.stderr, flush=True
            )
        dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def show(results: dict[Run, dict[str, Any]], baseline: str) -> None:
    """Print a row for each case, number of ranks and strategy."""
    table = Table("case", "ranks", "strategy", "loss", f"against {baseline}", "fewer bytes")
    for case, ranks, strategy in dict.fromkeys(
        (run.case, run.ranks, run.strategy) for run in results
    ):
        found = {
            run: result for run, result in results.items() if run[:3] == (case, ranks, strategy)
        }
        shares = [
            result["loss"] / results[run._replace(strategy=baseline)]["loss"] - 1
            for run, result in found.items()
        ]
        loss = statistics.fmean(result["loss"] for result in found.values())
        ratio = statistics.fmean(result["ratio"] for result in found.values())
        against = Figure.of(shares)
        assert against is not None
        table.add_row(
            case, str(ranks), strategy, f"{loss:.4f}", against.write("{:+.1%}"), f"{ratio:.1f}x"
        )
    Console().print(table)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each case's own number")
    parser.add_argument(
        "--strategy", action="append", required=True, help='as in "dct density=0.3"'
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/unlike_ranks"), help="folder of the results"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
