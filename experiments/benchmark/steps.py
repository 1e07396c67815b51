"""Times a training step under each synchronisation on links of given rates.

    sudo python experiments/benchmark/steps.py

Makes hosts out of network namespaces (Linux, as root) whose links carry 1 Gbit/s, then 100 Mbit/s;
starts torchrun on each; and trains a perceptron of 9.4 million parameters with Lightning's Trainer
under every synchronisation in turn. That is repeated for some rounds, each in another order. All
ratios are taken within a round. One more round, on links without a limit, trains for longer and
computes the loss on held-out text.

*No synchronisation* is the bare module, each rank for itself (see
``rivals.hooks.CountedDDPStrategy``). Bytes are those that a host's interface has sent, less the
headers of packets. Time spent compressing contains no waiting for the network, except PowerSGD's.
Thresholds of DCT are selected in the warm-up; a note below the table has the time of that.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

# Experiments/, where `benchmark` is.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.job import MILLISECONDS, Job, Run
from benchmark.plots import plot_bars, plot_losses
from benchmark.session import RUN_SECONDS, Session, at_least, make_parser
from benchmark.synchronisations import DDP, NOTHING, SYNCHRONISATIONS
from benchmark.tables import (
    Column,
    columns_by_link,
    faster_than,
    figure_of,
    publish,
    step_ms,
    tabulate,
    times,
)
from network.hosts import Link

WARM_UP_STEPS = 4


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """The columns of the table: three for each link, and those of bytes, which the rate does not
    change.
    """
    first = runs[0].link
    compared = (
        ("times none", times(NOTHING), "{:.2f}x"),
        ("faster than DDP", faster_than(DDP), "{:.1f}x"),
    )
    return [
        *columns_by_link(runs, *compared, has_range=False),
        Column("kB a step", lambda run, others: run.sent_bytes / 1e3, "{:,.1f}", first),
        Column("off by", off_by, "{:+.1%}", first),
        Column("fewer than DDP", fewer_than_ddp, "{:,.1f}x", first),
        Column("ms compressing", compressing_ms, "{:.1f}", first),
    ]


def off_by(run: Run, others: Mapping[str, Run]) -> float | None:
    """Bytes at the interface over those counted, less 1."""
    return (
        run.interface_bytes / run.counted_bytes - 1
        if run.interface_bytes and run.counted_bytes
        else None
    )


def fewer_than_ddp(run: Run, others: Mapping[str, Run]) -> float | None:
    """Bytes of DDP in fp32 over the bytes of this one."""
    return others[DDP].sent_bytes / run.sent_bytes if run.counted_bytes and DDP in others else None


def compressing_ms(run: Run, others: Mapping[str, Run]) -> float | None:
    """Milliseconds spent compressing, a step."""
    return None if run.synchronisation == NOTHING else run.compressing_ms


def notes_on(
    options: argparse.Namespace, session: Session, threads: int, runs: Sequence[Run]
) -> list[str]:
    """Notes for the reader of the table."""
    machine = session.machine
    first = runs[0].link
    notes = [
        f"{options.hosts * options.ranks_per_host} ranks with {threads} thread(s) each, on"
        f" {machine['cores']} cores of one machine ({machine['processor']}), torch"
        f" {machine['torch']}; {options.batch_size} rows a rank; medians (and ranges) over"
        f" {options.rounds} rounds; up to {options.steps} steps a run, fewer where they are slow."
    ]
    selecting = {
        name: figure_of(runs, name, first, lambda run, others: MILLISECONDS * run.selecting_seconds)
        for name in names_in(runs)
        if name.startswith("DCT")
    }
    if selecting:
        listed = ", ".join(
            f"{figure.median:.0f} ms ({name})" for name, figure in selecting.items() if figure
        )
        notes.append(
            "The first exchange of a run selects all thresholds, and so does one after each"
            f" `refresh_every` (1,000) steps: {listed}. No such exchange is among those measured."
        )
    if options.quality_steps:
        notes.append(
            f"Loss: nats a byte on held-out text after {WARM_UP_STEPS + options.quality_steps}"
            " steps of plain gradient descent from the same start; without synchronisation the"
            " mean over replicas that differ by then."
        )
    return [
        *notes,
        "PowerSGD's time spent compressing includes the waiting for its collectives.",
        *session.notes,
    ]


def names_in(runs: Sequence[Run]) -> list[str]:
    """The synchronisations that occur, in the order of the table."""
    return [name for name in SYNCHRONISATIONS if any(run.synchronisation == name for run in runs)]


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = make_parser(
        __doc__.splitlines()[0], 30, 128, "rows a rank", "outputs/benchmark", "1000 100"
    )
    parser.add_argument("--hosts", type=at_least(2), default=2, help="how many hosts")
    parser.add_argument(
        "--ranks-per-host", type=at_least(1), default=1, help="of which each has so many"
    )
    parser.add_argument(
        "--quality-steps", type=int, default=100, help="steps of the scored round; 0 leaves it out"
    )
    parser.add_argument(
        "--width",
        type=at_least(1),
        default=2048,
        help="of hidden layers; 2048 makes 9.4 million parameters",
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write it and the plots."""
    options = parse_options(words)
    threads = max(1, (os.cpu_count() or 1) // (options.hosts * options.ranks_per_host))
    session = Session(options, options.hosts, options.ranks_per_host, threads)
    names = session.chosen(list(SYNCHRONISATIONS), NOTHING, DDP)
    job = Job(
        names, WARM_UP_STEPS, options.steps, RUN_SECONDS, False, options.batch_size, options.width
    )
    scored: list[Run] = []
    if options.quality_steps:
        longer = replace(job, steps=options.quality_steps, seconds=None, score=True)
        scored = sorted(
            session.run(longer, Link()), key=lambda run: names.index(run.synchronisation)
        )
        print("Losses on held-out text: done", flush=True)
    runs = session.rounds(job)

    columns = columns_of(runs)
    names = names_in(runs)
    folder = options.output
    rows = tabulate("synchronisation", runs, names, columns)
    if scored:
        scores = {
            "synchronisation": "loss",
            **{run.synchronisation: f"{run.score:.3f}" for run in scored},
        }
        rows = [[*row, scores[row[0]]] for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    sent = f"kB a step and host, {'at the interface' if session.has_links else 'counted'}"
    axes = [column for column in columns if column.take is step_ms]
    bytes_axis = next(column for column in columns if column.head == "kB a step")
    plot_bars(
        folder / "steps.png", runs, names, [*axes, replace(bytes_axis, head=sent, scale="log")]
    )
    if scored:
        plot_losses(folder / "losses.png", runs, scored)
    about = {"options": {**vars(options), "output": str(folder)}}
    about |= {"runs": [asdict(run) for run in runs], "scored": [asdict(run) for run in scored]}
    notes = notes_on(options, session, threads, runs)
    title = f"One training step, {options.hosts} hosts"
    publish(folder / "steps.md", title, rows, notes, session.machine, **about)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
