"""``lightning-dct plan``: bytes, time and memory of a run before there is one; see :mod:`lightning_dct.forecast`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_dct import forecast
from lightning_dct.config import VALUE_FORMATS, DCTConfig, check_density
from lightning_dct.forecast.forecast import layout_of
from lightning_dct.forecast.quantities import parse_count, parse_rate
from lightning_dct.forecast.report import print_forecast

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked."""
    defaults = DCTConfig()
    parser.add_argument("--world-size", type=int, required=True, help="ranks: processes of the whole job")
    parser.add_argument("--nodes", type=int, help="machines they run on, as many on each (default: one rank on each)")
    parser.add_argument(
        "--link",
        type=_of(parse_rate),
        required=True,
        help="rate of each node's link, which its ranks share, as 1Gbit, 100Mbit or 1.2GB; of each rank's on one node",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--parameters", type=_of(parse_count), help="so many, in one large tensor: 25000000, 100M, 1.3B")
    what.add_argument("--module", metavar="PACKAGE.MODULE:CLASS", help="a LightningModule or nn.Module: its tensors")
    parser.add_argument(
        "--arguments",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="for the module's constructor: pairs, whose values are read as JSON where they can be; or one JSON object",
    )
    parser.add_argument(
        "--compress", choices=("updates", "gradients"), default=defaults.compress, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--local-steps",
        type=int,
        help=f"steps from one exchange of updates to the next (default: {defaults.local_steps})",
    )
    parser.add_argument(
        "--density", type=_of(_density), default=defaults.density, help="share of entries sent (default: %(default)s)"
    )
    parser.add_argument(
        "--value-format", choices=VALUE_FORMATS, default=defaults.value_format, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--min-tensor-size",
        type=int,
        default=defaults.min_tensor_size,
        help="smaller tensors are sent dense (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Reckon and print."""
    try:
        layout = layout_of(arguments.world_size, arguments.world_size if arguments.nodes is None else arguments.nodes)
        config = DCTConfig(
            compress=arguments.compress,
            local_steps=arguments.local_steps,
            density=arguments.density,
            value_format=arguments.value_format,
            min_tensor_size=arguments.min_tensor_size,
        )
        workload = _workload(arguments)
    except ValueError as error:
        print(f"lightning-dct plan: error: {error}", file=sys.stderr)
        return 2
    speed = forecast.measure_speed(config.density, config.value_format, workload.entries)
    print_forecast(forecast.make_forecast(config, workload, layout, arguments.link, speed))
    return 0


def _workload(arguments: argparse.Namespace) -> forecast.Workload:
    if arguments.module is None:
        if arguments.arguments:
            raise ValueError("`--arguments` are for the constructor of a `--module`; `--parameters` has none")
        return forecast.one_tensor(arguments.parameters)
    if os.getcwd() not in sys.path:
        # As `python script.py` would find modules beside the script.
        sys.path.insert(0, os.getcwd())
    return forecast.workload_of(forecast.load_module(arguments.module, parse_arguments(arguments.arguments)))


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Keyword arguments from the command line.

    Raises:
        ValueError: A word is no pair.

    Example:
        >>> parse_arguments(["width=512", "name=small", "betas=[0.9, 0.95]"])
        {'width': 512, 'name': 'small', 'betas': [0.9, 0.95]}
    """
    if len(words) == 1 and words[0].lstrip().startswith("{"):
        try:
            whole: dict[str, Any] = json.loads(words[0])
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"`--arguments` is not JSON: {error}") from error
        return whole
    found = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"`--arguments {word}`: write KEY=VALUE pairs, as width=512, or one JSON object")
        try:
            found[key] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            found[key] = value
    return found


def _density(text: str) -> float:
    density = float(text)
    check_density("density", density)
    return density


def _of(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The same, whose error argparse shows beside the option's name."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked
