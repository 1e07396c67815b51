"""Times a training step under each synchronisation on links of given rates: ``sudo python steps.py``.

Makes hosts out of network namespaces (Linux, as root) whose links carry 1 Gbit/s, then 100 Mbit/s; starts torchrun on
each; and trains a perceptron of 9.4 million parameters with Lightning's Trainer under every synchronisation in turn.
That is repeated for some rounds, each in another order. All ratios are taken within a round. One more round, on links
without a limit, trains for longer and tells the loss on held-out text.

*No synchronisation* is the bare module, each rank for itself (see ``peers.CountedDDPStrategy``). Bytes are those that
a host's interface has sent, less the headers of packets. Time spent compressing has no waiting for the network in it,
except PowerSGD's. Thresholds of DCT are selected in the warm-up; what that takes is told below the table.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `benchmark` is

from benchmark.job import Job
from benchmark.machine import describe_machine, warn_if_busy
from benchmark.plots import plot_losses, plot_steps
from benchmark.results import Run, names_in, read_runs, summarise, write_report
from benchmark.synchronisations import DDP, NOTHING, SYNCHRONISATIONS
from benchmark.tables import link_name, publish, tabulate_steps
from network.hosts import Host, give_to_invoking_user, make_hosts, why_not
from network.loopback import LoopbackHost
from network.running import HostFailedError, run_on, torchrun

WORKER = Path(__file__).with_name("worker.py")
PORT = 29400
WARM_UP_STEPS = 4
# After which a run ends that is too slow for all its steps.
RUN_SECONDS = 3.0
LOOPBACK = (
    "These were processes on the loopback interface, because {reason}. That cannot show what a network costs: no rate"
    " limits it, and bytes are those the strategies count, not what an interface has sent."
)


def in_order(names: Sequence[str], round: int) -> list[str]:
    """The order of a round: shuffled, the same whenever it is asked for."""
    return random.Random(round).sample(names, len(names))


@contextmanager
def some_hosts(
    count: int, megabits: float | None, has_links: bool, delay: float = 0.0
) -> Iterator[list[Host] | list[LoopbackHost]]:
    """Hosts with links, or what stands in for them."""
    if has_links:
        with make_hosts(count, megabits, delay) as hosts:
            yield hosts
    else:
        yield [LoopbackHost() for _ in range(count)]


class Benchmark:
    """Runs jobs, one after the other, and keeps what they have shown.

    Args:
        options: The command line.
        names: The synchronisations.
        has_links: Whether hosts can be made.
    """

    def __init__(self, options: argparse.Namespace, names: list[str], has_links: bool) -> None:
        self._options, self._names, self._has_links = options, names, has_links
        self.ranks = options.hosts * options.ranks_per_host
        self.threads = max(1, (os.cpu_count() or 1) // self.ranks)
        self.runs: list[Run] = []
        self.scored: list[Run] = []

    def run(self) -> None:
        """Everything, beginning with the round that is scored."""
        options = self._options
        if options.quality_steps:
            self.scored = self._round(None, 0, options.quality_steps, True)
            print("Losses on held-out text: done", flush=True)
        for round in range(options.rounds):
            for rate in options.rates if self._has_links else [None]:
                self.runs += self._round(rate, round, options.steps, False)
                print(f"{link_name(rate, self._has_links)}: round {round + 1} of {options.rounds} is done", flush=True)

    def _round(self, megabits: float | None, round: int, steps: int, score: bool) -> list[Run]:
        count = self._options.hosts
        environment = {"OMP_NUM_THREADS": str(self.threads), "NUMBA_NUM_THREADS": str(self.threads)}
        with (
            tempfile.TemporaryDirectory() as folder,
            some_hosts(count, megabits, self._has_links, self._options.delay / 1000) as hosts,
        ):
            os.chmod(folder, 0o777)  # the hosts' processes may be another user's
            job = Job(
                synchronisations=in_order(self._names, round),
                warm_up_steps=WARM_UP_STEPS,
                steps=steps,
                seconds=None if score else RUN_SECONDS,
                score=score,
                batch_size=self._options.batch_size,
                width=self._options.width,
                has_links=self._has_links,
                folder=folder,
            )
            words = [str(WORKER), str(job.write())]
            port = PORT if self._has_links else free_port()
            commands = torchrun(count, hosts[0].address, port, words, self._options.ranks_per_host)
            run_on(hosts, commands, environment, lambda line: None)
            return read_runs(Path(folder), self.ranks, megabits, round)


def free_port() -> int:
    """A TCP port nobody listens on, below all that kernels give away: torchrun takes seconds to bind it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 15_000)
        with socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def notes_on(
    benchmark: Benchmark, options: argparse.Namespace, machine: dict[str, Any], reason: str | None
) -> list[str]:
    """What a reader of the table has to know.

    Args:
        benchmark: When it is over.
        options: The command line.
        machine: Of :func:`describe_machine`.
        reason: Why no hosts could be made, if so.
    """
    notes = [
        f"{benchmark.ranks} ranks with {benchmark.threads} thread(s) each, on {machine['cores']} cores of one machine"
        f" ({machine['processor']}), torch {machine['torch']}; {options.batch_size} rows a rank; medians (and ranges)"
        f" over {options.rounds} rounds; up to {options.steps} steps a run, fewer where they are slow.",
    ]
    notes += [f"Frames travel {options.delay:g} ms each way."] if options.delay else []
    first_rate = [run for run in benchmark.runs if run.megabits == benchmark.runs[0].megabits]
    selecting = {name: summarise(first_rate, name).selecting_ms for name in names_in(first_rate) if name[:3] == "DCT"}
    if selecting:
        told = ", ".join(f"{figure.median:.0f} ms ({name})" for name, figure in selecting.items() if figure)
        notes.append(
            f"The first exchange of a run selects all thresholds, and so does one after each `refresh_every` (1,000)"
            f" steps: {told}. No such exchange is among those measured."
        )
    if benchmark.scored:
        notes.append(
            f"Loss: nats a byte on held-out text after {WARM_UP_STEPS + options.quality_steps} steps of plain gradient"
            " descent from the same start; without synchronisation the mean over replicas that have parted."
        )
    notes.append("PowerSGD's time spent compressing has the waiting for its collectives in it.")
    notes += [LOOPBACK.format(reason=reason)] if reason else []
    busy = warn_if_busy(machine["load"])
    return notes + ([busy] if busy else [])


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="of which each has so many")
    parser.add_argument("--rates", type=float, nargs="+", default=[1000, 100], help="of the links, in Mbit/s")
    parser.add_argument("--delay", type=float, default=0.0, help="that frames travel each way, in milliseconds")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--steps", type=int, default=30, help="most steps measured in a run")
    parser.add_argument("--quality-steps", type=int, default=100, help="steps of the scored round; 0 leaves it out")
    parser.add_argument("--batch-size", type=int, default=128, help="rows a rank")
    parser.add_argument("--width", type=int, default=2048, help="of hidden layers; 2048 makes 9.4 million parameters")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names: only these, and what they are held to")
    parser.add_argument("--loopback", action="store_true", help="make no hosts, as where there is no root")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="folder for tables and plots")
    options = parser.parse_args(words)
    for name in ("hosts", "ranks_per_host", "rounds", "steps", "batch_size", "width"):
        if getattr(options, name) < 1 + (name == "hosts"):
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give more")
    if min(options.rates) <= 0:
        parser.error(f"--rates {min(options.rates)}: must be above 0")
    return options


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write it and the plots; 1 when a host fails."""
    options = parse_options(words)
    names = [name for name in SYNCHRONISATIONS if name in (NOTHING, DDP) or any(part in name for part in options.only)]
    reason = "--loopback was given" if options.loopback else why_not()
    machine = describe_machine()
    # Hosts are to be removed when this is told to stop, as after ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    benchmark = Benchmark(options, names, has_links=reason is None)
    try:
        benchmark.run()
    except HostFailedError as error:
        print(error, file=sys.stderr)
        return 1
    title = f"One training step, {options.hosts} hosts"
    heads, rows = tabulate_steps(benchmark.runs, benchmark.scored)
    notes = notes_on(benchmark, options, machine, reason)
    folder = options.output
    publish(folder / "steps.md", title, heads, rows, notes)
    about = {"machine": machine, "notes": notes, "options": {**vars(options), "output": str(folder)}}
    write_report(folder / "steps.json", about, benchmark.runs, benchmark.scored)
    plot_steps(folder / "steps.png", benchmark.runs)
    if benchmark.scored:
        plot_losses(folder / "losses.png", benchmark.runs, benchmark.scored)
    for path in (folder, *folder.glob("steps.*"), *folder.glob("losses.png")):
        give_to_invoking_user(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
