"""The command ``lightning-dct``: the cost of a run before it starts, and a W&B workspace of bytes
and quality.

A subcommand is a function that describes its arguments, one that returns the exit status, and a
line in ``COMMANDS``. A UsageError and a missing package end it with a line and status 1.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_dct.__about__ import __version__
from lightning_dct.callbacks.run_advice import notes_at_start
from lightning_dct.callbacks.wandb_runs import QUALITY, make_workspace, push, to_json
from lightning_dct.config import VALUE_FORMATS, DCTConfig, UsageError
from lightning_dct.cost.forecast import Forecast, describe, layout_of
from lightning_dct.cost.tables import describe_tables
from lightning_dct.cost.timing import measure_speed
from lightning_dct.cost.workload import Workload, load_module, one_tensor, workload_of
from lightning_dct.failures import check
from lightning_dct.law import RunLength, UserSettings

# More than any model has; beyond it sizes in bytes overflow the int64 of tensors.
MOST_PARAMETERS = 10**15
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand, by default that of the process's own command line, and return the exit
    status.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-dct", description="Tools for training with strategy='dct'."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, add_arguments, run) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        add_arguments(subparser)
        subparser.set_defaults(run=run)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except ModuleNotFoundError as error:
        reason = (
            f"the package {error.name!r} is missing: pip install '.[experiments]' in a clone of"
            " lightning_dct"
        )
    except UsageError as error:
        reason = str(error)
    print(f"lightning-dct {arguments.command}: {reason}", file=sys.stderr)
    return 1


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of ``plan``."""
    defaults = DCTConfig()
    add = parser.add_argument
    add("--world-size", type=int, required=True, help="number of ranks: processes of the whole job")
    add(
        "--nodes",
        type=int,
        help="number of machines, with equally many ranks on each (default: one rank on each)",
    )
    link = (
        "rate of the link of each node, which its ranks share (on one node: of each rank), as 1Gbit"
        " or 1.2GB"
    )
    add("--link", type=parse_rate, required=True, help=link)
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--parameters",
        type=parse_count,
        help="this many, in one large tensor: 25000000, 100M, 1.3B",
    )
    model.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:CLASS",
        help="a LightningModule or nn.Module: its tensors",
    )
    add(
        "--tables",
        nargs="+",
        type=parse_count,
        metavar="ROWS",
        help="rows of each sharded embedding table: their memory",
    )
    add("--dim", type=int, default=64, help="entries of a row of --tables (default: %(default)s)")
    add(
        "--cache-rows",
        type=int,
        help="rows that a rank remembers of others (default: that of ShardedEmbeddingBags)",
    )
    values = "arguments of the module's constructor, with values in JSON where possible"
    add("--arguments", nargs="+", default=[], metavar="KEY=VALUE", help=values)
    add(
        "--compress",
        choices=("updates", "gradients"),
        default=defaults.compress,
        help="(default: %(default)s)",
    )
    allowed = "(default: as --steps allow; of gradients 30%% in every step)"
    add("--local-steps", type=int, help=f"steps from one exchange of updates to the next {allowed}")
    add("--density", type=float, help=f"share of entries sent {allowed}")
    steps = "optimizer steps of the run: a longer one needs fewer bytes (default: %(default)s)"
    add("--steps", type=parse_count, default=10_000, help=steps)
    add(
        "--value-format",
        choices=VALUE_FORMATS,
        default=defaults.value_format,
        help="(default: %(default)s)",
    )
    smaller = "smaller tensors are sent dense (default: %(default)s)"
    add("--min-tensor-size", type=int, default=defaults.min_tensor_size, help=smaller)


def plan(arguments: argparse.Namespace) -> int:
    """Compute and print the forecast of :mod:`lightning_dct.cost`."""
    ranks = arguments.world_size
    steps = arguments.steps
    if arguments.tables and ranks >= 1:
        print(describe_tables(arguments.tables, arguments.dim, ranks, arguments.cache_rows))
        if arguments.parameters is None and arguments.module is None:
            return 0
    names = ("compress", "local_steps", "density", "value_format", "min_tensor_size")
    try:
        layout = layout_of(ranks, ranks if arguments.nodes is None else arguments.nodes)
        given = UserSettings.of({name: getattr(arguments, name) for name in names})
        workload = _workload(arguments)
        config = given.for_run(ranks, steps)
    except ValueError as error:
        print(f"lightning-dct plan: error: {error}", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = measure_speed(config, workload.sizes_under(config), 1.0, device)
    print(f"A run of {steps:,} optimizer steps:")
    notes = notes_at_start(given, ranks, RunLength(steps), device.type, "", "`strategy='ddp'`")
    print(describe(Forecast(config, workload, layout, arguments.link, speed), notes))
    return 0


def _workload(arguments: argparse.Namespace) -> Workload:
    if arguments.module is None:
        if arguments.arguments:
            raise ValueError(
                "`--arguments` are for the constructor of a `--module`; `--parameters` has none"
            )
        if arguments.parameters is None:
            raise ValueError("plan for what? Give `--parameters`, `--module` or `--tables`")
        return one_tensor(arguments.parameters)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python script.py`
    return workload_of(load_module(arguments.module, parse_arguments(arguments.arguments)))


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Keyword arguments from the command line; a ValueError for a word that is no pair.

    Example:
        >>> parse_arguments(["width=512", "name=small", "betas=[0.9, 0.95]"])
        {'width': 512, 'name': 'small', 'betas': [0.9, 0.95]}
    """
    found = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"`--arguments {word}`: write KEY=VALUE pairs, as width=512")
        try:
            found[key] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            found[key] = value
    return found


def parse_rate(text: str) -> float:
    """The rate of a link in bits a second, of a number and its unit in bits or bytes.

    Example:
        >>> parse_rate("100Mbit/s"), parse_rate("1.5GB")
        (100000000.0, 12000000000.0)
    """
    match = re.fullmatch(r"(\d*\.?\d+(?:e\d+)?) ?([kMGT]?)(bit|B)(?:/s)?", text)
    rate = float(match[1]) * _FACTORS[match[2]] * (8 if match[3] == "B" else 1) if match else 0.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a number above 0 and its unit, as 1Gbit, 100Mbit or 1.2GB"
        )
    return rate


def parse_count(text: str) -> int:
    """A large number.

    Example:
        >>> parse_count("1.3B"), parse_count("25_000_000")
        (1300000000, 25000000)
    """
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?) ?([kMGBT]?)", text)
    number = float(match[1]) * _FACTORS[match[2]] if match else 0.0
    if not 1 <= number <= MOST_PARAMETERS or not math.isclose(number, round(number)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a whole number from 1 on, as 25000000, 100M or 1.3B,"
            f" {MOST_PARAMETERS:.0e} at most"
        )
    return round(number)


def add_check(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of ``check``."""
    add = parser.add_argument
    add(
        "host",
        nargs="?",
        help="address of the host on which `check --listen` runs; under torchrun leave it out",
    )
    add("--listen", action="store_true", help="wait here for the other host's `check`")
    add(
        "--port",
        type=int,
        default=check.PORT,
        help="port on which the host listens (default: %(default)s)",
    )
    size = (
        "size of a model, for which the table says what a step costs on this link (default:"
        " %(default)s)"
    )
    add("--parameters", type=parse_count, default=10_000_000, help=size)


def check_hosts(arguments: argparse.Namespace) -> int:
    """Check two hosts, or all hosts of a job of torchrun, and print what a run would send on their
    link.
    """
    ranks = 2
    problems = False
    if "TORCHELASTIC_RUN_ID" in os.environ and not (arguments.host or arguments.listen):
        ranks = int(os.environ["WORLD_SIZE"])
        text, rate = check.check_job()
        if os.environ["RANK"] != "0":
            return 0
    elif bool(arguments.host) == arguments.listen:
        raise UsageError(
            "run `lightning-dct check --listen` on one host, and `lightning-dct check HOST` with"
            " its address on the other one."
        )
    else:
        report = (
            check.listen(arguments.port)
            if arguments.listen
            else check.call(arguments.host, arguments.port)
        )
        text = check.describe(report)
        rate = min(report.rates)
        problems = bool(report.problems)
    print(text)
    if problems:
        return 1
    words = (
        f"--world-size {ranks} --link {check.rate_in_words(rate)} --parameters"
        f" {arguments.parameters}"
    )
    print(f"\nWhat a model costs on this link, by `lightning-dct plan {words}`:", flush=True)
    return main(["plan", *words.split()])


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of ``dashboard``."""
    add = parser.add_argument
    environment = os.environ.get
    add(
        "--project",
        default=environment("WANDB_PROJECT"),
        help="where the runs are (default: WANDB_PROJECT)",
    )
    owner = "user or team that owns the project (default: WANDB_ENTITY, else your default entity)"
    add("--entity", default=environment("WANDB_ENTITY"), help=owner)
    add("--name", default="lightning_dct", help="name of the view (default: %(default)s)")
    keys = f"keys of the model's quality, the decisive one last (default: {' '.join(QUALITY)})"
    add("--quality", nargs="+", default=list(QUALITY), metavar="KEY", help=keys)
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="write JSON to this file and send nothing; needs no login",
    )


def dashboard(arguments: argparse.Namespace) -> int:
    """Build the dashboard, and write it or save it in W&B."""
    entity = arguments.entity
    project = arguments.project
    output = arguments.output
    if not project:
        raise UsageError("which W&B project? Name it with `--project`, or set WANDB_PROJECT.")
    if output is None:
        print(push(entity, project, arguments.name, arguments.quality))
        return 0
    text = to_json(make_workspace(entity or "", project, arguments.name, arguments.quality))
    try:
        if output.exists() and not _may_be_replaced(output):
            raise UsageError(
                f"--output {output}: this is no dashboard; name another file or remove it"
            )
        output.write_text(text)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from error
    print(output)
    return 0


def _may_be_replaced(file: Path) -> bool:
    """Whether it is an empty file or another dashboard."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        beginning = content.read(64)
    # A formatter may have changed its white space.
    return not beginning or b"".join(beginning.split()).startswith(b'{"entity":')


COMMANDS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "plan": (
        "Bytes, time and memory of a run, for each exchange, before it starts.",
        add_plan,
        plan,
    ),
    "check": (
        "Whether ranks on two hosts will reach each other, and how fast.",
        add_check,
        check_hosts,
    ),
    "dashboard": (
        "A W&B workspace of bytes, residuals and quality, or its JSON.",
        add_dashboard,
        dashboard,
    ),
}
