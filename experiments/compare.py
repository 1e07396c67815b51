r"""Trains the same experiment under several synchronisations and seeds, and compares the results.

    python experiments/compare.py experiment=lm --seeds 0 1 2 --strategy ddp \
        --strategy "1%: dct strategy.density=0.01"

The first strategy is the baseline. Each run is a ``train.py`` of its own, in its own folder below
``--output``. A run with a ``result.json`` there is not repeated, so the same command continues a
stopped comparison. A run that fails is reported, and does not stop the others. ``--sweep
model.learning_rate=0.003,0.01,0.03`` tries each value for every strategy with the first seed, takes
the best by validation, and runs the other seeds with it. The results are ``table.md``,
``table.csv`` with every figure of every run, ``quality.png``, quality against bytes, and
``pace.png``, validation over the seconds of training. With ``--hosts 2 --link 100`` each run trains
on hosts made of network namespaces, with a link of 100 Mbit/s (Linux, as root).

``--collect-only`` makes these files from finished runs, ``--collect multirun/2026-01-31/12-00-00``
from those of ``train.py --multirun``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison.runs import (
    Entry,
    Run,
    Runner,
    Strategy,
    collect,
    folder_name,
    plan_run,
    require_distinct,
    require_once,
    setting_name,
)
from comparison.sweep import Axis, choose, combinations
from comparison.table import draw, draw_pace, to_markdown, write_runs
from jobs import goes_on
from network.hosts import parse_link


@goes_on
def main(words: Sequence[str] | None = None) -> int:
    """Run what is not there yet, then print and write the table and draw the picture; 0 when every
    run is there.
    """
    parser = make_parser()
    # Overrides may come before and after options.
    arguments = parser.parse_intermixed_args(words)
    own = (
        arguments.seeds,
        arguments.sweep,
        arguments.hosts,
        arguments.link,
        arguments.collect_only,
    )
    if arguments.collect and (arguments.overrides or any(own)):
        parser.error(
            "--collect takes runs as they are: leave out overrides, --seeds, --sweep, --hosts,"
            " --link and --collect-only"
        )
    if arguments.strategy and not arguments.overrides:
        parser.error("say what all runs share, as in experiment=lm")
    try:
        if arguments.collect:
            entries, common, problems = collect(arguments.collect)
            output = arguments.output or arguments.collect[0]
        else:
            common, seeds = take_seeds(arguments.overrides, arguments.seeds)
            strategies = [Strategy.parse(text) for text in arguments.strategy]
            axes = [Axis.parse(text) for text in arguments.sweep]
            swept = ["seed", "strategy", *(axis.setting for axis in axes)]
            if len(set(swept)) < len(swept):
                raise ValueError(
                    "--sweep takes each setting once, and neither seed (--seeds) nor strategy"
                    " (--strategy)"
                )
            require_distinct(
                strategies,
                common,
                {"seed": "--seeds", **{axis.setting: "--sweep" for axis in axes}},
            )
            output = arguments.output or Path("outputs/compare") / folder_name(common, common)
            runner = Runner(arguments.collect_only)
            hosts = ("--hosts", str(arguments.hosts)) if arguments.hosts else ()
            if arguments.link:
                hosts += (
                    "--link",
                    f"{arguments.link.megabits or 'none'}:{arguments.link.delay_ms}",
                )
            entries = [
                compare(runner, common, strategy, axes, seeds, output, hosts)
                for strategy in strategies
            ]
            problems = runner.problems
    except ValueError as error:
        parser.error(str(error))
    if any(entry.runs for entry in entries):
        table = to_markdown(entries, " ".join(common), problems)
        print(table)
        output.mkdir(parents=True, exist_ok=True)
        (output / "table.md").write_text(table)
        write_runs(output / "table.csv", entries)
        draw(output / "quality.png", entries, " ".join(common))
        draw_pace(output / "pace.png", entries, " ".join(common))
        print(f"Written to {output}: table.md, table.csv, quality.png, pace.png")
    return 1 if problems else 0


def compare(
    runner: Runner,
    common: list[str],
    strategy: Strategy,
    axes: list[Axis],
    seeds: list[int],
    output: Path,
    hosts: tuple[str, ...],
) -> Entry:
    """All runs of one strategy: with the first seed those of the sweep, then the best values with
    all seeds.
    """

    def get(swept: tuple[str, ...], seed: int) -> Run | None:
        return runner.get(plan_run(common, strategy, swept, seed, output, hosts))

    trials = {swept: get(swept, seeds[0]) for swept in combinations(axes)}
    found = tuple(run for run in trials.values() if run is not None)
    swept = ()
    chosen = None
    note = ""
    if axes:
        results = {swept: None if run is None else run.result for swept, run in trials.items()}
        try:
            swept, chosen, note = choose(axes, results, seeds[0])
        except ValueError as error:
            runner.problems.append(f"{strategy.label}: {error}")
            return Entry(strategy.label, (), found)
    runs = [trials[swept], *(get(swept, seed) for seed in seeds[1:])]
    return Entry(strategy.label, tuple(run for run in runs if run is not None), found, chosen, note)


def take_seeds(
    overrides: Sequence[str], seeds: Sequence[int] | None
) -> tuple[list[str], list[int]]:
    """Part the seeds from the overrides of all runs; ``seed=1,2`` among them means the same as
    ``--seeds 1 2``.

    Raises:
        ValueError: Both name seeds, or a seed comes twice or is no integer.
    """
    named = [override for override in overrides if setting_name(override) == "seed"]
    if named and seeds is not None:
        raise ValueError(f"{named[0]}: --seeds says already which")
    if seeds is None:
        words = [word for override in named for word in override.partition("=")[2].split(",")] or [
            "0"
        ]
        if not all(word.strip().isdecimal() for word in words):
            raise ValueError(f"{' '.join(named)}: write the seeds as in --seeds 0 1 2")
        seeds = [int(word) for word in words]
    require_once("seeds", seeds)
    return [override for override in overrides if override not in named], list(seeds)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="what all runs share, as in experiment=lm trainer.max_steps=500",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="one run of each strategy for each (default: 0)"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], help="as in model.learning_rate=0.003,0.01,0.03"
    )
    parser.add_argument(
        "--output", type=Path, help="folder of the runs (default: outputs/compare/<overrides>)"
    )
    parser.add_argument(
        "--hosts", type=int, help="train on so many hosts of network namespaces, a rank on each"
    )
    parser.add_argument(
        "--link",
        type=parse_link,
        help="between hosts: Mbit/s, and after a colon ms each way, as in 10:50",
    )
    parser.add_argument(
        "--collect-only", action="store_true", help="start nothing: show what is there"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--strategy",
        action="append",
        help='as in "dct strategy.density=0.001"; "label: dct" to name it',
    )
    kind.add_argument(
        "--collect", type=Path, nargs="+", help="folders of runs started elsewhere, as multirun/..."
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
