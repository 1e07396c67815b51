"""What a run of ``lost_ranks.py`` has come to: a table, the same as CSV, and a picture."""

import csv
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from lightning_dct.traffic import plain_table

# What sends a rank away, and brings it back, by scenario.
AWAY = {"stop": ("stop", "continue"), "cut": ("cut", "plug")}
LEAVES, RETURNS = zip(*AWAY.values(), strict=True)
# Seconds of a point of the picture.
BIN_S = 5.0


class Row(NamedTuple):
    """A batch of a rank: when it ended, whether it was trained, and what the rank then knew."""

    seconds: float
    step: int
    trained: int
    round: int
    ranks_present: int
    exchanges: int
    failed: int
    digest: str
    loss: float


class Event(NamedTuple):
    """What has happened to a rank."""

    seconds: float
    what: str
    rank: int


def read(folder: Path) -> tuple[dict[int, list[list[Row]]], list[Event]]:
    """The rows of each rank, a list for each of its lives, and what has happened."""
    with (folder / "events.csv").open() as file:
        events = [Event(float(when), what, int(rank)) for when, what, rank in csv.reader(file)]
    lives: dict[int, list[list[Row]]] = {}
    for path in sorted(folder.glob("steps-*.csv")):
        rank = int(path.stem.rpartition("-")[2])
        starts = [event.seconds for event in events if event.rank == rank and event.what == "start"]
        found = defaultdict(list)
        for line in path.read_text().splitlines():
            fields = line.split(",")
            # The last line of a process that was killed may be cut.
            if len(fields) == len(Row._fields):
                row = Row(float(fields[0]), *map(int, fields[1:7]), fields[7], float(fields[8]))  # type: ignore[arg-type]
                found[sum(start <= row.seconds for start in starts)].append(row)
        lives[rank] = [found[key] for key in sorted(found)]
    return lives, events


def step_seconds(lives: dict[int, list[list[Row]]]) -> dict[int, float]:
    """The median time of a step with no exchange after it, by rank: the pace of a rank that does
    not wait.
    """
    found: dict[int, list[float]] = {rank: [] for rank in lives}
    for rank, lives_of_rank in lives.items():
        for before, row in (pair for rows in lives_of_rank for pair in pairwise(rows)):
            if row.trained and (row.round, row.failed) == (before.round, before.failed):
                found[rank].append(row.seconds - before.seconds)
    return {rank: median(times) for rank, times in found.items() if times}


def figures(lives: dict[int, list[list[Row]]], events: list[Event], warmup: int) -> dict[str, str]:
    """Name and value of each figure of the table."""
    seconds = step_seconds(lives)
    away, back = absences(lives, events)
    digests: dict[int, set[str]] = defaultdict(set)
    seen: dict[int, int] = defaultdict(int)
    committed = failed = trained = passed = 0
    gaps = [0.0]
    possible = 0.0
    counted = 0
    for rank, lives_of_rank in lives.items():
        for rows in lives_of_rank:
            for before, row in pairwise(rows):
                if row.exchanges > before.exchanges:
                    digests[row.round].add(row.digest)
                    seen[row.round] += 1
                is_away = (
                    rank in away
                    and away[rank][0] <= row.seconds
                    and before.seconds <= away[rank][1]
                )
                if not is_away:
                    gaps.append(row.seconds - before.seconds)
                if row.step > warmup and not is_away:
                    possible += (row.seconds - before.seconds) / seconds[rank]
                    counted += row.trained
            committed += rows[-1].exchanges
            failed += rows[-1].failed
            trained += sum(row.trained for row in rows)
            passed += sum(1 - row.trained for row in rows)
    times = sorted(
        row.seconds for rows in lives.values() for life in rows for row in life if row.trained
    )
    kinds = defaultdict(int)
    for event in events:
        kinds[event.what] += 1
    several = [round for round, number in seen.items() if number > 1]
    return {
        "what happened": (
            ", ".join(f"{what}: {number}" for what, number in kinds.items()) or "nothing"
        ),
        "seconds": f"{times[-1] - times[0]:.1f}",
        "last step": (
            f"{max(row.step for rows in lives.values() for life in rows for row in life):,}"
        ),
        "steps trained, all ranks": f"{trained:,}",
        "steps passed over, all ranks": f"{passed:,}",
        "rounds": f"{len(digests):,}",
        "rounds in which several ranks took part": f"{len(several):,}",
        "of these with equal digests": f"{sum(len(digests[round]) == 1 for round in several):,}",
        "exchanges of a rank, committed": f"{committed:,}",
        "exchanges of a rank, failed": f"{failed:,}",
        "committed": f"{committed / (committed + failed):.1%}",
        "median seconds of a step without exchange": ", ".join(
            f"{rank}: {time:.3f}" for rank, time in seconds.items()
        ),
        "longest time between two batches of a present rank, s": f"{max(gaps):.1f}",
        "longest time without a step of any rank, s": (
            f"{max(b - a for a, b in pairwise(times)):.1f}"
        ),
        "throughput after the warm-up, of the speeds of the present ranks added": (
            f"{counted / possible:.1%}" if possible else "-"
        ),
    } | back


def absences(
    lives: dict[int, list[list[Row]]], events: list[Event]
) -> tuple[dict[int, tuple[float, float]], dict[str, str]]:
    """When each rank was stopped or cut off, and what it did then and after it."""
    away = {event.rank: event.seconds for event in events if event.what in LEAVES}
    ends = {event.rank: event.seconds for event in events if event.what in RETURNS}
    found = {}
    for rank, end in ends.items():
        pairs = [pair for rows in lives[rank] for pair in pairwise(rows)]
        alone = sum(row.trained for _, row in pairs if away[rank] < row.seconds < end)
        met = [
            row
            for before, row in pairs
            if row.exchanges > before.exchanges and row.ranks_present > 1
        ]
        waited = min((row.seconds - end for row in met if row.seconds > end), default=float("nan"))
        found |= {
            f"steps that rank {rank} trained while it was away": f"{alone:,}",
            f"seconds until rank {rank} exchanged with the others again": f"{waited:.1f}",
        }
    return {rank: (start, ends.get(rank, float("inf"))) for rank, start in away.items()}, found


def plot(file: Path, lives: dict[int, list[list[Row]]], events: list[Event], title: str) -> None:
    """Draw throughput and loss over time; lines mark what has happened."""
    seconds = step_seconds(lives)
    everything = [(rank, row) for rank, found in lives.items() for rows in found for row in rows]
    start = min(row.seconds for _, row in everything)
    end = max(row.seconds for _, row in everything)
    bins = range(int((end - start) / BIN_S) + 1)
    # type: ignore[var-annotated]
    steps = [0.0] * len(bins)
    losses = [[] for _ in bins]
    speeds = [0.0] * len(bins)
    for _, row in everything:
        if row.trained:
            place = int((row.seconds - start) / BIN_S)
            steps[place] += 1 / BIN_S
            losses[place].append(row.loss)
    for rank, found in lives.items():
        for rows in found:
            for place in bins:
                first = max(rows[0].seconds - start, place * BIN_S)
                last = min(rows[-1].seconds - start, (place + 1) * BIN_S)
                speeds[place] += max(0.0, last - first) / BIN_S / seconds[rank]
    middles = [(place + 0.5) * BIN_S for place in bins]
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 6), sharex=True)
    above.step(
        middles, speeds, where="mid", color="tab:gray", label="speeds of the present ranks, added"
    )
    above.step(middles, steps, where="mid", color="tab:orange", label="steps trained")
    above.set_ylabel("steps a second")
    above.set_ylim(bottom=0)
    below.plot(
        middles,
        [sum(found) / len(found) if found else float("nan") for found in losses],
        color="tab:orange",
    )
    below.set_ylabel("training loss")
    below.set_xlabel("seconds")
    colours = dict.fromkeys((*LEAVES, "kill", "lighthouse"), "tab:red")
    colours |= dict.fromkeys((*RETURNS, "start"), "tab:green")
    labelled = set()
    for event in events:
        for axis in (above, below):
            label = event.what if axis is above and event.what not in labelled else None
            labelled.add(event.what)
            axis.axvline(
                event.seconds - start,
                color=colours.get(event.what, "black"),
                linewidth=0.6,
                label=label,
            )
    above.legend(fontsize="small", loc="lower right")
    above.set_title(title)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def report(folder: Path, title: str, warmup: int) -> None:
    """Print the table of a run, and write it and the picture."""
    lives, events = read(folder)
    found = figures(lives, events, warmup)
    ends = [path.read_text().split() for path in sorted(folder.glob("end-*.txt"))]
    found |= {
        "ranks that have ended": f"{len(ends)} of {len(lives)}",
        "of these with equal weights": str(len({end[1] for end in ends}) == 1),
        "test loss": ends[0][2] if ends else "-",
    }
    with (folder / "table.csv").open("w") as file:
        csv.writer(file).writerows(found.items())
    print(f"\n{title}\n{plain_table([('figure', 'value'), *found.items()])}\n{folder}", flush=True)
    plot(folder / "run.png", lives, events, title)
