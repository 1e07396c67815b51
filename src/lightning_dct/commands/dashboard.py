"""``lightning-dct dashboard``: a W&B workspace of bytes, residuals and quality."""

import argparse
import os
from pathlib import Path

from lightning_dct.commands import writing
from lightning_dct.config import UsageError
from lightning_dct.report.workspace import BEGINNING, QUALITY, make_workspace, push, to_json


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
    with writing(output, BEGINNING, "the JSON of a dashboard"):
        output.write_text(text)
    print(output)
    return 0
