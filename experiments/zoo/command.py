"""Trains every member of the zoo under several synchronisations and seeds, and compares them.

    python experiments/zoo.py --seeds 0 1 2 --strategy ddp --strategy dct --rates 0.5 1 1.5

The first strategy is the baseline. Each member's learning rate is the one that is best under ddp;
``--rates`` multiplies it, for every strategy. A run with a ``result.json`` below ``--output`` is
not repeated, so the same command continues a stopped zoo. A run that fails is reported, and does
not stop the others. The results are ``table.md``, ``table.csv`` with every figure of every run, and
``zoo.png``: quality lost beside bytes saved.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from comparison.runs import Entry, Run, Runner, Strategy, plan_run, require_distinct, require_once
from comparison.table import write_runs
from jobs import goes_on
from zoo.table import Row, draw, to_markdown

MEMBERS = Path(__file__).parents[2] / "conf" / "experiment" / "zoo"
_OPTIONS = {"experiment": "--only", "model.learning_rate": "--rates", "seed": "--seeds"}


@goes_on
def main(words: Sequence[str] | None = None) -> int:
    """Run what is not there yet, then print and write the table and draw the picture; 0 when every
    run is there.
    """
    parser = make_parser()
    arguments = parser.parse_intermixed_args(words)
    runner = Runner(arguments.collect_only)
    try:
        for name in ("seeds", "rates", "only"):
            require_once(name, getattr(arguments, name) or ())
        strategies = [Strategy.parse(text) for text in arguments.strategy]
        require_distinct(strategies, arguments.overrides, _OPTIONS)
        sides = [
            (member, rate)
            for member in arguments.only or member_names()
            for rate in arguments.rates
        ]
        rows = run_all(
            runner, sides, strategies, arguments.seeds, arguments.overrides, arguments.output
        )
    except ValueError as error:
        parser.error(str(error))
    if complete := [row for row in rows if row.entries[0].runs]:
        table = to_markdown(complete, runner.problems)
        output = arguments.output
        print(table)
        output.mkdir(parents=True, exist_ok=True)
        (output / "table.md").write_text(table)
        named = [
            Entry(f"{row.name}: {entry.label}", entry.runs) for row in rows for entry in row.entries
        ]
        write_runs(output / "table.csv", named)
        draw(output / "zoo.png", complete)
        print(f"Written to {output}: table.md, table.csv, zoo.png")
    return 1 if runner.problems else 0


def run_all(
    runner: Runner,
    sides: Sequence[tuple[str, float]],
    strategies: Sequence[Strategy],
    seeds: Sequence[int],
    overrides: Sequence[str],
    output: Path,
) -> list[Row]:
    """All runs: those of every member with the first seed, then with the next, so that a table is
    soon there.

    ``sides`` are the members, each with the factor of its learning rate.
    """
    found: dict[tuple[str, float, Strategy], list[Run]] = {}
    for seed in seeds:
        for member, rate in sides:
            own = [f"experiment=zoo/{member}"]
            if rate != 1:
                tuned = float(OmegaConf.load(MEMBERS / f"{member}.yaml").model.learning_rate)
                own.append(f"model.learning_rate={tuned * rate:.6g}")
            for strategy in strategies:
                run = runner.get(plan_run(overrides, strategy, own, seed, output))
                found.setdefault((member, rate, strategy), []).extend([run] if run else [])
    return [
        Row(
            member,
            rate,
            [
                Entry(strategy.label, tuple(found[member, rate, strategy]))
                for strategy in strategies
            ],
        )
        for member, rate in sides
    ]


def member_names() -> list[str]:
    """The members, by name."""
    return sorted(file.stem for file in MEMBERS.glob("*.yaml"))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="what all runs share, as in trainer.devices=4")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one run of each for each (default: 0)"
    )
    parser.add_argument(
        "--strategy",
        action="append",
        required=True,
        help='as in "dct strategy.density=0.001"; "label: dct" to name it',
    )
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        choices=member_names(),
        metavar="MEMBER",
        help="instead of all",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1.0],
        help="what each member's learning rate is multiplied by",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/zoo"), help="folder of the runs"
    )
    parser.add_argument(
        "--collect-only", action="store_true", help="start nothing: show what is there"
    )
    return parser
