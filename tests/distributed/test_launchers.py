"""Ranks started in every way that Lightning knows end well and print the table once (torchrun: test_torchrun.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.harness import free_port

# Far more than they take on a quiet machine.
TIMEOUT_S = 240
SCRIPT = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_dct

if __name__ == "__main__":
    strategy, devices, nodes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    model.layer = torch.nn.Linear(32, 300)
    trainer.fit(model)
"""
LAUNCHER_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    *("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)


def start(folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", **variables}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs_of(*processes: subprocess.Popen[str], typed: str = "") -> list[str]:
    """What they print, given what is typed, once all of them have ended well."""
    try:
        outputs = [process.communicate(typed, timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def assert_one_table(output: str) -> None:
    assert output.count("Synchronisation, rank 0") == 1
    for row in ("ranks", "optimizer steps synchronised", "bytes sent", "compression ratio", "entries kept"):
        assert output.count(f"\n{row} ") == 1, output
    (ranks,) = (line for line in output.splitlines() if line.startswith("ranks "))
    assert "2" in ranks
    (steps,) = (line for line in output.splitlines() if "optimizer steps synchronised" in line)
    assert "3" in steps
    (kept,) = (line for line in output.splitlines() if "entries kept" in line)
    assert "of 29,700" in kept  # exchanged after every step, as training warms up
    assert "100%" not in kept


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("strategy", ["dct", "dct_spawn", "dct_fork"])
def test_lightning_launches(tmp_path: Path, script: str, strategy: str) -> None:
    """Oracle: exit status 0, and one table that says 2 ranks and 3 steps."""
    (output,) = outputs_of(start(tmp_path, [sys.executable, script, strategy, "2", "1"]))
    assert_one_table(output)


def test_two_nodes_launch(tmp_path: Path, script: str) -> None:
    """Oracle: as above, the table from the first node only."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, script, "dct", "1", "2"]
    first, second = outputs_of(*(start(tmp_path, command, NODE_RANK=str(node), **address) for node in range(2)))
    assert_one_table(first)
    assert "Synchronisation" not in second
