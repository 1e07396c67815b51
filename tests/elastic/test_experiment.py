"""The commands of the documentation, with elastic ranks."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from distributed.scripts import TRAIN, environment_of_users

START = TRAIN.parents[1] / "examples" / "elastic" / "start.py"
pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="torchft has wheels for some platforms only"
)


@pytest.mark.usefixtures("quick_python")
def test_an_experiment_trains_on_elastic_ranks(tmp_path: Path) -> None:
    """Oracle: both ranks meet in exchanges, and one result is written."""
    sizes = (
        "data=documentation",
        "data.context_length=32",
        "model.width=32",
        "model.num_layers=1",
        "logger=none",
    )
    steps = (
        "trainer.max_steps=24",
        "trainer.val_check_interval=24",
        "strategy.local_steps=4",
        "strategy.warmup_steps=8",
    )
    ours = ("experiment=lm", "strategy=dct_elastic", "trainer.devices=2", *sizes, *steps)
    command = [sys.executable, str(START), "2", str(TRAIN), *ours]
    environment = environment_of_users() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = list(tmp_path.glob("outputs/*/*/result.json"))
    assert len(results) == 1
    found = json.loads(results[0].read_text())
    assert (found["world_size"], found["steps"]) == (2, 24)
    assert "2 ranks are present: [0, 1]" in run.stdout + run.stderr
    assert found["compression_ratio"] > 1
    assert 0 < found["metrics"]["test/loss"] < 6
