"""Times a step of a language model in two stages on two hosts: ``sudo python pipeline.py``.

Hosts are network namespaces, as in ``steps.py``, with one rank and one thread each. In each round every setting of what
stands between the stages takes its turn on every link, one after the other in one start of torchrun, and ratios are
taken within it. A link without a limit shows what a step costs without the network: computing, compressing, and waiting
for the other stage. kB are those that a host's interface has sent in a step, headers left out.

Each picture of a link shows one step, of median length, in fp32 and as compressed by default.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from json import dumps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `benchmark` is

from benchmark.job import Job
from benchmark.machine import describe_machine, warn_if_busy
from benchmark.plots import plot_timelines
from benchmark.results import Figure, Run, read_runs
from benchmark.stages import CROSSINGS, FP32, OURS, STAGES
from benchmark.steps import LOOPBACK, PORT, RUN_SECONDS, WARM_UP_STEPS, WORKER, free_port, in_order, some_hosts
from benchmark.tables import link_name, publish, with_range
from lightning_dct.pipeline.schedule import SCHEDULES
from network.hosts import give_to_invoking_user, why_not
from network.running import HostFailedError, run_on, torchrun

# Mbit/s, None for no limit, and the milliseconds that frames travel each way.
Link = tuple[float | None, float]
LINKS = ["none", "1000", "100", "10:50"]


def parse_link(word: str) -> Link:
    """Read a link from the command line.

    Example:
        >>> parse_link("none"), parse_link("10:50")
        ((None, 0.0), (10.0, 50.0))
    """
    rate, _, delay = word.partition(":")
    return None if rate == "none" else float(rate), float(delay or 0)


def name_of(link: Link, has_links: bool) -> str:
    """What a link is called in tables and pictures."""
    rate, delay = link
    return link_name(rate, has_links) + (f", {delay:g} ms" if delay else "")


def link_of(run: Run) -> Link:
    """The link on which a run was measured."""
    return run.megabits, run.delay_ms


def measure(options: argparse.Namespace, names: list[str], has_links: bool) -> list[Run]:
    """All names on all links, in another order in each round."""
    runs: list[Run] = []
    links: list[Link] = options.links if has_links else [(None, 0.0)]
    for round, (rate, delay) in product(range(options.rounds), links):
        with tempfile.TemporaryDirectory() as folder, some_hosts(STAGES, rate, has_links, delay / 1000) as hosts:
            os.chmod(folder, 0o777)  # the hosts' processes may be another user's
            job = Job(
                synchronisations=in_order(names, round),
                warm_up_steps=WARM_UP_STEPS,
                steps=options.steps,
                seconds=RUN_SECONDS,
                score=False,
                batch_size=options.batch_size,
                width=options.width,
                has_links=has_links,
                folder=folder,
                micro_batches=options.micro_batches,
                schedule=options.schedule,
            )
            port = PORT if has_links else free_port()
            commands = torchrun(STAGES, hosts[0].address, port, [str(WORKER), str(job.write())])
            run_on(hosts, commands, {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}, lambda line: None)
            found = read_runs(Path(folder), STAGES, rate, round)
        runs += [replace(run, delay_ms=delay) for run in found]
        print(f"{name_of((rate, delay), has_links)}: round {round + 1} of {options.rounds} is done", flush=True)
    if not all(math.isfinite(loss) for run in runs for loss in run.losses):
        raise RuntimeError("A loss is not finite: the times of such steps say nothing.")
    return runs


def tabulate(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and a row for each name."""
    links = list(dict.fromkeys(map(link_of, runs)))
    has_links = runs[0].interface_bytes is not None
    heads = ["between the stages"]
    heads += [head for link in links for head in (f"ms a step, {name_of(link, has_links)}", "faster than fp32")]
    heads += [f"kB a step, host {stage}" for stage in range(STAGES)] + ["fewer than fp32", "ms compressing"]
    dense = {(*link_of(run), run.round): run for run in runs if run.synchronisation == FP32}
    rows = []
    for name in names:
        cells = [name]
        for link in links:
            here = [run for run in runs if run.synchronisation == name and link_of(run) == link]
            faster = Figure.of(dense[(*link, run.round)].step_ms / run.step_ms for run in here)
            cells += [with_range(Figure.of(run.step_ms for run in here), "{:.0f}"), with_range(faster, "{:.2f}x")]
        here = [run for run in runs if run.synchronisation == name and link_of(run) == links[0]]
        sent = [[run.parts[f"stage {stage}"] / run.steps / 1e3 for run in here] for stage in range(STAGES)]
        fewer = [sum(dense[(*links[0], run.round)].parts.values()) / sum(run.parts.values()) for run in here]
        cells += [f"{statistics.median(figures):,.1f}" for figures in sent]
        cells += [f"{statistics.median(fewer):.1f}x", f"{statistics.median(run.compressing_ms for run in here):.1f}"]
        rows.append(cells)
    return heads, rows


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = "of these Mbit/s, or none for no limit, and after a colon the milliseconds that frames travel each way"
    parser.add_argument("--links", type=parse_link, nargs="+", default=list(map(parse_link, LINKS)), help=help)
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--steps", type=int, default=40, help="most steps measured in a run")
    parser.add_argument("--batch-size", type=int, default=8, help="windows of 128 bytes a step")
    parser.add_argument("--micro-batches", type=int, default=4, help="that they are cut into")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the micro-batches")
    parser.add_argument("--width", type=int, default=256, help="of the model, which has two blocks")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names: only these, and fp32")
    parser.add_argument("--loopback", action="store_true", help="make no hosts, as where there is no root")
    parser.add_argument("--output", type=Path, default=Path("outputs/pipeline"), help="folder for table and pictures")
    options = parser.parse_args(words)
    if any((rate is not None and rate <= 0) or delay < 0 for rate, delay in options.links):
        parser.error("--links: give rates above 0, and no negative delays")
    if min(options.rounds, options.steps) < 1:
        parser.error("--rounds and --steps: give 1 or more")
    return options


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write it and the pictures; 1 when a host fails."""
    options = parse_options(words)
    names = [name for name in CROSSINGS if name == FP32 or any(part in name for part in options.only)]
    reason = "--loopback was given" if options.loopback else why_not()
    machine = describe_machine()
    # Hosts are to be removed when this is told to stop, as after ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        runs = measure(options, names, has_links=reason is None)
    except HostFailedError as error:
        print(error, file=sys.stderr)
        return 1
    heads, rows = tabulate(runs, names)
    notes = [
        f"{options.batch_size} windows of 128 bytes a step in {options.micro_batches} micro-batches,"
        f" {options.schedule}, width {options.width}, one thread a rank, {machine['cores']} cores of one machine"
        f" ({machine['processor']}), torch {machine['torch']}; medians (and ranges) over {options.rounds} rounds.",
        *([LOOPBACK.format(reason=reason)] if reason else []),
        *([busy] if (busy := warn_if_busy(machine["load"])) else []),
    ]
    folder, has_links = options.output, reason is None
    publish(folder / "pipeline.md", f"One step of a language model in {STAGES} stages", heads, rows, notes)
    about = {"machine": machine, "notes": notes, "runs": [asdict(run) for run in runs]}
    (folder / "pipeline.json").write_text(dumps(about, indent=1) + "\n")
    for link in dict.fromkeys(map(link_of, runs)):
        name = name_of(link, has_links)
        here = [run for run in runs if link_of(run) == link and run.round == 0]
        shown = [run for kind in (FP32, OURS) for run in here if run.synchronisation == kind]
        plot_timelines(
            folder / f"timeline-{name.replace('/', 'p').replace(', ', '-').replace(' ', '')}.png", name, shown
        )
    for path in (folder, *folder.glob("pipeline.*"), *folder.glob("timeline-*.png")):
        give_to_invoking_user(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
