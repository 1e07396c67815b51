"""Trains the language model with DCT and with the methods of others: one table and one picture.

    python experiments/peers.py --steps 3000 --ranks 2 4 --methods ddp dct 'diloco*'

Every row is ``train.py experiment=lm``: the same model, data, batches and steps, and another
strategy. Rows whose package is missing are left out, and the page says so. A row that is there is
not run again, so the same command goes on with a stopped page. On Linux, as root, each rank is a
host of its own with a link of 1 Gbit/s, and bytes are those that its interface has sent; elsewhere
ranks share this machine, and bytes are those that calls of collectives add up to. ``--times`` adds
the milliseconds of a step on slower links, in short runs of their own.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from comparison.runs import Entry, Run, Runner, Strategy, plan_run, require_once
from comparison.table import (
    difference,
    figure_text,
    markdown,
    metric_figure,
    result_figure,
    without_figures,
    write_runs,
)
from jobs import goes_on
from lightning_dct.law import UserSettings
from network.hosts import why_not

LOSS = "test/loss"
SLOW_LINKS = {"100": "100 Mbit/s", "10:50": "10 Mbit/s, 50 ms"}
_TIMED_STEPS = 20
_SKIPPED_STEPS = 10
_MARKERS = {2: "o", 4: "s", 8: "D"}
_NOTHING = "-"


@dataclass(frozen=True)
class Method:
    """A row: its name, the curve it belongs to, whose code runs, and what it adds to the overrides
    of all rows.

    ``period`` is the number of steps after which exchanges repeat, ``timing`` what a short run
    needs to be typical.
    """

    name: str
    family: str
    package: str
    settings: str
    period: int = 1
    timing: tuple[str, ...] = ()
    module: str = ""


def _methods() -> Iterator[Method]:
    yield Method("ddp", "ddp", "torch", "ddp")
    yield Method("bf16", "bf16 hook", "torch", "ddp_bf16")
    for rank in (4, 1):
        own = f"powersgd strategy.rank={rank}"
        yield Method(
            f"powersgd-{rank}", "PowerSGD", "torch", own, timing=("strategy.start_step=2",)
        )
    torchft = {"package": "torchft", "module": "rivals.with_torchft"}
    for steps in (30, 150, 1000):
        own = f"local_sgd strategy.method.sync_every={steps}"
        yield Method(f"local-sgd-{steps}", "LocalSGD", settings=own, period=steps, **torchft)
    for steps, rate in ((30, 0.7), (150, 0.7), (1000, 0.7), (30, 0.4), (150, 0.4)):
        own = (
            f"diloco strategy.method.sync_every={steps} strategy.method.outer_learning_rate={rate}"
        )
        yield Method(
            f"diloco-{steps}-{rate}",
            f"DiLoCo, outer rate {rate}",
            settings=own,
            period=steps,
            **torchft,
        )
    for steps in (32, 152, 1000):
        own = (
            f"diloco strategy.method.sync_every={steps} strategy.method.fragments=4"
            " strategy.method.delay=1"
        )
        yield Method(
            f"streaming-{steps}", "Streaming DiLoCo", settings=own, period=steps, **torchft
        )
    for steps, kind in ((15, "fp16"), (75, "fp16")):
        own = f"hivemind strategy.method.sync_every={steps} strategy.method.compression={kind}"
        yield Method(
            f"hivemind-{steps}", "hivemind", "hivemind", own, steps, module="rivals.with_hivemind"
        )
    for steps, top_k in ((1, 300), (2, 128), (15, 128), (30, 64)):
        own = f"sparse_loco strategy.method.sync_every={steps} strategy.method.top_k={top_k}"
        yield Method(f"sparse-loco-{steps}", "SparseLoCo", "", own, steps)
    for top_k in (32, 8, 1):
        for rate in (0.001, 0.003):
            own = f"demo strategy.method.top_k={top_k} strategy.method.learning_rate={rate}"
            name = f"demo-{top_k}-{rate}"
            yield Method(name, f"DeMo, rate {rate}", "pytorch_optimizer", own, module="rivals.demo")
    warm = ("strategy.warmup_steps=0",)
    yield Method("dct", "dct, defaults", "lightning-dct", "dct", timing=warm)
    for steps, density in ((1, 0.03), (4, 0.15), (16, 0.1), (64, 0.1)):
        own = f"dct strategy.local_steps={steps} strategy.density={density}"
        yield Method(f"dct-{steps}", "dct", "lightning-dct", own, steps, warm)


METHODS = {method.name: method for method in _methods()}
NOT_RUN = {"exogym": "its only release, 0.0.0a0, holds its version number and no code"}
"""Rivals that no row can be made of."""


def why_missing(method: Method) -> str | None:
    """Why a row cannot run here; None if it can."""
    try:
        if method.package:
            metadata.version(method.package)
        if method.module:
            importlib.import_module(method.module)
    except metadata.PackageNotFoundError:
        return f"{method.package} is not installed (`pip install '.[peers]'`)"
    except ImportError as error:
        return f"{method.package} does not load: {error}"
    return None


class Page:
    """All runs of a page, done or found, and the table and the picture of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.steps = arguments.steps
        self.seeds = arguments.seeds
        self.output = arguments.output
        self.runner = Runner(arguments.collect_only)
        self.has_links = why_not() is None and not arguments.loopback

    def entry(self, method: Method, ranks: int) -> Entry:
        """The runs of a row, one a seed."""
        common = [
            f"trainer.max_steps={self.steps}",
            f"trainer.val_check_interval={max(1, self.steps // 5)}",
        ]
        # The mean step is one after the warm-up of DCT.
        common.append(f"callbacks.step_timer.skip={min(340, self.steps // 3)}")
        runs = (self._get(method, ranks, common, seed, "1000") for seed in self.seeds)
        return Entry(method.name, tuple(run for run in runs if run is not None))

    def milliseconds(self, method: Method, ranks: int, link: str) -> float | None:
        """The mean step on a slower link, in a run of its own that is as long as it must be."""
        period = method.period
        own = list(method.timing)
        if method.family == "dct, defaults":
            # They follow the length of the whole run, and the number of ranks.
            config = UserSettings.of({}).for_run(ranks, self.steps)
            own += [
                f"strategy.local_steps={config.local_steps}",
                f"strategy.density={config.density}",
            ]
            period = config.local_steps
        timed = period * math.ceil(_TIMED_STEPS / period)
        steps = _SKIPPED_STEPS + timed
        common = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", "test=false"]
        common += ["+trainer.limit_val_batches=1", f"callbacks.step_timer.skip={_SKIPPED_STEPS}"]
        run = self._get(method, ranks, common, self.seeds[0], link, own)
        return None if run is None else run.result["milliseconds_per_step"]

    def _get(
        self,
        method: Method,
        ranks: int,
        common: list[str],
        seed: int,
        link: str,
        own: Sequence[str] = (),
    ) -> Run | None:
        shared = ["experiment=lm", *common, "logger=none", "callbacks.progress_bar=null"]
        hosts: tuple[str, ...] = ()
        if self.has_links:
            hosts = ("--hosts", str(ranks), "--link", link)
        else:
            shared += ["trainer.accelerator=cpu", f"trainer.devices={ranks}"]
        strategy = Strategy.parse(method.settings)
        strategy = Strategy(method.name, (*strategy.overrides, *own))
        return self.runner.get(plan_run(shared, strategy, (), seed, self.output, hosts))


def bytes_sent(result: Mapping[str, Any]) -> float | None:
    """Bytes a rank sends in a step: at the interface where it has one of its own, else those
    counted at the calls.
    """
    return result.get("interface_bytes_per_step") or result["bytes_sent_per_step"]


def ratio(result: Mapping[str, Any]) -> float | None:
    """The bytes of a dense fp32 exchange in every step over those sent: our way of counting."""
    sent = bytes_sent(result)
    return result["bytes_dense_per_step"] / sent if sent else None


def tabulate(page: Page, ranks: int, entries: Sequence[Entry], times: bool) -> list[list[str]]:
    """The rows of the table for a number of ranks, with its heads."""
    links = SLOW_LINKS if times and page.has_links else {}
    where = "interface" if page.has_links else "calls"
    heads = [
        "method",
        "code",
        "settings",
        "test loss",
        "against ddp",
        f"bytes a step ({where})",
        "ratio",
        "theirs",
    ]
    heads += [
        "ms, 1 Gbit/s" if page.has_links else "ms, one machine",
        *(f"ms, {name}" for name in links.values()),
    ]
    rows = [[*heads, "memory"]]
    weights = 4 * entries[0].runs[0].result["trainable_parameters"]
    held = entries[0].runs[0].result["tensor_bytes"]
    for entry in entries:
        method = METHODS[entry.label]
        code = (
            f"{method.package} {metadata.version(method.package)}"
            if method.package
            else "ours, by the paper"
        )
        own = " ".join(
            word.rpartition("strategy.")[2].removeprefix("method.")
            for word in method.settings.split()[1:]
        )
        loss = metric_figure(entry.runs, LOSS)
        apart = difference(entry, entries[0], LOSS)
        theirs = result_figure(entry.runs, lambda result: result["their_ratio"])
        memory = result_figure(entry.runs, lambda result: (result["tensor_bytes"] - held) / weights)
        cells = [
            entry.label,
            code,
            own or _NOTHING,
            figure_text(loss, "{:.4f}"),
            figure_text(apart, "{:+.2%}"),
        ]
        for figure, pattern in ((bytes_sent, "{:,.0f}"), (ratio, "{:,.1f}x")):
            found = result_figure(entry.runs, figure)
            cells.append(_NOTHING if found is None else pattern.format(found.mean))
        cells.append(_NOTHING if theirs is None else f"{theirs.mean:,.1f}x")
        milliseconds = [entry.runs[0].result["milliseconds_per_step"]]
        milliseconds += [page.milliseconds(method, ranks, link) for link in links]
        cells += [_NOTHING if time is None else f"{time:,.0f}" for time in milliseconds]
        rows.append([*cells, _NOTHING if memory is None else f"{memory.mean:+.1f}"])
    return rows


def draw(file: Path, by_ranks: Mapping[int, Sequence[Entry]], title: str) -> None:
    """Draw the loss against bytes: a colour and a curve for each method, a shape for each number of
    ranks.
    """
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    families = list(
        dict.fromkeys(
            METHODS[entry.label].family for entries in by_ranks.values() for entry in entries
        )
    )
    for ranks, entries in by_ranks.items():
        for number, family in enumerate(families):
            points = []
            for entry in entries[1:]:
                sent = result_figure(entry.runs, bytes_sent)
                apart = difference(entry, entries[0], LOSS)
                if METHODS[entry.label].family == family and sent and apart:
                    points.append((sent.mean, 100 * apart.mean))
            if points:
                look = {
                    "color": f"C{number % 10}",
                    "marker": _MARKERS.get(ranks, "^"),
                    "markersize": 6,
                }
                axis.plot(
                    *zip(*sorted(points), strict=True), label=f"{family}, {ranks} ranks", **look
                )
    axis.axhline(0, color="black", linewidth=1, linestyle="--")
    axis.set(xscale="log", xlabel="bytes a rank sends a step", ylabel="test loss against ddp, %")
    axis.set_yscale("symlog", linthresh=2)
    axis.set_title(title, fontsize="small")
    axis.grid(alpha=0.3)
    if len(axis.lines) > 1:
        figure.legend(loc="outside lower center", fontsize="x-small", ncols=4)
    figure.savefig(file, dpi=150)
    plt.close(figure)


@goes_on
def main(words: Sequence[str] | None = None) -> int:
    """Run what is not there yet, and write the page; 0 when every row that can run is there."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="optimizer steps of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], help="a table for each (default: 2)"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="a run for each (default: 0)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["*"],
        help="patterns of names, ddp first: " + ", ".join(METHODS),
    )
    parser.add_argument(
        "--times",
        action="store_true",
        help="also on slower links: " + ", ".join(SLOW_LINKS.values()),
    )
    parser.add_argument(
        "--loopback", action="store_true", help="no hosts of network namespaces, also as root"
    )
    parser.add_argument(
        "--collect-only", action="store_true", help="start nothing: show what is there"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/peers"), help="folder of the runs and the page"
    )
    arguments = parser.parse_args(words)
    chosen = [
        method
        for name, method in METHODS.items()
        if any(fnmatch(name, pattern) for pattern in arguments.methods)
    ]
    if not chosen or chosen[0].name != "ddp":
        parser.error("--methods must take in ddp, which the others are compared with")
    try:
        for name in ("seeds", "ranks"):
            require_once(name, getattr(arguments, name))
    except ValueError as error:
        parser.error(str(error))
    left_out = {method.name: why for method in chosen if (why := why_missing(method))}
    page = Page(arguments)
    by_ranks = {}
    tables = []
    for ranks in arguments.ranks:
        entries = [page.entry(method, ranks) for method in chosen if method.name not in left_out]
        by_ranks[ranks] = [entry for entry in entries if entry.runs]
        if not by_ranks[ranks] or by_ranks[ranks][0].label != "ddp":
            print(f"{ranks} ranks: there is no run of ddp to compare with")
            return 1
        rows = tabulate(page, ranks, by_ranks[ranks], arguments.times)
        tables.append(
            f"{ranks} ranks, {arguments.steps:,} steps\n\n"
            + markdown(rows, without_figures(by_ranks[ranks], [LOSS]))
        )
    notes = [f"{name}: left out, because {why}" for name, why in (left_out | NOT_RUN).items()]
    text = "\n".join([*tables, *(f"- {note}" for note in [*notes, *page.runner.problems])]) + "\n"
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"peers-{arguments.steps}"
    stem.with_suffix(".md").write_text(text)
    for ranks, entries in by_ranks.items():
        write_runs(arguments.output / f"peers-{arguments.steps}-{ranks}.csv", entries)
    draw(stem.with_suffix(".png"), by_ranks, f"{arguments.steps:,} steps of experiment=lm")
    print(f"Written to {stem}.md, .png and a .csv for each number of ranks")
    return 1 if page.runner.problems else 0


if __name__ == "__main__":
    sys.exit(main())
