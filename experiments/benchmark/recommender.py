"""Times a recommender's step under each exchange of its tables: ``sudo python recommender.py``.

A DLRM with 26 tables (Zipf ids) trains on hosts made of network namespaces, as in ``steps.py``:
once with whole tables on every rank, with dense all-to-all exchanges of rows in several formats,
with TorchRec where it can be imported, and with changes. All take turns within a round, and ratios
are taken within it. kB are a host's; ids, rows, evicted (the residuals of rows that left a cache)
and gradients are the tables' messages, *all* is what the interface has sent, headers left out: the
networks' gradients too. *ms exchanging* is the computing of the tables' exchange in a step, *CPU
ms* that of all threads of a rank.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

# Experiments/, where `benchmark` is.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.job import MILLISECONDS, Job, Run
from benchmark.recommenders import DENSE, MESSAGES, NUM_TABLES, RECOMMENDERS
from benchmark.session import RUN_SECONDS, Session, at_least, make_parser
from benchmark.tables import Column, Take, columns_by_link, publish, tabulate, times

WARM_UP_STEPS = 3


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """The columns of the table: two for each link, and those of bytes and computing."""
    first = runs[0].link
    return [
        *columns_by_link(runs, ("times fp32", times(DENSE), "{:.2f}")),
        *(Column(f"kB {name}", part(name, 1e-3), "{:,.1f}", first) for name in MESSAGES),
        Column("kB all", sent_kb, "{:,.1f}", first),
        Column("ms exchanging", part("exchange_seconds", MILLISECONDS), "{:,.1f}", first),
        Column("CPU ms", part("cpu_seconds", MILLISECONDS), "{:,.1f}", first),
    ]


def part(name: str, factor: float) -> Take:
    """A figure that the model counts, a step; none if it is zero."""
    return lambda run, others: factor * run.parts[name] / run.steps or None


def sent_kb(run: Run, others: Mapping[str, Run]) -> float | None:
    """Kilobytes that the interface has sent in a step."""
    return run.sent_bytes / 1e3 if run.interface_bytes is not None else None


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = make_parser(
        __doc__.splitlines()[0],
        20,
        2048,
        "rows of data a rank",
        "outputs/recommender",
        "10000 1000 100",
    )
    parser.add_argument(
        "--hosts", type=at_least(2), default=2, help="how many hosts, one rank on each"
    )
    parser.add_argument("--dim", type=int, default=64, help="entries a row of the tables")
    parser.add_argument(
        "--table-rows", type=int, default=400_000, help=f"rows of each of the {NUM_TABLES} tables"
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure, print the table and write it."""
    options = parse_options(words)
    session = Session(options, options.hosts)
    names = session.chosen(list(RECOMMENDERS), DENSE)
    sizes = {
        "batch_size": options.batch_size,
        "width": options.dim,
        "table_rows": options.table_rows,
    }
    job = Job(names, WARM_UP_STEPS, options.steps, RUN_SECONDS, False, **sizes)
    runs = session.rounds(job)

    machine = session.machine
    file = options.output / f"hosts{options.hosts}-batch{options.batch_size}-dim{options.dim}.md"
    note = (
        f"{NUM_TABLES} tables of {options.table_rows:,} rows, one thread a rank, {machine['cores']}"
        f" cores ({machine['processor']}), torch {machine['torch']}; medians (and ranges) over"
        f" {options.rounds} rounds."
    )
    title = (
        f"One step of a DLRM, {options.hosts} hosts, {options.batch_size} rows a rank, dim"
        f" {options.dim}"
    )
    rows = tabulate("exchange of tables", runs, names, columns_of(runs))
    publish(file, title, rows, [note, *session.notes], machine, runs=[asdict(run) for run in runs])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
