"""The command for the first card does not rot: it runs here, on the CPU, with small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.usefixtures("quick_python")
def test_every_part_runs_and_finds_what_it_should(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(TESTS / "gpu_check.py"),
        "--output",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == []
    for name in ("updates, 1bit", "updates, bf16", "gradients, 1bit", "gradients, bf16, two_phase"):
        assert found["rows"][f"gloo, {name}: both ranks bitwise alike"] == "yes"
        assert found["rows"][f"gloo, {name}: bitwise as on the CPU"] == "yes"
    resumed = [text for what, text in found["rows"].items() if what.startswith("resumed run, ")]
    assert resumed == ["yes"]
    assert " launches" in found["rows"]["5,000 entries, 30%: pack + add 8 payloads"]
    assert all(what in done.stdout for what in found["rows"])
