"""Times a recommender's step under each exchange of its tables: ``sudo python recommender.py``.

A DLRM with 26 tables (Zipf ids) trains on hosts made of network namespaces, as in ``steps.py``: once with whole tables
on every rank, with dense all-to-all exchanges of rows in several formats, with TorchRec where it can be imported, and
with changes. All take turns within a round, and ratios are taken within it. kB are a host's; ids, rows, evicted (the
residuals of rows that left a cache) and gradients are the tables' messages, *all* is what the interface has sent,
headers left out: the networks' gradients too. *ms exchanging* is what the tables' exchange computes in a step, *CPU ms*
all that a rank's threads do.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from json import dumps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `benchmark` is

import matplotlib.pyplot as plt

from benchmark.job import Job
from benchmark.machine import describe_machine, warn_if_busy
from benchmark.plots import draw_bars, save
from benchmark.recommenders import DENSE, MESSAGES, NUM_TABLES, RECOMMENDERS
from benchmark.results import MILLISECONDS, Figure, Run, read_runs
from benchmark.steps import LOOPBACK, PORT, RUN_SECONDS, WORKER, free_port, in_order, some_hosts
from benchmark.tables import link_name, publish, with_range
from network.hosts import give_to_invoking_user, why_not
from network.running import run_on, torchrun

WARM_UP_STEPS = 3
_TIMES = ("exchange_seconds", "cpu_seconds")


def measure(options: argparse.Namespace, names: list[str], has_links: bool) -> list[Run]:
    """All names at one size: each round and rate, in another order each time."""
    runs: list[Run] = []
    for round, rate in product(range(options.rounds), options.rates if has_links else [None]):
        with tempfile.TemporaryDirectory() as folder, some_hosts(options.hosts, rate, has_links) as hosts:
            os.chmod(folder, 0o777)  # the hosts' processes may be another user's
            job = Job(
                synchronisations=in_order(names, round),
                warm_up_steps=WARM_UP_STEPS,
                steps=options.steps,
                seconds=RUN_SECONDS,
                score=False,
                batch_size=options.batch_size,
                width=options.dim,
                has_links=has_links,
                folder=folder,
                table_rows=options.table_rows,
            )
            port = PORT if has_links else free_port()
            commands = torchrun(options.hosts, hosts[0].address, port, [str(WORKER), str(job.write())])
            run_on(hosts, commands, {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}, lambda line: None)
            runs += read_runs(Path(folder), options.hosts, rate, round)
        print(f"{link_name(rate, has_links)}: round {round + 1} of {options.rounds} is done", flush=True)
    return runs


def tabulate(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and a row for each name."""
    rates = list(dict.fromkeys(run.megabits for run in runs))
    has_links = runs[0].interface_bytes is not None
    heads = ["exchange of tables"]
    heads += [head for rate in rates for head in (f"ms a step, {link_name(rate, has_links)}", "times fp32")]
    heads += [f"kB {name}" for name in MESSAGES] + ["kB all", "ms exchanging", "CPU ms"]
    rows = []
    for name in names:
        cells = [name]
        for rate in rates:
            here = [run for run in runs if run.megabits == rate]
            dense = {run.round: run.step_ms for run in here if run.synchronisation == DENSE}
            mine = [run for run in here if run.synchronisation == name]
            ratios = [run.step_ms / dense[run.round] for run in mine]
            cells += [with_range(Figure.of(run.step_ms for run in mine), "{:.0f}")]
            cells += [with_range(Figure.of(ratios), "{:.2f}")]
        mine = [run for run in runs if run.synchronisation == name and run.megabits == rates[0]]
        columns = [[run.parts[part] / run.steps / 1e3 for run in mine] for part in MESSAGES]
        columns += [[run.sent_bytes / 1e3 for run in mine if has_links]]
        columns += [[MILLISECONDS * run.parts[part] / run.steps for run in mine] for part in _TIMES]
        for figure in map(Figure.of, columns):
            cells.append(f"{figure.median:,.1f}" if figure and figure.median else "-")
        rows.append(cells)
    return heads, rows


def draw(file: Path, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Bars: the time of a step at each rate."""
    rates = list(dict.fromkeys(run.megabits for run in runs))
    figure, axes = plt.subplots(
        1, len(rates), figsize=(5 * len(rates), 0.4 * len(names) + 1.5), sharey=True, squeeze=False
    )
    for rate, axis in zip(rates, axes[0], strict=True):
        times = {name: [r.step_ms for r in runs if (r.synchronisation, r.megabits) == (name, rate)] for name in names}
        draw_bars(axis, names, [Figure.of(times[name]) for name in names])
        axis.set_xlabel(f"ms a step, {link_name(rate, runs[0].interface_bytes is not None)}")
    save(figure, file)


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts, one rank on each")
    parser.add_argument("--rates", type=float, nargs="+", default=[10000, 1000, 100], help="of the links, in Mbit/s")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--steps", type=int, default=20, help="most steps measured in a run")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of data a rank")
    parser.add_argument("--dim", type=int, default=64, help="entries a row of the tables")
    parser.add_argument("--table-rows", type=int, default=400_000, help=f"rows of each of the {NUM_TABLES} tables")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names: only these, and dense fp32 rows")
    parser.add_argument("--loopback", action="store_true", help="make no hosts, as where there is no root")
    parser.add_argument("--output", type=Path, default=Path("outputs/recommender"), help="folder for table and plot")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write it and the plot."""
    options = parse_options(words)
    names = [name for name in RECOMMENDERS if name == DENSE or any(part in name for part in options.only)]
    reason = "--loopback was given" if options.loopback else why_not()
    machine = describe_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = measure(options, names, reason is None)
    heads, rows = tabulate(runs, names)
    title = f"One step of a DLRM, {options.hosts} hosts, {options.batch_size} rows a rank, dim {options.dim}"
    notes = [
        f"{NUM_TABLES} tables of {options.table_rows:,} rows, one thread a rank, {machine['cores']} cores"
        f" ({machine['processor']}), torch {machine['torch']}; medians (and ranges) over {options.rounds} rounds.",
        *([LOOPBACK.format(reason=reason)] if reason else []),
        *([busy] if (busy := warn_if_busy(machine["load"])) else []),
    ]
    folder, stem = options.output, f"hosts{options.hosts}-batch{options.batch_size}-dim{options.dim}"
    publish(folder / f"{stem}.md", title, heads, rows, notes)
    about = {"machine": machine, "notes": notes, "runs": [asdict(run) for run in runs]}
    (folder / f"{stem}.json").write_text(dumps(about, indent=1) + "\n")
    draw(folder / f"{stem}.png", runs, names)
    for path in (folder, *folder.glob(f"{stem}.*")):
        give_to_invoking_user(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
