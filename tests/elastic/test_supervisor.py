"""The supervisor with commands of the shell, and the launcher with functions instead of a trainer's."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from distributed.harness import TESTS, TIMEOUT_S
from lightning_dct.elastic import supervisor
from lightning_dct.elastic.launcher import RestartingLauncher
from lightning_dct.elastic.present import LIGHTHOUSE

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NODE_RANK", LIGHTHOUSE)}
DIES_ONCE = f'echo $LOCAL_RANK${supervisor.RESTARTED} >> started; test "${supervisor.RESTARTED}" || kill -9 $$'


def wait_for(found: Callable[[], bool], why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not found():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def supervise(folder: Path, *ranks: str, restarts: int = 3) -> subprocess.Popen[str]:
    """Start a supervisor of ranks, each a command of the shell; that of rank 0 is run only when it is restarted."""
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, str(writes)],
        stdin=subprocess.PIPE, text=True, pass_fds=(writes,), cwd=folder, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(writes)
    commands = [(["sh", "-c", command], None) for command in ranks]
    say(process, json.dumps({"commands": commands, "lighthouse": None, "restarts": restarts}))
    with os.fdopen(reads) as answer:
        answer.read()
    return process


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def started(folder: Path) -> list[str]:
    """The ranks that have started, with a 1 behind one that has started again."""
    path = folder / "started"
    return path.read_text().split() if path.exists() else []


def test_a_rank_that_leaves_ends_nobody_elses_run(tmp_path: Path) -> None:
    run = supervise(tmp_path, "", "touch left", f"until test -e left; do sleep 0.1; done; sleep 0.5; {DIES_ONCE}")
    wait_for(lambda: started(tmp_path) == ["2", "21"])
    say(run, "done")
    assert run.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("word", ["left", None], ids=str)
def test_ranks_are_restarted_after_the_first_process(word: str | None, tmp_path: Path) -> None:
    run = supervise(tmp_path, "echo 0 >> started", f"until test -e gone; do sleep 0.1; done; {DIES_ONCE}")
    assert run.stdin is not None
    if word:
        say(run, word)
    run.stdin.close()
    time.sleep(2.0)
    (tmp_path / "gone").touch()
    assert run.wait(TIMEOUT_S) == 0
    assert started(tmp_path) == (["1", "11"] if word else ["0", "1", "11"])


@pytest.mark.parametrize(("word", "finishes"), [("done", True), ("stop", False)])
def test_the_run_ends(word: str, finishes: bool, tmp_path: Path) -> None:
    run = supervise(tmp_path, "", f"echo 1 >> started; sleep {3 if finishes else TIMEOUT_S}; touch end; kill -9 $$")
    wait_for(lambda: started(tmp_path) == ["1"])
    say(run, word)
    assert run.wait(TIMEOUT_S) == 0
    assert started(tmp_path) == ["1"]
    assert (tmp_path / "end").exists() == finishes


# Rank 1 dies in the second function, where rank 0 does what ``HOW`` says.
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_dct.elastic.launcher import RestartingLauncher
from elastic.test_supervisor import wait_for

def launch(function):
    launcher = RestartingLauncher(LightningEnvironment(), 2, 1, 10.0, 3)
    return launcher.launch(lambda: function(launcher))

def fit(launcher):
    rank, again = os.environ["LOCAL_RANK"], os.environ.get("{supervisor.RESTARTED}", "")
    with open("started", "a") as file:
        print(rank + again, os.getpid(), file=file)
    if rank == "1":
        if not again:
            if HOW != "goes on":
                wait_for(Path("go").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return
    wait_for(lambda: "1 " in Path("started").read_text())
    if HOW == "fails":
        raise RuntimeError("rank 0 fails")
    if HOW == "leaves":
        launcher.kill(signal.SIGTERM)
        raise SIGTERMException
    wait_for(lambda: "11 " in Path("started").read_text())

launch(lambda _: None)
launch(fit)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``script("fails")``: two ranks that run ``SCRIPT``."""
    made: list[subprocess.Popen[str]] = []

    def start(how: str, **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(f"HOW = {how!r}\n{SCRIPT}"))
        path = f"{TESTS.parent / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        made.append(
            subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py")],
                cwd=tmp_path,
                text=True,
                stdin=subprocess.DEVNULL,
                env={**ENVIRONMENT, LIGHTHOUSE: "http://127.0.0.1:1", "PYTHONPATH": path, **environment},
                start_new_session=True,
            )
        )
        return made[-1]

    yield start
    for one in made:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)  # those that it has started, too


def test_a_rank_that_dies_in_a_second_function_is_restarted(
    script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert script("goes on").wait(TIMEOUT_S) == 0
    assert [row.split()[0] for row in (tmp_path / "started").read_text().splitlines()].count("11") == 1


def test_all_end_if_the_first_fails_in_a_second_function(
    script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert script("fails").wait(TIMEOUT_S) == 1
    rows = [row.split() for row in (tmp_path / "started").read_text().splitlines()]
    other = next(Path("/proc") / pid for rank, pid in rows if rank == "1")
    wait_for(lambda: not other.exists())


def test_the_first_rank_leaves_and_the_others_go_on(
    script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert script("leaves").wait(TIMEOUT_S) == 0
    (tmp_path / "go").touch()
    wait_for(lambda: "11 " in (tmp_path / "started").read_text())
    assert "01 " not in (tmp_path / "started").read_text()


@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft has wheels for some platforms only")
def test_an_empty_address_is_none_and_a_failed_start_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: int) -> None:
        raise RuntimeError("no threads")

    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # it is restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv(LIGHTHOUSE, "")
    monkeypatch.setattr("lightning_dct.elastic.launcher.set_num_threads_if_needed", fail)
    monkeypatch.setattr(RestartingLauncher, "_supervisor", None)
    with pytest.raises(RuntimeError, match="no threads"):
        RestartingLauncher(LightningEnvironment(), 1, 1, 10.0, 3).launch(str)
    assert os.environ[LIGHTHOUSE].startswith("http://127.0.0.1:")
    assert RestartingLauncher._supervisor is not None
    assert RestartingLauncher._supervisor.wait(TIMEOUT_S) == 0
