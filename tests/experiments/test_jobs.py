"""Runs as processes of their own: those of a sweep, and that nothing of any of them is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import jobs
from compare import main
from distributed.harness import free_port
from distributed.scripts import EXPERIMENTS, TRAIN
from jobs import is_hydra_setting, run_alone, train_command

LM = (
    *(
        "experiment=lm",
        "data=documentation",
        "data.context_length=16",
        "data.eval_batch_size=512",
        "model.width=16",
        "model.num_layers=1",
    ),
    *(
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
    ),
    *("+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1"),
)


def is_running(process: int) -> bool:
    """Whether a process is there and alive: a container without an init keeps dead ones listed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def processes_that_name(text: str) -> list[bytes]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes())
        except OSError:  # It has ended meanwhile.
            continue
    return [line for line in lines if text.encode() in line]


@pytest.mark.usefixtures("quick_python")
def test_a_sweep_starts_the_ranks_of_each_job_once(tmp_path: Path) -> None:
    """Two jobs, of which the first fails.

    Oracle: what each job has left, and what the whole has printed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    environment["MASTER_PORT"] = str(free_port())  # see scripts.py
    completed = subprocess.run(
        [
            sys.executable,
            str(TRAIN),
            "-m",
            *LM,
            "strategy.density=7,0.1",
            "hydra.sweep.dir=the sweep",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    printed = completed.stdout + completed.stderr
    assert completed.returncode != 0
    assert "`density` is the share of entries" in printed
    assert "job 0 has failed with exit status 1" in printed
    sweep = tmp_path / "the sweep"
    assert list(sweep.rglob("result.json")) == [sweep / "1" / "result.json"]
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").rglob("*.ckpt"))
    figures = json.loads((sweep / "1" / "result.json").read_text())
    assert figures["overrides"] == [*LM, "strategy.density=0.1"]
    assert figures["world_size"] == 2
    assert figures["steps"] == 2
    hydra = yaml.safe_load((sweep / "1" / ".hydra" / "hydra.yaml").read_text())["hydra"]
    assert hydra["mode"] == "RUN"
    assert hydra["runtime"]["output_dir"] == str(sweep / "1")
    assert printed.count("GLOBAL_RANK: 0, MEMBER: 1/2") == 1
    assert printed.count("GLOBAL_RANK: 1, MEMBER: 2/2") == 1
    assert processes_that_name(str(tmp_path)) == []

    assert main(["--collect", str(sweep)]) == 1, "a job of the sweep has no result"
    table = (sweep / "table.md").read_text()
    assert len([line for line in table.splitlines() if line.startswith("| dct | 1 |")]) == 1
    assert f"{sweep / '0'} has left no result.json" in table


def test_processes_that_outlive_a_run_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_GRACE_S", 0.2)
    assert run_alone(["sh", "-c", "sleep 300 & echo $! > left; exit 3"], folder=tmp_path) == 3
    left = int((tmp_path / "left").read_text())
    # Killed, but a busy machine has not got to it; the test's own timeout ends this.
    while is_running(left):
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_whoever_ends_a_sweep_ends_its_job(number: signal.Signals, tmp_path: Path) -> None:
    script = """if True:
        import jobs, pathlib, subprocess

        class Process(subprocess.Popen):
            def wait(self, *arguments):
                pathlib.Path("waits").touch()
                return super().wait(*arguments)

        jobs.subprocess.Popen = Process
        jobs.run_alone(["sh", "-c", "echo $$ > job.part; mv job.part job; exec sleep 300"])
        """
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXPERIMENTS)},
        # Shells let what they start in the background ignore Ctrl-C, nohup SIGHUP, and what that
        # starts in turn.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    # Started, and waited for: a signal within Popen itself, which may take its time, would leave
    # the job behind.
    while not ((tmp_path / "job").exists() and (tmp_path / "waits").exists()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(600) in (128 + number, -number)
    assert not is_running(int((tmp_path / "job").read_text()))


def test_handlers_of_signals_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_alone(["true"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_folder_with_odd_characters_stays_one_override(tmp_path: Path) -> None:
    folder = tmp_path / "it's a=1,b=2"
    *_, override = train_command(["experiment=lm"], folder)
    parsed = OverridesParser.create().parse_override(override)
    assert parsed.key_or_group == "hydra.run.dir"
    assert parsed.value() == str(folder)


def test_settings_of_hydra_are_known() -> None:
    assert is_hydra_setting("hydra.verbose=true")
    assert is_hydra_setting("+hydra/launcher=joblib")
    assert not is_hydra_setting("data.path=hydra.txt")
