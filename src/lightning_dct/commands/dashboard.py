"""``lightning-dct dashboard``: a W&B workspace of bytes, residuals and quality."""

import argparse
import os
from pathlib import Path

from lightning_dct.callbacks.wandb_workspace import QUALITY, make_workspace, push, to_json
from lightning_dct.config import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add, environment = parser.add_argument, os.environ.get
    add("--project", default=environment("WANDB_PROJECT"), help="where the runs are (default: WANDB_PROJECT)")
    owner = "user or team that owns the project (default: WANDB_ENTITY, else your default entity)"
    add("--entity", default=environment("WANDB_ENTITY"), help=owner)
    add("--name", default="lightning_dct", help="name of the view (default: %(default)s)")
    keys = f"keys of the model's quality, the decisive one last (default: {' '.join(QUALITY)})"
    add("--quality", nargs="+", default=list(QUALITY), metavar="KEY", help=keys)
    add("--output", type=Path, metavar="FILE", help="write JSON to this file and send nothing; needs no login")


def run(arguments: argparse.Namespace) -> int:
    """Build the dashboard, and write it or save it in W&B."""
    entity, project, output = arguments.entity, arguments.project, arguments.output
    if not project:
        raise UsageError("which W&B project? Name it with `--project`, or set WANDB_PROJECT.")
    if output is None:
        print(push(entity, project, arguments.name, arguments.quality))
        return 0
    text = to_json(make_workspace(entity or "", project, arguments.name, arguments.quality))
    try:
        if output.exists() and not _may_be_replaced(output):
            raise UsageError(f"--output {output}: this is no dashboard; name another file or remove it")
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
