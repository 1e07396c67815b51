"""Kills, stops and slows ranks of a language model under ``dct_elastic``.

    python experiments/lost_ranks.py kills

Each rank is a process that this one starts, and starts again. Every step takes ``--pace`` seconds,
of which a rank sleeps what it does not compute, so that ranks that share a machine do not become
faster when one is gone. Prints a table, and writes ``FOLDER/table.csv``, ``FOLDER/steps-RANK.csv``
with each rank's steps, and ``FOLDER/run.png``.
"""

import argparse
import csv
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_dct import DCTElasticStrategy
from lightning_dct.checksums import checksum_of
from lightning_dct.elastic.present import LIGHTHOUSE, RESTARTED, import_torchft, start_lighthouse
from lost_ranks_figures import AWAY, Row, report
from network.hosts import Host, Link, some_hosts
from nlp.data import TextData
from nlp.module import LanguageModule

RANKS = 4
SETTINGS: dict[str, Any] = {"local_steps": 8, "density": 0.3, "warmup_steps": 100}
PATIENCE_S = 10.0
SLOWER = 4.0
# No rank is killed after this part of the steps, so that all ranks are there at the end.
LAST_KILL = 0.9
SCENARIOS = {
    "undisturbed": "no rank is disturbed",
    "kills": "SIGKILL to a random rank every 4 to 12 s, started again after 1 to 20 s",
    "every15": "SIGKILL to a random rank every 15 s, started again after 1 s",
    "slow": "the last rank is 4 times slower",
    "stop": "SIGSTOP to the last rank for --away seconds",
    "cut": "the link of the last rank, in a network namespace, is cut for --away seconds (as root)",
    "lighthouse": "the lighthouse ends for good after a third of the steps",
}


class Paced(LanguageModule):
    """The language model with steps of ``pace`` seconds at least."""

    pace = 0.0

    def training_step(self, batch: Any, index: int) -> Any:
        self._began = time.monotonic()
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        time.sleep(max(0.0, self._began + self.pace - time.monotonic()))


class Records(pl.Callback):
    """Writes a row after each batch, which lies on the disk when the process is killed."""

    def __init__(self, file: Path) -> None:
        self.file = file.open("a")
        self.passed_over = 0
        self.exchanges = 0
        self.digest = ""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        updates: Any = trainer.strategy.updates
        present = updates.present
        if updates.exchanges != self.exchanges:
            self.digest = digest(
                updates.weights.shared(name) for name in sorted(updates.weights.parameters)
            )
        row = Row(
            time.time(), trainer.global_step, int(updates.passed_over == self.passed_over), present.quorum_step,
            present.size(), updates.exchanges, present.failed_meetings, self.digest, float(outputs["loss"]),
        )  # fmt: skip
        self.passed_over = updates.passed_over
        self.exchanges = updates.exchanges
        print(*row, sep=",", file=self.file, flush=True)


def digest(tensors: Any) -> str:
    """A checksum of tensors."""
    return f"{checksum_of(torch.cat([tensor.detach().reshape(-1) for tensor in tensors])):08x}"


def train(rank: int, host: Host, lighthouse: str, given: argparse.Namespace, again: bool) -> None:
    """Train as one rank, and write what it ends with."""
    host.enter()
    folder = given.folder
    log = (folder / f"log-{rank}.txt").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    # The ranks share the cores, and Lightning does not know, because each is the only one that it
    # starts.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= {
        LIGHTHOUSE: lighthouse,
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        RESTARTED: str(int(again)),
    }
    pl.seed_everything(given.seed)
    module = Paced(num_layers=1, width=64)
    data = TextData(corpus="sources", held_out_fraction=0.01, seed=given.seed)
    module.pace = given.pace * (SLOWER if given.scenario == "slow" and rank == RANKS - 1 else 1.0)
    trainer = pl.Trainer(
        strategy=DCTElasticStrategy(**SETTINGS), accelerator="cpu", devices=1, num_nodes=RANKS, max_steps=given.steps,
        callbacks=[Records(folder / f"steps-{rank}.csv")], use_distributed_sampler=False, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    scores = (
        trainer.test(module, datamodule=data, verbose=False)[0]
        if rank == 0
        else {"test/loss": float("nan")}
    )
    (folder / f"end-{rank}.txt").write_text(
        f"{trainer.global_step} {digest(module.parameters())} {scores['test/loss']}"
    )
    os._exit(0)


def light(answer: Any, host: Host) -> None:
    """Be the lighthouse until it is killed."""
    host.enter()
    server, address = start_lighthouse(host.address, PATIENCE_S)
    answer.send(address)
    signal.pause()
    del server


class Job:
    """The ranks and the lighthouse, each on a host, and what happens to them: a time, what, and the
    rank.
    """

    def __init__(self, given: argparse.Namespace, hosts: list[Host]) -> None:
        self.given = given
        self.folder = given.folder
        self.hosts = hosts
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["lightning_dct.elastic.present", "nlp.module", "nlp.data"]
        )
        ours, theirs = self.context.Pipe(duplex=False)
        self.lighthouse = self.context.Process(
            target=light, args=(theirs, hosts[RANKS]), daemon=True
        )
        self.lighthouse.start()
        self.address = ours.recv()
        self.processes: dict[int, Any] = {}
        self.events: list[tuple[float, str, int]] = []
        self.due: dict[int, float] = {}
        self.draw = random.Random(given.seed)
        for rank in range(RANKS):
            self.start(rank)

    def start(self, rank: int, again: bool = False) -> None:
        arguments = rank, self.hosts[rank], self.address, self.given, again
        self.processes[rank] = self.context.Process(target=train, args=arguments, daemon=True)
        self.processes[rank].start()
        if again:
            self.events.append((time.time(), "start", rank))

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.events.append((time.time(), "kill", rank))
        self.processes[rank].join()

    def send_away(self, rank: int, what: str) -> None:
        """Stop a rank or cut its link, or end that."""
        if what in ("cut", "plug"):
            self.hosts[rank].plug(what == "plug")
        else:
            os.kill(self.processes[rank].pid, signal.SIGSTOP if what == "stop" else signal.SIGCONT)
        self.events.append((time.time(), what, rank))

    def step(self) -> int:
        """The furthest step of any rank."""
        return max(
            (
                int(last_line(self.folder / f"steps-{r}.csv").split(",")[1] or 0)
                for r in range(RANKS)
            ),
            default=0,
        )

    def has_trained(self, rank: int) -> bool:
        """Whether a rank has trained since it was last started."""
        started = max(
            (when for when, what, other in self.events if other == rank and what == "start"),
            default=0.0,
        )
        return float(last_line(self.folder / f"steps-{rank}.csv").split(",")[0]) > started

    def run(self) -> None:
        """Disturb the ranks until all have ended."""
        scenario = self.given.scenario
        steps = self.given.steps
        deadline = time.monotonic() + self.given.limit
        while self.step() < SETTINGS["warmup_steps"] / 2:
            assert time.monotonic() < deadline, "the ranks have not begun; see log-0.txt"
            time.sleep(0.1)
        next_kill = time.monotonic()
        while any(process.is_alive() for process in self.processes.values()) or self.due:
            if time.monotonic() > deadline:
                print(f"Not ended after {self.given.limit:.0f} s, at step {self.step()}.")
                return
            time.sleep(0.05)
            now = time.monotonic()
            ending = self.step() > LAST_KILL * steps
            for rank in [rank for rank, when in self.due.items() if now >= when or ending]:
                del self.due[rank]
                self.start(rank, again=True)
            for rank, process in self.processes.items():
                if rank not in self.due and process.exitcode not in (None, 0):
                    self.events.append((time.time(), f"failed with {process.exitcode}", rank))
                    self.due[rank] = now + 1.0
            alive = [rank for rank, process in self.processes.items() if process.is_alive()]
            # Of those that train: one that is joining has nothing yet, and the weights must not die
            # with the last.
            training = [rank for rank in alive if self.has_trained(rank)]
            if (
                scenario in ("kills", "every15")
                and now >= next_kill
                and len(training) > 1
                and not ending
            ):
                rank = self.draw.choice(training)
                self.kill(rank)
                self.due[rank] = now + (self.draw.uniform(1, 20) if scenario == "kills" else 1.0)
                next_kill = now + (self.draw.uniform(4, 12) if scenario == "kills" else 15.0)
            happened = {what for _, what, _ in self.events}
            if scenario in AWAY and not happened and self.step() > steps / 4:
                self.send_away(RANKS - 1, AWAY[scenario][0])
            if (
                scenario in AWAY
                and len(happened) == 1
                and time.time() > self.events[0][0] + self.given.away
            ):
                self.send_away(RANKS - 1, AWAY[scenario][1])
            if scenario == "lighthouse" and not happened and self.step() > steps / 3:
                self.lighthouse.kill()
                self.events.append((time.time(), "lighthouse", -1))

    def stop(self) -> None:
        for process in (*self.processes.values(), self.lighthouse):
            process.kill()


def last_line(path: Path) -> str:
    """The last whole line of a file of rows, or one of a rank that has not begun."""
    if not path.exists():
        return "0,0"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        lines = file.read().decode().split("\n")
    return lines[-2] if len(lines) > 1 else "0,0"


def main() -> None:
    """Run a scenario, and say what it has come to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "scenario",
        choices=SCENARIOS,
        help="; ".join(f"{name}: {what}" for name, what in SCENARIOS.items()),
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pace", type=float, default=0.08, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--away", type=float, default=30.0, help="seconds for which a rank is stopped or cut off"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which all are killed"
    )
    parser.add_argument("--folder", type=Path, help="outputs/lost_ranks/SCENARIO by default")
    given = parser.parse_args()
    given.folder = (
        given.folder or Path("outputs/lost_ranks") / f"{given.scenario}-{given.seed}"
    ).absolute()
    given.folder.mkdir(parents=True, exist_ok=False)
    import_torchft()
    with some_hosts(RANKS + 1, Link(), given.scenario == "cut") as hosts:
        job = Job(given, hosts)
        try:
            job.run()
        finally:
            job.stop()
            with (given.folder / "events.csv").open("w") as file:
                csv.writer(file).writerows(job.events)
    report(
        given.folder, f"{SCENARIOS[given.scenario]}, seed {given.seed}", SETTINGS["warmup_steps"]
    )


if __name__ == "__main__":
    main()
