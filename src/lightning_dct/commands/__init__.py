"""The command ``lightning-dct``: each module here is one subcommand.

A module has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status. A UsageError and a missing
package end it with a line and status 1. Only the module of the chosen subcommand is imported: each needs other extras.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from lightning_dct.__about__ import __version__
from lightning_dct.config import UsageError

COMMANDS: dict[str, str] = {
    "plan": "Bytes, time and memory of a run, for each exchange, before it starts.",
    "dashboard": "A W&B workspace of bytes, residuals and quality, or its JSON.",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one subcommand, by default that of the process's own command line, and return the exit status."""
    words = sys.argv[1:] if words is None else list(words)
    parser = argparse.ArgumentParser(prog="lightning-dct", description="Tools for training with strategy='dct'.")
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
    try:
        return int(arguments.run(arguments))
    except ModuleNotFoundError as error:
        reason = f"the package {error.name!r} is missing: pip install '.[experiments]' in a clone of lightning_dct"
    except UsageError as error:
        reason = str(error)
    print(f"lightning-dct {arguments.command}: {reason}", file=sys.stderr)
    return 1
