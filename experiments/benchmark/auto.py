"""Time to DDP's loss on links of given rates, for fixed settings and ``target_overhead``: ``sudo python auto.py``.

Makes hosts out of network namespaces (Linux, as root). On links without a limit every fixed setting trains the
perceptron of ``steps.py`` until its loss, a mean over 20 steps and all ranks, is DDP's after ``--steps``. Then some of
its steps are timed on each link, and steps times pace is its time to that loss. ``target_overhead`` trains to that loss
on every link, and its time includes its measuring, also before the first step. Fixed settings obey the same rule:
the law must allow them for twice ``--steps``. Settings for longer runs have a column of their own.
"""

import argparse
import math
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `benchmark` is

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from benchmark.job import QUIET, do_job, run_job
from benchmark.plots import plot_over_rates
from benchmark.session import add_links
from benchmark.tables import describe_machine, link_name, publish
from benchmark.task import NextBytes, next_bytes_data
from lightning_dct import DCTConfig, DCTStrategy
from lightning_dct.law import Given, steps_needed
from network.hosts import Link, change_rate, some_hosts, why_not

SMOOTHING, EVERY = 20, 10
DDP, AUTO = "DDP", "target_overhead=0.05"
FIXED = {f"{one.local_steps} steps, {100 * one.density:g}%": one for one in Given.of({}).rungs(2)}
"""The settings that two ranks choose from, by their name."""
SKIPPED = 5
# Mbit/s, of the link that falls in the middle of a run.
FALLS_FROM, FALLS_TO = 1000.0, 20.0
# Rounds of the warm-up are shorter, so its steps take longer: their pace is timed apart from that of later steps.
WARM_UP = DCTConfig().warmup_steps
PACED = WARM_UP + 200


def strategy_of(name: str) -> DDPStrategy:
    """The strategy of a name."""
    if name not in FIXED:
        return DDPStrategy() if name == DDP else DCTStrategy(target_overhead=0.05)
    return DCTStrategy(local_steps=FIXED[name].local_steps, density=FIXED[name].density)


class Watch(Callback):
    """Ends a run at a loss, after a time or after all steps, the same on every rank."""

    reads_weights = False

    def __init__(self, loss: float | None, seconds: float | None) -> None:
        self._goal, self._longest = loss, seconds
        self.started = 0.0
        self.losses: list[float] = []
        self.ends: list[float] = []
        # The steps, the mean loss and the seconds that all ranks have agreed on last.
        self.steps, self.loss, self.seconds = 0, float("inf"), 0.0
        self._agreeing: tuple[int, torch.Tensor, dist.Work] | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        # `target_overhead` measures when training starts, before this callback is told of it.
        self.started = perf_counter()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.ends.append(perf_counter())

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, out: Any, batch: Any, index: int) -> None:
        self.losses.append(float(out["loss"]))
        self.ends.append(perf_counter())
        if len(self.losses) % EVERY:
            return
        # Wait for the result ten steps later: a round trip may take as long as they do.
        self.read(trainer)
        if not trainer.should_stop:
            own = [statistics.fmean(self.losses[-SMOOTHING:]), self.ends[-1] - self.started]
            mean = torch.tensor(own, dtype=torch.float64) / dist.get_world_size()
            self._agreeing = len(self.losses), mean, dist.all_reduce(mean, async_op=True)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.read(trainer)

    def read(self, trainer: Trainer) -> None:
        """Take what the ranks have agreed on, and stop at the goal."""
        if self._agreeing is None:
            return
        (self.steps, mean, work), self._agreeing = self._agreeing, None
        work.wait()
        self.loss, self.seconds = mean.tolist()
        if trainer.is_global_zero:
            config = getattr(trainer.strategy, "config", "")
            pace = self.ends[self.steps] - self.ends[self.steps - EVERY]
            print(f"step {self.steps} {self.loss:.4f} {pace:.2f} s {config}", flush=True)
        reached = self._goal is not None and self.steps >= SMOOTHING and self.loss <= self._goal
        if reached or (self._longest is not None and self.seconds > self._longest):
            trainer.should_stop = True


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank, and return its figures."""
    seed_everything(0, verbose=False)
    strategy, watch = strategy_of(job["name"]), Watch(job["loss"], job["seconds"])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_steps=job["steps"],
        max_epochs=-1,
        callbacks=[watch],
        limit_val_batches=0,
        **QUIET,
    )
    trainer.fit(NextBytes(job["width"]), datamodule=next_bytes_data(job["batch_size"]))
    between = [after - before for before, after in zip(watch.ends, watch.ends[1:], strict=False)]
    found: dict[str, Any] = {"steps": watch.steps, "loss": watch.loss, "seconds": watch.seconds}
    first, after = between[SKIPPED:WARM_UP], between[WARM_UP:]
    found["paces"] = [statistics.fmean(first), statistics.fmean(after or first)]
    if isinstance(strategy, DCTStrategy) and strategy.auto is not None and strategy.auto.chosen is not None:
        real = strategy.auto.real
        found |= {"decisions": strategy.auto.decisions, "predicted": strategy.auto.chosen.seconds, "real": real}
    return found


def run(options: argparse.Namespace, link: Link, fall_after: float = math.inf, **job: Any) -> dict[str, Any]:
    """Train on hosts of their own, and return the figures of the first rank; after some steps their links may fall."""
    job = {"loss": None, "seconds": None, "width": options.width, "batch_size": options.batch_size, **job}
    fell_after: list[int] = []
    with some_hosts(options.hosts, link, has_links=True) as hosts:

        def show(line: str) -> None:
            if line.startswith("step") and not fell_after and (steps := int(line.split()[1])) >= fall_after:
                change_rate(hosts, FALLS_TO)
                fell_after.append(steps)
            if line.startswith(("step", "After", "updates", "plain")):
                print("   ", line.strip(), flush=True)

        found: dict[str, Any] = run_job(hosts, str(Path(__file__).resolve()), job, show=show)[0]
    found["fell_after"] = fell_after
    print(f"  {link_name(link)}, {job['name']}: {found}", flush=True)
    return found


def seconds_of(steps: int, pace: float, pace_after: float) -> float:
    """How long so many steps take, given the seconds of a step of the warm-up and of one after it."""
    return min(steps, WARM_UP) * pace + max(steps - WARM_UP, 0) * pace_after


def compare(options: argparse.Namespace) -> tuple[list[list[str]], dict[str, Any]]:
    """Every setting on every link: the rows of a table with their heads, and all figures."""
    names = [DDP, *FIXED]
    reference = run(options, Link(), name=DDP, steps=options.steps)
    goal, most = reference["loss"], 2 * options.steps
    needed = {DDP: reference["steps"]}
    for name in FIXED:
        found = run(options, Link(), name=name, steps=most, loss=goal)
        needed[name] = found["steps"] if found["loss"] <= goal else None
    first, *others = FIXED
    fits = {name: steps_needed(config, options.hosts) <= most for name, config in FIXED.items()}
    allowed = [DDP, first, *(name for name in others if fits[name])]
    heads = ["link", "DDP, s", "for longer runs, s", "best fixed, s", "auto, s", "auto / best", "auto took last"]
    rows = [[*heads, "real step / predicted"]]
    figures: dict[str, Any] = {"goal": goal, "needed": needed, "allowed": allowed, "links": []}
    for link in options.links:
        paces = {n: run(options, link, name=n, steps=PACED, seconds=options.seconds)["paces"] for n in names}
        times = {name: seconds_of(needed[name], *paces[name]) for name in names if needed[name] is not None}
        found = run(options, link, name=AUTO, steps=most, loss=goal)
        of_any = min(times, key=lambda name: times[name])
        best = min((name for name in allowed if name in times), key=lambda name: times[name])
        reached = "" if found["loss"] <= goal else f" (not reached: {found['loss']:.3f})"
        figures["links"].append((link, times, found))
        off = "-" if not found.get("real") else f"{100 * (found['real'] / found['predicted'] - 1):+.0f}%"
        last = found["decisions"][-1].partition("takes ")[2].partition(":")[0] if "decisions" in found else "-"
        rows.append(
            [
                link_name(link),
                f"{times[DDP]:,.1f}",
                "-" if of_any in allowed else f"{of_any}: {times[of_any]:,.1f}",
                f"{best}: {times[best]:,.1f}",
                f"{found['seconds']:,.1f}{reached}",
                f"{found['seconds'] / times[best]:.2f}x",
                last,
                off,
            ]
        )
    figures["fall"] = found = run(options, Link(FALLS_FROM), options.steps // 2, name=AUTO, steps=options.steps)
    (fell,), decisions = found["fell_after"], found.get("decisions", [])
    after = [words for words in decisions if int(words.split()[1].replace(",", "")) > fell]
    figures["fall in words"] = (
        f"A link that falls from {link_name(Link(FALLS_FROM))} to {link_name(Link(FALLS_TO))} after {fell} of"
        f" {options.steps} steps: {' '.join(after) or 'nothing was decided after that.'} The loss is"
        f" {found['loss']:.4f} at the end, DDP's {goal:.4f}."
    )
    return rows, figures


def main(words: list[str]) -> int:
    """Train as a rank, or measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, default=2, help="one rank on each")
    add_links(parser, "10 30 100 1000 10000")
    parser.add_argument("--steps", type=int, default=2000, help="of DDP, whose loss is what all others train to")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which each pace is timed")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers; 512 makes 1.6 million parameters")
    parser.add_argument("--batch-size", type=int, default=128, help="rows a rank")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="folder for the table")
    options = parser.parse_args(words)
    if options.job:
        do_job(options.job, train)
        return 0
    if reason := why_not():
        print(f"This needs hosts, and {reason}.", file=sys.stderr)
        return 2
    machine = describe_machine()
    rows, figures = compare(options)
    settings = [name for name in figures["allowed"] if figures["needed"][name] is not None]
    options.output.mkdir(parents=True, exist_ok=True)
    plot_over_rates(options.output / "auto.png", figures["links"], settings)
    note = f"{options.hosts} hosts, one thread each, {machine['cores']} cores ({machine['processor']}); one run each."
    publish(
        options.output / "auto.md", "Time to DDP's loss", rows, [note, figures["fall in words"]], machine, **figures
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
