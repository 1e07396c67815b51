"""The command ``lightning-dct``: each module here is one subcommand.

A module has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status. Only the module of the
chosen subcommand is imported: each needs other extras.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dct.__about__ import __version__

COMMANDS: dict[str, str] = {
    "report": "One HTML page out of the logs of one or several runs.",
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
    return int(arguments.run(arguments))


def check_output(file: Path, beginning: bytes, kind: str) -> None:
    """Refuse to overwrite anything but an empty file or one of the command's own: a log, a checkpoint, a folder.

    Args:
        file: What would be written.
        beginning: What the command's own files begin with, in lower case and without white space.
        kind: What these files are, in words.

    Raises:
        ValueError: Something else is there.
        OSError: The file cannot be read.
    """
    if not file.exists():
        return
    if not file.is_file():
        raise ValueError(f"{'this is a folder' if file.is_dir() else 'this cannot be replaced'}; name a file")
    with file.open("rb") as content:
        found = b"".join(content.read(4 * len(beginning)).split()).lower()
        if found[: len(beginning)] != beginning and (found or content.read(1)):
            raise ValueError(f"this file is not {kind}, and its content would be lost. Name another file, or remove it")
