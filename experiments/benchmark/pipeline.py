"""Times a step of a language model in two stages on two hosts: ``sudo python pipeline.py``.

Hosts are network namespaces, as in ``steps.py``, with one rank and one thread each. In each round
all settings of what stands between the stages take turns on every link in one start of torchrun,
and ratios are taken within the round. A link without a limit shows what a step costs without the
network: computing, compressing, and waiting for the other stage. kB are those that a host's
interface has sent in a step, headers left out.

Each picture of a link shows one step, of median length, in fp32 and as compressed by default.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

# Experiments/, where `benchmark` is.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.job import Job, Run
from benchmark.plots import plot_timelines
from benchmark.session import RUN_SECONDS, Session, make_parser
from benchmark.stages import CROSSINGS, FP32, OURS, STAGES
from benchmark.steps import WARM_UP_STEPS
from benchmark.tables import (
    Column,
    Take,
    columns_by_link,
    faster_than,
    link_name,
    links_in,
    publish,
    tabulate,
)
from lightning_dct.pipeline.schedule import SCHEDULES


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """The columns of the table: two for each link, and those of bytes and compressing."""
    first = runs[0].link
    return [
        *columns_by_link(runs, ("faster than fp32", faster_than(FP32), "{:.2f}x")),
        *(
            Column(f"kB a step, host {stage}", sent_kb(stage), "{:,.1f}", first)
            for stage in range(STAGES)
        ),
        Column("fewer than fp32", fewer_than_fp32, "{:.1f}x", first),
        Column("ms compressing", lambda run, others: run.compressing_ms, "{:.1f}", first),
    ]


def sent_kb(stage: int) -> Take:
    """Kilobytes that a stage sends in a step."""
    return lambda run, others: run.parts[f"stage {stage}"] / run.steps / 1e3


def fewer_than_fp32(run: Run, others: Mapping[str, Run]) -> float:
    """Bytes that all stages send in a step in fp32, over those of this run.

    Runs on slow links measure fewer steps.
    """
    dense = others[FP32]
    return sum(dense.parts.values()) / dense.steps / (sum(run.parts.values()) / run.steps)


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    links = "none 1000 100 10:50"
    parser = make_parser(
        __doc__.splitlines()[0], 40, 8, "windows of 128 bytes a step", "outputs/pipeline", links
    )
    parser.add_argument("--micro-batches", type=int, default=4, help="that they are cut into")
    parser.add_argument(
        "--schedule", choices=SCHEDULES, default="1f1b", help="of the micro-batches"
    )
    parser.add_argument("--width", type=int, default=256, help="of the model, which has two blocks")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write it and the pictures."""
    options = parse_options(words)
    session = Session(options, STAGES)
    names = session.chosen(list(CROSSINGS), FP32)
    cut = {"micro_batches": options.micro_batches, "schedule": options.schedule}
    job = Job(
        names,
        WARM_UP_STEPS,
        options.steps,
        RUN_SECONDS,
        False,
        options.batch_size,
        options.width,
        **cut,
    )
    runs = session.rounds(job)
    if not all(math.isfinite(loss) for run in runs for loss in run.losses):
        raise RuntimeError("A loss is not finite, so the times of the steps mean nothing.")

    columns = columns_of(runs)
    machine = session.machine
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    for link in links_in(runs):
        name = link_name(link, session.has_links)
        here = [run for run in runs if run.link == link and run.round == 0]
        shown = [run for kind in (FP32, OURS) for run in here if run.synchronisation == kind]
        file = f"timeline-{name.replace('/', 'p').replace(', ', '-').replace(' ', '')}.png"
        plot_timelines(folder / file, name, shown)
    note = (
        f"{options.batch_size} windows of 128 bytes a step in {options.micro_batches}"
        f" micro-batches, {options.schedule}, width {options.width}, one thread a rank,"
        f" {machine['cores']} cores of one machine ({machine['processor']}), torch"
        f" {machine['torch']}; medians (and ranges) over {options.rounds} rounds."
    )
    title = f"One step of a language model in {STAGES} stages"
    rows = tabulate("between the stages", runs, names, columns)
    found = [asdict(run) for run in runs]
    publish(folder / "pipeline.md", title, rows, [note, *session.notes], machine, runs=found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
