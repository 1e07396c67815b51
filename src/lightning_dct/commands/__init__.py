"""The command ``lightning-dct``: each module here is one subcommand.

A module has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status. A UsageError and a missing
package end it with a line and status 1. Only the module of the chosen subcommand is imported: each needs other extras.
"""

import argparse
import importlib
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_dct.__about__ import __version__
from lightning_dct.config import UsageError

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
    try:
        return int(arguments.run(arguments))
    except ModuleNotFoundError as error:
        reason = f"the package {error.name!r} is missing: pip install '.[experiments]' in a clone of lightning_dct"
    except UsageError as error:
        reason = str(error)
    print(f"lightning-dct {arguments.command}: {reason}", file=sys.stderr)
    return 1


@contextmanager
def writing(file: Path, beginning: bytes, kind: str) -> Iterator[None]:
    """Surround the code that writes ``--output``, and have errors name that option.

    Nothing is overwritten but an empty file or one of the command's own: no log, checkpoint or folder. Its own are a
    ``kind`` of file, and have this ``beginning`` in lower case and without white space.

    Raises:
        UsageError: Something else is there, or the file cannot be read or written.
    """
    try:
        if file.exists() and not file.is_file():
            what = "this is a folder" if file.is_dir() else "this cannot be replaced"
            raise UsageError(f"--output {file}: {what}; name a file")
        with file.open("rb") if file.exists() else io.BytesIO() as content:
            found = b"".join(content.read(4 * len(beginning)).split()).lower()
            if found[: len(beginning)] != beginning and (found or content.read(1)):
                raise UsageError(
                    f"--output {file}: this file is not {kind}, and its content would be lost. Name another file, or"
                    " remove it"
                )
        yield
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror}") from error
