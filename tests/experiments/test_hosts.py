"""Experiments on hosts made of network namespaces: skipped where these cannot be made."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from network.hosts import HEADER_BYTES, Host, make_hosts
from network.ledger import OTHER, SET_UP, STEPS, Sent
from network.running import HostFailedError, run_on
from network.train_on_hosts import conclude, words_for

SCRIPT = Path(__file__).parents[2] / "experiments" / "network" / "train_on_hosts.py"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        making = make_hosts(2)
        made = making.__enter__()
    except RuntimeError as error:
        pytest.skip(str(error))
    yield made
    making.__exit__(None, None, None)


def processes_on(host: Host) -> str:
    return subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_host_that_fails_is_named_and_the_others_are_stopped(
    hosts: list[Host], tmp_path: Path
) -> None:
    # In a session of its own, as torchrun's workers are: a signal to the command does not reach it.
    waits = [
        "sh",
        "-c",
        f"echo first; setsid --fork sleep 300; touch '{tmp_path}/waits'; sleep 300",
    ]
    fails = [
        "sh",
        "-c",
        f"until test -e '{tmp_path}/waits'; do sleep 0.1; done; echo broken >&2; exit 3",
    ]
    lines: list[str] = []
    with pytest.raises(
        HostFailedError, match=re.escape(f"Host 1 ({hosts[1].address}) ended with exit status 3")
    ) as no:
        run_on(hosts, [waits, fails], {}, lines.append)
    assert str(no.value).endswith("broken\n")
    assert lines == ["first\n"]
    # Killed, but a busy machine has not got to it: see test_jobs.py.
    while any(processes_on(host) for host in hosts):
        time.sleep(0.05)


LISTENS = """
host.enter()
with socket.create_server((host.address, 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()
"""
CALLS = """
host.enter()
try:
    socket.create_connection((sys.argv[3], int(sys.argv[4])), timeout=2.0)
    print("connected")
except TimeoutError:
    print("nobody answers")
"""


def program(script: str, host: Host, *words: str) -> subprocess.Popen[str]:
    """A process, which knows a host."""
    script = (
        f"import socket, sys; from network.hosts import Host; host = Host(*sys.argv[1:3])\n{script}"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, "-c", script, str(host.namespace), host.address, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_process_enters_a_host_whose_cable_can_be_pulled_out(hosts: list[Host]) -> None:
    with program(LISTENS, hosts[0]) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()

        def reaches() -> str:
            return program(CALLS, hosts[1], hosts[0].address, port).communicate()[0].strip()

        assert reaches() == "connected"
        hosts[1].plug(False)
        assert reaches() == "nobody answers"
        hosts[1].plug(True)
        assert reaches() == "connected"
        server.kill()


def test_under_sudo_commands_are_the_users_own(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", "65534")
    monkeypatch.setenv("SUDO_GID", "65534")
    lines: list[str] = []
    run_on(hosts, [["id", "-u"], ["true"]], {}, lines.append)
    assert lines == ["65534\n"]


@pytest.mark.usefixtures("quick_python")
def test_hybrid_dlrm_sends_what_it_counts(hosts: list[Host], tmp_path: Path) -> None:
    """Oracle: the interfaces.

    What they send beyond is gloo's framing, less than 2.5 kB a step and rank.

    In most of these first steps ranks also measure coherence, or average second moments, in
    collectives of their own.
    """
    overrides = [
        *(
            "experiment=dlrm",
            "model.tables=sharded",
            "strategy=dct",
            "strategy.density=0.2",
            "logger=none",
        ),
        *(
            "+strategy.broadcast_buffers=false",
            "trainer.max_steps=25",
            "+trainer.limit_val_batches=0",
            "test=false",
        ),
        *("data.table_rows=[5000,5000,5000,5000]", "data.batch_size=256", "model.embedding_dim=64"),
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PL_GLOBAL_SEED", "RUN_STARTED")
    }
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "--hosts", "2", *overrides],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (more,) = re.findall(
        r"times what was counted: (-?[\d,]+) bytes more a step and host", completed.stdout
    )
    assert 0 <= int(more.replace(",", "")) < 2500
    (result,) = tmp_path.glob("outputs/dlrm/*/result.json")
    figures = json.loads(result.read_text())
    assert figures["world_size"] == 2
    assert figures["split_bytes_per_step"] > 0
    assert completed.stdout.count("compression ratio, against dense fp32") == 1


def test_steps_of_training_are_compared_alone() -> None:
    step = Sent(
        steps=10,
        gradients=700,
        inside=300,
        evaluation=0,
        frames=1100 + 20 * HEADER_BYTES,
        packets=20,
    )
    other = Sent(evaluation=5, frames=10**6, packets=1)
    both = conclude([{SET_UP: other, STEPS: step, OTHER: other}] * 2)
    assert "sent 1.1000 times what was counted: 10 bytes more a step and host" in both
    assert "No step was compared" in conclude([{SET_UP: other, STEPS: Sent(), OTHER: other}] * 2)


@pytest.mark.parametrize("override", ["trainer.devices=2", "trainer.num_nodes=3"])
def test_what_the_launcher_sets_is_refused(override: str) -> None:
    with pytest.raises(ValueError, match=f"`{override}`: leave it out; `--hosts 2` sets"):
        words_for(2, ["experiment=lm", override], Path("/tmp"), 5)
