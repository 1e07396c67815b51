"""torchrun starts a job again after one of its ranks was killed, and it goes on from the last
checkpoint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak_training.py")
STEPS = 9
KILL_AT = 5


@pytest.mark.usefixtures("quick_python")
def test_killed_rank_under_torchrun(tmp_path: Path) -> None:
    """Oracle: all steps are made, resumed from the checkpoint before the kill; no gradient is lost,
    by plain sums.
    """
    rendezvous = ["--standalone", "--max-restarts", "1"]
    arguments = [str(tmp_path), str(STEPS), str(KILL_AT)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            *rendezvous,
            str(SCRIPT),
            *arguments,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Rank 1 (process " in output
    assert "has died" in output
    assert "Restored all states from the checkpoint" in output
    assert "last.ckpt" in output
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == STEPS
    assert result["lost"] < 1e-12
