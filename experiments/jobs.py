"""Starts ``train.py`` as a process of its own, in a folder of its own, and ends all its processes.

A run sets environment variables, opens a process group and starts other ranks, to which Lightning
gives the same command line. With a process for each run, these settings end with it, and no rank
can start other runs again.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from hydra.core.hydra_config import HydraConfig

TRAIN = Path(__file__).with_name("train.py")
ON_HOSTS = Path(__file__).with_name("network") / "train_on_hosts.py"

# How long processes may take to end once they are asked to, or once rank 0 has ended.
_GRACE_S = 15.0
_POLL_S = 0.05
_HYDRA_SETTING = re.compile(r"[+~]*hydra[./]")
_SETTING_OF_A_SWEEP = re.compile(r"[+~]*hydra[./](mode|run|sweep|sweeper|launcher)\b")


def goes_on(command: Callable[..., int]) -> Callable[..., int]:
    """Have a command that keeps its results say, when it is interrupted, that it can be
    continued.
    """

    @functools.wraps(command)
    def run(*arguments: object) -> int:
        try:
            return command(*arguments)
        except KeyboardInterrupt:
            print("Stopped. The same command goes on from here.")
            return 128 + signal.SIGINT

    return run


def is_hydra_setting(override: str) -> bool:
    """Whether an override is a setting of Hydra itself, as ``hydra.run.dir=x``."""
    return _HYDRA_SETTING.match(override) is not None


def train_command(
    words: list[str], folder: Path, hosts: Sequence[str] = (), ranks: int = 0
) -> list[str]:
    """The command line of one run: Hydra's options, then overrides, then the folder for all that
    the run writes.

    With ``hosts``, the options of ``train_on_hosts.py``, its ranks run on hosts made of network
    namespaces. With ``ranks``, torchrun starts so many at once. Otherwise Lightning starts the
    others when the first is ready to train.
    """
    # In quotes, because a folder's name may have characters of Hydra's grammar, such as `=` and
    # `,`.
    quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    script = [str(ON_HOSTS), *hosts] if hosts else [str(TRAIN)]
    together = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks
        else []
    )
    return [sys.executable, *together, *script, *words, f"hydra.run.dir='{quoted}'"]


def run_alone(command: list[str], output: IO[str] | None = None, folder: Path | None = None) -> int:
    """Run a command, and end all processes it has started before this returns or raises.

    The command gets a session of its own, so that its processes are known by their group. Ctrl-C,
    SIGTERM and a closed terminal end them too. The exit status is negative when a signal has ended
    the process.
    """
    with _signals_as_exits():
        errors = None if output is None else subprocess.STDOUT
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, cwd=folder, start_new_session=True
        )
        try:
            return process.wait()
        except BaseException:
            _signal_group(process, signal.SIGTERM)
            raise
        finally:
            try:
                # The other ranks end on their own, a moment after rank 0.
                _wait_for_group(process)
            finally:
                _signal_group(process, signal.SIGKILL)
                _wait_for_group(process)


def run_job_of_sweep() -> None:
    """Do one job of Hydra's ``--multirun``: a single run with the job's overrides, in the job's
    folder.

    Raises:
        RuntimeError: The run has failed, or torchrun has started this process: every rank would run
            a sweep.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "--multirun under torchrun: every rank would run a sweep. Leave torchrun out (Lightning"
            " starts the ranks of each job), or start one run after the other."
        )
    hydra = HydraConfig.get()
    # Settings of Hydra itself hold for the job too, except those that make it a sweep.
    settings = [
        override for override in hydra.overrides.hydra if not _SETTING_OF_A_SWEEP.match(override)
    ]
    # Options come first: Lightning adds overrides to the end of this line for the other ranks.
    options = ["--config-name", str(hydra.job.config_name)]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            options += ["--config-dir", source.path]
    command = train_command(
        [*options, *hydra.overrides.task, *settings], Path(hydra.runtime.output_dir)
    )
    sys.stdout.flush()
    status = run_alone(command, folder=Path(hydra.runtime.cwd))
    if status != 0:
        raise RuntimeError(
            f"job {hydra.job.num} has failed with exit status {status}; it has printed why"
        )


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Make the signals that end a process raise an exception, so that it can end its children
    first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # A signal that is ignored, such as SIGHUP under nohup, stays ignored.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait_for_group(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process and all others of its group have ended, or the grace time is over."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        process.poll()
        # The first process of a container inherits the orphans of a run, and must reap them.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-process.pid, os.WNOHANG)
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)
