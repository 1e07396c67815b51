"""The common part of benchmarks on hosts: options, and rounds in which all settings take turns on
all links.
"""

import argparse
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from benchmark.job import Job, Run, of_all_ranks, run_job
from benchmark.tables import describe_machine, link_name
from network.hosts import Link, parse_link, some_hosts, why_not
from network.running import HostFailedError

WORKER = str(Path(__file__).with_name("worker.py"))
# After which a run ends that is too slow for all its steps.
RUN_SECONDS = 3.0


def make_parser(
    description: str, steps: int, batch_size: int, batch: str, output: str, links: str
) -> argparse.ArgumentParser:
    """The options that all have, with a benchmark's own defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds", type=at_least(1), default=3, help="how often everything is measured"
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=steps, help="most steps measured in a run"
    )
    parser.add_argument("--batch-size", type=at_least(1), default=batch_size, help=batch)
    add_links(parser, links)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="parts of names: only these, and the references"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="make no hosts, as where there is no root"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(output), help="folder for tables and plots"
    )
    return parser


def add_links(parser: argparse.ArgumentParser, links: str) -> None:
    """The option ``--links``, whose default is given as on the command line."""
    help = (
        "of so many Mbit/s, or none for no limit, and after a colon the milliseconds that frames"
        " travel each way"
    )
    parser.add_argument(
        "--links", type=parse_link, nargs="+", default=[*map(parse_link, links.split())], help=help
    )


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number from the command line."""

    def whole_number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value}: give {least} or more")
        return value

    return whole_number


def in_order(names: Sequence[str], round: int) -> list[str]:
    """The order of a round: shuffled, always in the same way."""
    return random.Random(round).sample(names, len(names))


class Session:
    """One benchmark on hosts, or on the loopback interface if none can be made.

    Args:
        options: The command line.
        hosts: How many.
        ranks_per_host: Of which each has so many.
        threads: Of each rank.
    """

    def __init__(
        self, options: argparse.Namespace, hosts: int, ranks_per_host: int = 1, threads: int = 1
    ) -> None:
        self._options = options
        self._hosts = hosts
        self._ranks_per_host = ranks_per_host
        self._threads = threads
        reason = "--loopback was given" if options.loopback else why_not()
        self.has_links = reason is None
        self.machine = describe_machine()
        self.notes: list[str] = []
        if reason:
            self.notes.append(
                f"These were processes on the loopback interface, because {reason}. That cannot"
                " show what a network costs: no rate limits it, and bytes are those the strategies"
                " count, not what an interface has sent."
            )
        # Remove the hosts also on SIGTERM, as on ctrl-C.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def chosen(self, names: Sequence[str], *references: str) -> list[str]:
        """The names that ``--only`` asks for, and the references."""
        return [
            name
            for name in names
            if name in references or any(part in name for part in self._options.only)
        ]

    def run(self, job: Job, link: Link, round: int = 0) -> list[Run]:
        """Start the ranks of a job, and read their runs; if a host fails, show why and exit."""
        job = replace(
            job, synchronisations=in_order(job.synchronisations, round), has_links=self.has_links
        )
        with some_hosts(self._hosts, link, self.has_links) as hosts:
            try:
                found = run_job(hosts, WORKER, asdict(job), self._ranks_per_host, self._threads)
            except HostFailedError as error:
                sys.exit(str(error))
        ranks = [[Run(**run) for run in runs] for runs in found]
        return [of_all_ranks(runs, link, round) for runs in zip(*ranks, strict=True)]

    def rounds(self, job: Job) -> list[Run]:
        """Run a job on the links of ``--links``, in another order of its synchronisations in each
        round.
        """
        runs = []
        count = self._options.rounds
        for round, link in product(
            range(count), self._options.links if self.has_links else [Link()]
        ):
            runs += self.run(job, link, round)
            print(
                f"{link_name(link, self.has_links)}: round {round + 1} of {count} is done",
                flush=True,
            )
        return runs
