"""train.py under torchrun, which starts every rank by itself: two processes, one folder, one result."""

import json
import os
import subprocess
import sys
from pathlib import Path

from distributed.harness import free_port

SCRIPT = Path(__file__).parents[2] / "experiments" / "train.py"
LM = (
    *("experiment=lm", "data.context_length=16", "data.eval_batch_size=512", "model.width=16", "model.num_layers=1"),
    *("trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.accelerator=cpu"),
)


def torchrun(folder: Path, *overrides: str) -> str:
    """Train with two processes in ``folder``; what they print."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "RUN_STARTED")}
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous, str(SCRIPT), *overrides],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_ranks_share_one_folder_and_one_result(tmp_path: Path) -> None:
    """Oracle: of each thing a run writes there is one, and what Hydra says of the run is rank 0's."""
    output = torchrun(tmp_path, *LM)
    assert output.count("compression ratio, against dense fp32") == 1
    assert output.count("Synchronisation, rank 0") == 1
    (run,) = tmp_path.glob("outputs/lm/*")
    figures = json.loads((run / "result.json").read_text())
    assert figures["world_size"] == 2
    assert figures["steps"] == 4
    assert figures["overrides"] == list(LM)
    assert [file.name for file in tmp_path.rglob("result.json")] == ["result.json"]
    assert [file.name for file in tmp_path.rglob("metrics.csv")] == ["metrics.csv"]
    assert [file.name for file in tmp_path.rglob("*.ckpt")] == ["latest.ckpt"]
    # The checkpoint has the compression state of both ranks beside it.
    assert len(list((run / "checkpoints" / "latest.ckpt.dct").rglob("*.pt"))) == 2
    hydra = (run / ".hydra" / "hydra.yaml").read_text()
    assert "name: train\n" in hydra
    assert "train_ddp_process" not in hydra
