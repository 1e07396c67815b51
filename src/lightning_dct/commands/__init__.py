"""The command ``lightning-dct``: what it can do, by name. Each module here is one subcommand.

A module has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status. It is imported when it is
asked for, and not before: each needs other extras.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lightning_dct.__about__ import __version__

COMMANDS: dict[str, str] = {
    "report": "One HTML page out of the logs of one or several runs.",
    "plan": "Bytes, time and memory of a run before there is one, for each exchange.",
    "dashboard": "A W&B workspace of what is sent, held back and reached, or its JSON.",
}
"""What each subcommand does, in one line."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        words: What follows ``lightning-dct`` on the command line; None takes it from there.

    Returns:
        The exit status.
    """
    words = sys.argv[1:] if words is None else list(words)
    parser = argparse.ArgumentParser(prog="lightning-dct", description="What belongs to training with strategy='dct'.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == wanted:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    status: int = arguments.run(arguments)
    return status
