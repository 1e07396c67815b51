"""Runs scripts where Lightning is imported already, on ranks or in a new process: that saves
seconds of each start.
"""

import contextlib
import io
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from textwrap import dedent
from unittest.mock import patch

from distributed.harness import CONTEXT, Ranks, elastic_environment, free_port, started

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TRAIN = EXPERIMENTS / "train.py"
# Far more than any script takes on a quiet machine.
TIMEOUT_S = 600.0


def environment_of_users() -> dict[str, str]:
    """Without what a launcher sets."""
    set_by_launchers = elastic_environment(0, 1, 0).keys()
    return {
        key: value
        for key, value in os.environ.items()
        if key not in set_by_launchers and key[:3] != "PL_"
    }


class Script:
    """``python script.py arguments`` in ``folder``: a process of its own, which may start
    others.
    """

    def __init__(self, folder: Path, source: str, *arguments: str, **variables: str) -> None:
        (folder / "script.py").write_text(dedent(source))
        self._output, theirs = CONTEXT.Pipe(duplex=False)
        # Lightning would choose one that the kernel gives to whoever asks first.
        port = {"MASTER_PORT": str(free_port())}
        environment = environment_of_users() | port | variables
        self._process = started(_run_script, folder, arguments, environment, theirs, sys.executable)
        theirs.close()

    def is_running(self) -> bool:
        return bool(self._process.is_alive())

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> tuple[int, str]:
        """Its exit status and what is printed, once it and all that it has started have ended."""
        printed = b""
        while wait([self._output], TIMEOUT_S):
            if not (more := os.read(self._output.fileno(), 1 << 16)):
                break
            printed += more
        else:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        return self._process.exitcode, printed.decode(errors="replace")


def _run_script(
    folder: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    output: Connection,
    python: str,
) -> None:
    os.setsid()
    sys.executable = python
    multiprocessing.set_executable(python)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(folder / "script.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def train_on_ranks(ranks: Callable[[int], Ranks], folder: Path, *overrides: str) -> str:
    """Run ``train.py`` in ``folder`` with two processes on CPUs, as torchrun does; what both
    print.
    """
    arguments = (*overrides, "trainer.devices=2", "trainer.accelerator=cpu")
    return "".join(ranks(2).run(run_here, str(TRAIN), arguments, str(folder)))


def run_here(script: str, arguments: tuple[str, ...], folder: str, **variables: str) -> str:
    """Run ``python script arguments`` in this process and give what it prints; its traces here are
    removed.

    Nothing is downloaded, and nobody is logged in to W&B. When it ends with an error, it prints.
    """
    printed = io.StringIO()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "PL_")) or name == "WANDB__SERVICE_WAIT"
    }
    # Hydra would print an error and exit. Nothing listens at that port.
    environment |= {
        "HYDRA_FULL_ERROR": "1",
        "NETRC": f"{folder}/netrc",
        "https_proxy": "http://127.0.0.1:9",
    }
    environment |= variables
    try:
        _run_within(script, arguments, folder, environment, printed)
    except BaseException as ending:
        if not isinstance(ending, SystemExit) or ending.code:
            print(printed.getvalue(), file=sys.stderr)
            raise
    return printed.getvalue()


def _run_within(
    script: str,
    arguments: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    printed: io.StringIO,
) -> None:
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
