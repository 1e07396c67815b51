"""Trains with libraries that bring their own LightningModules, under `ddp` and `dct`: `make
test-libraries`.

Each fits on two ranks, saves, loads and predicts. Ends with a table, and with 1 if one has failed
or its loss under `dct` is more than a tenth above that under `ddp`: these runs are far too short to
say more.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

LIBRARIES = {
    "chemprop": "molecules.py",
    "pytorch-forecasting": "forecasts.py",
    "darts": "series.py",
}
STRATEGIES = ("ddp", "dct")
ALLOWED = 1.1
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run all, print the table, and return how it went."""
    table = Table("library", "loss, ddp", "loss, dct", "fewer bytes")
    status = 0
    for library, script in LIBRARIES.items():
        found = [outcome(script, strategy) for strategy in STRATEGIES]
        if None in found:
            table.add_row(library, *("failed" if one is None else "" for one in found))
            status = 1
            continue
        dense, compressed = found
        status |= int(compressed["loss"] > ALLOWED * dense["loss"])
        losses = [f"{one['loss']:.4f}" for one in found]
        table.add_row(library, *losses, f"{compressed['ratio']:.0f}x")
    Console().print(table)
    return status


def outcome(script: str, strategy: str) -> dict | None:
    """What a training has found; None if it has failed, which it has printed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcome.json"
        command = [sys.executable, "-W", "ignore", str(HERE / script), strategy, str(output)]
        paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode != 0 or not output.exists():
            print(f"{script} under {strategy}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            return None
        return json.loads(output.read_text())


if __name__ == "__main__":
    sys.exit(main())
