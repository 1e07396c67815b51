"""Launchers whose processes end with fit refuse tables before they train."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import lightning_dct, sys, torch
from lightning.pytorch import Trainer
from embedding.hybrid import Hybrid, batches

class Late(Hybrid):
    def __init__(self):
        super().__init__({})
        self.made = self.tables
        del self.tables

    def configure_model(self):
        self.tables = self.made

    def on_train_start(self):
        print("it trains")

if __name__ == "__main__":
    model = Late() if sys.argv[2] == "late" else Hybrid({})
    trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    trainer.fit(model, batches(2))
"""


@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize(("strategy", "made"), [("dct_spawn", "early"), ("dct_fork", "late")])
def test_tables_are_refused_before_training(tmp_path: Path, strategy: str, made: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{SCRIPT}"
    )
    ended = subprocess.run(
        [sys.executable, script, strategy, made], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode != 0
    assert "it trains" not in ended.stdout
    assert "Train them in a script with `strategy='dct'`" in ended.stderr
