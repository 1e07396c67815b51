"""Trains the same experiment under several synchronisations, one after the other, and sets the results side by side.

    python experiments/compare.py experiment=lm --strategy ddp --strategy "dct strategy.density=0.001"

Each run is a ``train.py`` of its own, in its own folder below ``--output``. A run that has left its ``result.json``
there is not repeated, so a comparison that was stopped goes on where it was. The table is printed and written as
``table.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("train.py")


def run(common: list[str], strategy: str, folder: Path) -> dict[str, Any]:
    """Train once, unless the folder holds the result already.

    Args:
        common: Hydra overrides of all runs.
        strategy: A file of ``conf/strategy`` and overrides that go with it, separated by blanks.
        folder: Where the run leaves everything it writes.

    Returns:
        What ``result.json`` says.

    Raises:
        subprocess.CalledProcessError: The run failed; it has printed why.
    """
    result = folder / "result.json"
    if not result.exists():
        name, *settings = strategy.split()
        overrides = [*common, f"strategy={name}", *settings, f"hydra.run.dir={folder.resolve()}"]
        subprocess.run([sys.executable, str(TRAIN), *overrides], check=True)
    return json.loads(result.read_text())


def tabulate(results: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Lay results out as a table.

    Args:
        results: What ``result.json`` says, by strategy.

    Returns:
        The heads of the columns, and the rows.
    """
    names = list(dict.fromkeys(name for result in results.values() for name in result["metrics"]))
    # Where a test part was scored, validation only steered the run.
    metrics = [name for name in names if name.startswith("test/")] or names
    # Where a model is split, what crosses inside it has its own columns.
    split = any(result["split_ratio"] is not None for result in results.values())
    heads = ["strategy", *metrics, "ratio", "kB sent a step"]
    heads += [*(["inside ratio", "inside kB a step"] if split else []), "ms a step"]
    rows = []
    for strategy, result in results.items():
        figures = [_text(result["metrics"].get(name), "{:.4f}") for name in metrics]
        sent = result["bytes_sent_per_step"]
        figures += [
            _text(result["compression_ratio"], "{:.1f}x"),
            _text(None if sent is None else sent / 1000, "{:,.1f}"),
        ]
        if split:
            inside = result["split_bytes_per_step"]
            figures += [
                _text(result["split_ratio"], "{:.1f}x"),
                _text(None if inside is None else inside / 1000, "{:,.1f}"),
            ]
        figures += [
            _text(result["milliseconds_per_step"], "{:.1f}"),
        ]
        rows.append([strategy.replace("strategy.", ""), *figures])
    return heads, rows


def main() -> None:
    """Run everything, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+", help="what all runs share, as in experiment=lm trainer.max_steps=500")
    parser.add_argument("--strategy", action="append", required=True, help='as in "dct strategy.density=0.001"')
    parser.add_argument("--output", type=Path, help="folder of the runs (default: outputs/compare/<overrides>)")
    arguments = parser.parse_args()
    output = arguments.output or Path("outputs/compare") / _slug(" ".join(arguments.overrides))

    console = Console()
    results = {}
    for number, strategy in enumerate(arguments.strategy, start=1):
        console.rule(f"Run {number} of {len(arguments.strategy)}: {strategy}")
        results[strategy] = run(arguments.overrides, strategy, output / _slug(strategy))

    heads, rows = tabulate(results)
    world_size = next(iter(results.values()))["world_size"]
    title = f"{' '.join(arguments.overrides)}, {world_size} processes"
    table = Table(title=title, caption="ratio: bytes of the dense fp32 all-reduce over bytes sent, each rank")
    for head in heads:
        table.add_column(head, justify="left" if head == "strategy" else "right", no_wrap=head == "strategy")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    (output / "table.md").write_text("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")


def _slug(text: str) -> str:
    # No equals sign: Hydra would read the folder's name as another override.
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def _text(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


if __name__ == "__main__":
    main()
