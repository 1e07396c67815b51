"""Runs scripts on ranks that are already there: no seconds go by until processes have started."""

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from distributed.harness import Ranks

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TRAIN = EXPERIMENTS / "train.py"


def train_on_ranks(ranks: Callable[[int], Ranks], folder: Path, *overrides: str) -> str:
    """Run ``train.py`` in ``folder`` with two processes on CPUs, as torchrun does; what both print."""
    arguments = (*overrides, "trainer.devices=2", "trainer.accelerator=cpu")
    return "".join(ranks(2).run(run_here, str(TRAIN), arguments, str(folder)))


def run_here(script: str, arguments: tuple[str, ...], folder: str) -> str:
    """Run ``python script arguments`` in this process and give what it prints; its traces here are removed.

    Nothing is downloaded, and nobody is logged in to W&B.
    """
    printed = io.StringIO()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "PL_"))}
    # Hydra would print an error and exit. Nothing listens at that port.
    environment |= {"HYDRA_FULL_ERROR": "1", "NETRC": f"{folder}/netrc", "https_proxy": "http://127.0.0.1:9"}
    with (
        patch.dict(os.environ, environment, clear=True),
        patch.object(sys, "argv", [script, *arguments]),
        patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(),
        _logging_to(printed),
        _working_in(folder),
    ):
        warnings.simplefilter("default")
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _logging_to(printed: io.StringIO) -> Iterator[None]:
    """Lightning's log in what is printed; Hydra's files are closed at the end."""
    loggers = [logging.getLogger(name) for name in (None, "lightning.pytorch", "lightning.fabric")]
    before = [(list(logger.handlers), logger.level) for logger in loggers]
    for logger in loggers[1:]:
        logger.handlers[:] = [logging.StreamHandler(printed)]
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in loggers[0].handlers:
            if handler not in before[0][0]:
                handler.close()
        for logger, (handlers, level) in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)
