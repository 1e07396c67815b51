"""Kills training with SIGKILL at random moments, resumes it, and compares what comes out with an
undisturbed run.

    python tests/reliability/kill_and_resume.py --kills 20

Every kind of training saves a checkpoint after every optimizer step; half of the kills aim at a
moment within a save. Now one rank dies a little before the others, now all at once. Oracle:
weights, optimizer states, residuals, thresholds and what the ranks remember of each other, of the
undisturbed run, to the last bit.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from differences import differences
from distributed.harness import CONTEXT, free_port, started
from reliability.killed_training import BATCHES, KINDS, WORLD_SIZES, train

# Generous: a machine may be paused for minutes.
TIMEOUT_S = 600.0
KILLS_A_RUN = 5


@dataclass
class Kill:
    """A rank dies some time after it is ``"training"`` on a batch or ``"saving"`` after one; the
    others die later.
    """

    event: str
    batch: int
    delay_s: float
    rank: int
    others_later_s: float


@dataclass
class Survival:
    """What became of one kind of training: its kills, what the rank that died first was at, and how
    often.

    And the largest difference from the undisturbed run over all that ranks hold, and what differed,
    by name.
    """

    kills: int = 0
    while_at: Counter[str] = field(default_factory=Counter)
    difference: float = 0.0
    unequal: list[str] = field(default_factory=list)


def survive(kind: str, kills: int, seed: int, folder: Path, batches: int = BATCHES) -> Survival:
    """Train undisturbed once, and as often with kills as they take, a few to a run."""
    numbers = random.Random(f"{kind} {seed}")
    undisturbed = folder / "undisturbed"
    run(kind, undisturbed, batches, None)
    expected = results(undisturbed)
    survival = Survival()
    while survival.kills < kills:
        disturbed = folder / f"disturbed-{survival.kills}"
        for batch in sorted(
            numbers.sample(range(batches), min(KILLS_A_RUN, kills - survival.kills))
        ):
            event = numbers.choice(["training", "saving"])
            later = numbers.choice([0.0, numbers.uniform(0.0, 0.1)])
            kill = Kill(
                event,
                batch,
                numbers.uniform(0.0, 0.03),
                numbers.randrange(WORLD_SIZES[kind]),
                later,
            )
            survival.while_at[run(kind, disturbed, batches, kill)] += 1
            survival.kills += 1
        run(kind, disturbed, batches, None)
        for name, difference in differences(expected, results(disturbed)):
            survival.difference = max(survival.difference, difference)
            survival.unequal.append(name)
    return survival


def run(kind: str, folder: Path, batches: int, kill: Kill | None) -> str:
    """Start ranks and wait until they end or are killed.

    Returns:
        What the rank that was killed first was at; ``"the end"`` where none was.

    Raises:
        AssertionError: A rank failed by itself, or took too long.
    """
    folder.mkdir(exist_ok=True)
    processes: list[Any] = []
    pipes: list[Connection] = []
    port = free_port()
    world_size = WORLD_SIZES[kind]
    for rank in range(world_size):
        ours, theirs = CONTEXT.Pipe()
        processes.append(
            started(train, rank, world_size, port, kind, folder, batches, theirs, daemon=True)
        )
        theirs.close()
        pipes.append(ours)
    try:
        return _watch(processes, pipes, kill, folder)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def _watch(processes: list[Any], pipes: list[Connection], kill: Kill | None, folder: Path) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    at = dict.fromkeys(range(len(pipes)), ("the start", -1))
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
        assert ready, f"no end after {TIMEOUT_S:.0f} s:\n{_logs(folder)}"
        for pipe in ready:
            rank = open_pipes[pipe]
            try:
                at[rank] = pipe.recv()
            except EOFError:
                del open_pipes[pipe]
                continue
            event, batch = at[rank]
            if (
                kill is not None
                and rank == kill.rank
                and event == kill.event
                and batch >= kill.batch
            ):
                time.sleep(kill.delay_s)
                processes[rank].kill()
                processes[rank].join()
                time.sleep(kill.others_later_s)
                while pipe.poll():  # what it has told before it died
                    try:
                        at[rank] = pipe.recv()
                    except EOFError:
                        break
                return at[rank][0]
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        assert process.exitcode == 0, f"exit status {process.exitcode}:\n{_logs(folder)}"
    return "the end"


def _logs(folder: Path) -> str:
    return "\n".join(
        path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("*.log"))
    )


def results(folder: Path) -> list[Any]:
    """What each rank has left at the end of training."""
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("final-*.pt"))]


def main() -> None:
    """Kill as often as the command line says and print a table."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description="Kill training at random moments, resume it and compare."
    )
    parser.add_argument("--kills", type=int, default=20, help="for each kind of training")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    table = Table(title=f"Killed with SIGKILL and resumed, 2 or 4 ranks, {BATCHES} batches")
    for column in (
        "training",
        "kills survived",
        "while training",
        "while saving",
        "after a save",
        "worst difference",
    ):
        table.add_column(column, justify="left" if column == "training" else "right")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kinds:
            (Path(folder) / kind).mkdir()
            survival = survive(kind, arguments.kills, arguments.seed, Path(folder) / kind)
            at = [str(survival.while_at[event]) for event in ("training", "saving", "saved")]
            table.add_row(kind, str(survival.kills), *at, f"{survival.difference:g}")
            failed |= bool(survival.unequal)
            for name in survival.unequal:
                print(f"{kind}: {name} differs", file=sys.stderr)
    Console().print(table)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
