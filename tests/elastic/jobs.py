"""Elastic ranks to kill: each a process of its own, which tells after each exchange what shared
weights it has.

A row of ``digests-RANK.txt`` is the number of the round, a checksum of the shared weights, the
optimizer step, the ranks present, the steps trained, and the time.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from distributed.harness import free_port, started
from lightning_dct import DCTElasticStrategy, SplitPoint
from lightning_dct.elastic.present import LIGHTHOUSE

HURRY = "hurry"
SETTINGS: dict[str, Any] = {"local_steps": 4, "density": 0.3, "warmup_steps": 8}


class Net(pl.LightningModule):
    """A classifier with a BatchNorm and a schedule; ``slow`` seconds are added to each step until a
    file is there.
    """

    def __init__(self, slow: float = 0.0, hurry: Path | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.hurry = hurry
        layers = (
            torch.nn.Linear(16, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 4),
        )
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if self.slow and not (self.hurry and self.hurry.exists()):
            time.sleep(self.slow)
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: Any, _: int) -> None:
        inputs, labels = batch
        self.log(
            "loss", torch.nn.functional.cross_entropy(self.net(inputs), labels), sync_dist=True
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digests(pl.Callback):
    """Writes a row after each exchange."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exchanges = 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        with (self.folder / f"folders-{trainer.global_rank}.txt").open("a") as file:
            print(
                *(
                    one.dirpath
                    for one in trainer.checkpoint_callbacks
                    if isinstance(one, ModelCheckpoint)
                ),
                file=file,
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        updates: Any = trainer.strategy.updates
        if updates.exchanges != self.exchanges:
            self.exchanges = updates.exchanges
            row = (
                updates.present.quorum_step,
                digest(updates),
                trainer.global_step,
                updates.present.size(),
            )
            trained = trainer.global_step - updates.passed_over
            with (self.folder / f"digests-{trainer.global_rank}.txt").open("a") as file:
                print(*row, trained, f"{time.time():.3f}", file=file)


def digest(updates: Any) -> str:
    """A checksum of all shared weights."""
    together = b"".join(
        updates.weights.shared(name).numpy().tobytes()
        for name in sorted(updates.weights.parameters)
    )
    return f"{zlib.crc32(together):08x}"


def examples(number: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 16, generator=draw)
    return TensorDataset(
        inputs, (inputs @ torch.randn(16, 4, generator=torch.Generator().manual_seed(0))).argmax(1)
    )


def train(
    rank: int, ranks: int, lighthouse: str, folder: Path, steps: int, more: dict[str, Any]
) -> None:
    """Train as one rank; ``more`` has settings of the strategy, and what is taken out of it
    below.
    """
    log = (folder / f"log-{rank}.txt").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # the ranks share the cores, and Lightning would take all for each
    )
    os.environ |= {LIGHTHOUSE: lighthouse, "NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    more = dict(more)
    torch.manual_seed(rank)  # the first rank's weights are spread
    net = Net(more.pop("slow", 0.0), folder / HURRY)
    path = more.pop("ckpt_path", None)
    if more.pop("splits", False):
        net.net.insert(3, SplitPoint(0.5))
    accumulate = more.pop("accumulate", 1)
    DCTElasticStrategy.fits = more.pop("fits_before", 0)
    # Each rank finds a folder of its own, as with the versions of Lightning's default logger.
    logger = CSVLogger(folder, version=f"of-{rank}") if more.pop("finds_folder", False) else None
    saving = ModelCheckpoint(
        None if logger else folder, every_n_train_steps=more.pop("every", 10**6), save_last=True
    )
    trainer = pl.Trainer(
        strategy=DCTElasticStrategy(**{**SETTINGS, **more}), accelerator="cpu", devices=1, num_nodes=ranks,
        max_steps=steps, callbacks=[Digests(folder), saving], val_check_interval=50, check_val_every_n_epoch=None,
        logger=logger or False, accumulate_grad_batches=accumulate,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(examples(4000, 1), batch_size=16, shuffle=True)
    trainer.fit(net, loader, DataLoader(examples(500, 2), batch_size=100), ckpt_path=path)
    weights = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    updates: Any = trainer.strategy.updates
    with (folder / f"end-{rank}.txt").open("a") as file:
        print(trainer.global_step, f"{weights:08x}", float(trainer.callback_metrics["loss"]), updates.passed_over,
              updates.present.failed_meetings, updates.present.trouble, file=file)  # fmt: skip
    os._exit(0)


class Job:
    """Ranks that are started, killed, stopped and started again."""

    def __init__(
        self, ranks: int, folder: Path, steps: int, patience_s: float = 60.0, **more: Any
    ) -> None:
        self.address = f"http://127.0.0.1:{free_port()}"
        self.patience_s = patience_s
        self.light()
        self.ranks = ranks
        self.folder = folder
        self.steps = steps
        self.more = more
        self.processes: dict[int, Any] = {}

    def light(self) -> None:
        """Start the lighthouse, a process of its own, at the same address as before."""
        command = [
            str(Path(sys.executable).with_name("torchft_lighthouse")),
            "--bind",
            urlsplit(self.address).netloc,
        ]
        # Longer than by default, because a busy machine lets a process wait for seconds.
        times = [
            "--join_timeout_ms",
            str(int(1000 * self.patience_s)),
            "--heartbeat_timeout_ms",
            "5000",
        ]
        command += ["--min_replicas", "1", "--quorum_tick_ms", "50", *times]
        self.lighthouse = subprocess.Popen(command, env={**os.environ, "RUST_LOG": "error"})
        where = urlsplit(self.address)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((where.hostname, where.port)).close()
                return
            time.sleep(0.05)

    def start(self, rank: int, **more: Any) -> None:
        arguments = rank, self.ranks, self.address, self.folder, self.steps, {**self.more, **more}
        self.processes[rank] = started(train, *arguments)

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, how)
        if how == signal.SIGKILL:
            self.processes[rank].join()

    def rows(self, rank: int) -> list[list[str]]:
        path = self.folder / f"digests-{rank}.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, rank: int, step: int) -> None:
        """Wait until a rank has taken part in an exchange at a step or later."""
        self._wait_until(rank, lambda: any(int(row[2]) >= step for row in self.rows(rank)))

    def wait_for_rounds_of_all(self, rank: int, after: int, count: int) -> None:
        """Wait until a rank has met all others in so many rounds after one."""
        everyone = str(self.ranks)
        self._wait_until(
            rank,
            lambda: sum(r[3] == everyone and int(r[0]) > after for r in self.rows(rank)) >= count,
        )

    def _wait_until(self, rank: int, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300.0
        while not condition():
            assert time.monotonic() < deadline, self.log(rank)
            assert self.processes[rank].is_alive(), self.log(rank)
            time.sleep(0.05)

    def hurry(self) -> None:
        """Have slow ranks train the rest of their steps as fast as they can."""
        (self.folder / HURRY).touch()

    def end(self, timeout_s: float = 300.0) -> dict[int, list[str]]:
        """Wait for the end of all ranks, and return what each says."""
        for rank, process in self.processes.items():
            process.join(timeout_s)
            assert process.exitcode == 0, self.log(rank)
        return {
            rank: (self.folder / f"end-{rank}.txt").read_text().split() for rank in self.processes
        }

    def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
                process.join()
        self.lighthouse.kill()
        self.lighthouse.wait()

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}.txt").read_text()[-3000:]

    def digests(self) -> dict[int, set[str]]:
        """The checksums of all ranks' shared weights, by round."""
        found: dict[int, set[str]] = {}
        for rank in range(self.ranks):
            for row in self.rows(rank):
                found.setdefault(int(row[0]), set()).add(row[1])
        return found
