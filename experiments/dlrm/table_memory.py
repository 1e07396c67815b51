"""Peak memory of ranks that share large embedding tables: while making, training, saving and loading them.

    python experiments/dlrm/table_memory.py --gigabytes 4

Ranks are processes under torchrun. One run trains a few steps on 2 of them and saves; others load that checkpoint on
1, 3 and 4 and compare rows with what was saved. Peaks are the kernel's (``VmHWM``), reset before each part; what torch
and Lightning take by themselves is shown beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_dct import DCTStrategy, RowWiseAdagrad, ShardedEmbeddingBags

DIM = 64
# Shares of all rows: one table larger than any rank's share, some that fit, a small one.
TABLE_SHARES = (0.6, 0.2, 0.15, 0.05)
STEPS = 5
SAMPLES = 512
PROBES = 200


def table_rows(gigabytes: float) -> list[int]:
    """Rows of the tables that take so many decimal gigabytes in fp32."""
    return [int(share * gigabytes * 1e9 / (4 * DIM)) for share in TABLE_SHARES]


class Batches(IterableDataset):
    """Random look-ups, the same on every run."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = torch.tensor(rows)

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        for _ in range(STEPS):
            yield (torch.rand(SAMPLES, len(self.rows), generator=generator, dtype=torch.float64) * self.rows).long()


class Model(LightningModule):
    """Tables and a linear layer; notes its peak memory after each part."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.rows = rows
        self.peaks: dict[str, float] = {}
        self.tables: ShardedEmbeddingBags | None = None
        self.output = nn.Linear(len(rows) * DIM, 1)

    def configure_model(self) -> None:
        if self.tables is None:
            self.peaks["before"] = current_gigabytes()
            reset_peak()
            self.tables = ShardedEmbeddingBags(self.rows, DIM)
            self.tables.materialize()
            self.peaks["init"] = peak_gigabytes()
            reset_peak()

    def training_step(self, ids: Tensor, batch_index: int) -> Tensor:
        return self.output(self.tables(ids).flatten(1)).square().mean()

    def validation_step(self, ids: Tensor, batch_index: int) -> None:
        self.output(self.tables(ids).flatten(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RowWiseAdagrad(self.parameters(), lr=0.05)

    def probe(self) -> dict[str, list[float]]:
        """Some rows this rank owns, by table and row."""
        found = {}
        for table, rows in enumerate(self.rows):
            chosen = np.linspace(0, rows - 1, PROBES).astype(np.int64)
            owners, places = self.tables.placement.locate(np.full(PROBES, table), chosen)
            for row, owner, place in zip(chosen, owners, places, strict=True):
                if owner == self.tables.exchange_group.rank:
                    found[f"{table}.{row}"] = self.tables.weight[place].tolist()
        return found


def current_gigabytes() -> float:
    """Memory this process has now."""
    return _status("VmRSS")


def peak_gigabytes() -> float:
    """Most memory this process has had since the last reset."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Let the peak begin anew (see proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e9


def rank_main(part: str, gigabytes: float, folder: Path) -> None:
    """What every rank does under torchrun."""
    torch.set_num_threads(1)
    model = Model(table_rows(gigabytes))
    trainer = Trainer(
        strategy=DCTStrategy(),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = DataLoader(Batches(model.rows), batch_size=None)
    path = str(folder / "tables.ckpt")
    if part == "train":
        trainer.fit(model, data)
        model.peaks["training"] = peak_gigabytes()
        reset_peak()
        trainer.save_checkpoint(path)
        model.peaks["saving"] = peak_gigabytes()
    else:
        trainer.validate(model, data, ckpt_path=path, verbose=False)
        model.peaks["loading"] = peak_gigabytes()
    answer = {"peaks": model.peaks, "owned": model.tables.weight.numel() * 4 / 1e9, "rows": model.probe()}
    (folder / f"{part}-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(answer))


def run(part: str, world_size: int, gigabytes: float, folder: Path) -> list[dict[str, Any]]:
    """Start the ranks and read what they have found."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world_size}", __file__, "--part", part]
    subprocess.run([*command, "--gigabytes", str(gigabytes), "--folder", str(folder)], check=True)
    return [json.loads((folder / f"{part}-{rank}-of-{world_size}.json").read_text()) for rank in range(world_size)]


def main() -> None:
    """Run all parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of all tables together (default 4)")
    parser.add_argument("--part", choices=("train", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where checkpoints go for a while (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.part is not None:
        rank_main(arguments.part, arguments.gigabytes, arguments.folder)
        return
    table = Table(title=f"Peak memory, tables of {arguments.gigabytes:g} GB in fp32, GB a rank")
    for head in ("ranks", "rank", "own rows", "before", "init", "training", "saving", "loading", "rows as saved"):
        table.add_column(head, justify="right")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        saved: dict[str, list[float]] = {}
        for part, world_size in (("train", 2), ("load", 1), ("load", 3), ("load", 4)):
            answers = run(part, world_size, arguments.gigabytes, folder)
            for rank, answer in enumerate(answers):
                if part == "train":
                    saved |= answer["rows"]
                same = all(saved[key] == row for key, row in answer["rows"].items())
                peaks = [answer["peaks"].get(key) for key in ("before", "init", "training", "saving", "loading")]
                figures = ["-" if peak is None else f"{peak:.2f}" for peak in peaks]
                checked = (
                    "-" if part == "train" else f"{len(answer['rows'])} of {len(answer['rows'])}" if same else "NO"
                )
                table.add_row(str(world_size), str(rank), f"{answer['owned']:.2f}", *figures, checked)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
