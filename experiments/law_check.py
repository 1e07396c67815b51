"""Compares the law of run length with the runs that were made, and shows where it decides wrongly.

It reads ``docs/evidence/run_length.csv``, prints a table of each kind of run, and draws the law
against what was seen. With ``--refit`` it fits the law's constants to all kinds but one, and judges
them on that one.

    python experiments/law_check.py --refit
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch

matplotlib.use("agg")
import matplotlib.pyplot as plt
from torch import Tensor

from comparison.table import markdown
from lightning_dct import DCTConfig
from lightning_dct.law import BOUND, SAFETY_FACTOR, expected_loss, has_measured_gain

ROWS = Path(__file__).parents[1] / "docs" / "evidence" / "run_length.csv"
LEVEL = 0.3  # percent: at most so much is no loss that these runs could show
CONSTANTS = (0.035, 0.65, 0.65, 0.8, 0.2, 0.25, 2.0, 0.45)
"""Those of the law, in the order of its formula: waiting, apart with both exponents, both leasts,
both growths.
"""
COLUMNS = (
    "kind of run",
    "fitted to",
    "runs",
    "law <= 1%",
    "law - run",
    "off by",
    "allowed",
    "they lost",
    "> 1%",
)
COLUMNS += ("refused", "<= 0.3%")


class Run(NamedTuple):
    """What one row of the file says: settings, and the loss against `ddp` in percent, a mean over
    seeds.
    """

    kind: str
    fitted: str
    ranks: int
    config: DCTConfig
    steps: int
    seeds: int
    loss: float

    @property
    def law(self) -> float:
        """What the law says, in percent."""
        return expected_loss(self.config, self.ranks, self.steps)


def read(file: Path = ROWS) -> list[Run]:
    """The runs of a file."""
    runs = []
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            # The mean of several steps is plain in any case, and that of one step with
            # `hierarchical`.
            exchange = (
                "hierarchical" if row["mean"] == "plain" and row["local_steps"] == "1" else "auto"
            )
            config = DCTConfig(
                local_steps=int(row["local_steps"]),
                density=float(row["density"]),
                exchange=exchange,
            )
            counts = (int(row["steps"]), int(row["seeds"]))
            runs.append(
                Run(
                    row["kind"],
                    row["fitted"],
                    int(row["ranks"]),
                    config,
                    *counts,
                    float(row["loss"]),
                )
            )
    return runs


def judged(runs: Sequence[Run], laws: Sequence[float]) -> list[str]:
    """Cells that say how far a law is off where it says at most the bound, and what it decides
    wrongly.
    """
    errors = [law - run.loss for run, law in zip(runs, laws, strict=True) if law <= BOUND]
    allowed = [run for run, law in zip(runs, laws, strict=True) if law * SAFETY_FACTOR <= BOUND]
    refused = [run for run, law in zip(runs, laws, strict=True) if law * SAFETY_FACTOR > BOUND]
    cells = [
        str(len(runs)),
        str(len(errors)),
        _mean(errors, "+.1f"),
        _mean([abs(error) for error in errors], ".1f"),
    ]
    cells += [str(len(allowed)), _mean([run.loss for run in allowed], "+.1f")]
    cells.append(str(sum(run.loss > BOUND for run in allowed)))
    return [*cells, str(len(refused)), str(sum(run.loss <= LEVEL for run in refused))]


def _mean(values: Sequence[float], pattern: str) -> str:
    return format(sum(values) / len(values), pattern) if values else "-"


def by_kind(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each kind, in the order of the file."""
    return {
        kind: [run for run in runs if run.kind == kind]
        for kind in dict.fromkeys(run.kind for run in runs)
    }


def tabulate(runs: Sequence[Run]) -> list[Sequence[str]]:
    """A row for each kind, and one for all."""
    rows: list[Sequence[str]] = [COLUMNS]
    for kind, ours in by_kind(runs).items():
        rows.append([kind, ours[0].fitted, *judged(ours, [run.law for run in ours])])
    return [*rows, ["all", "", *judged(runs, [run.law for run in runs])]]


def settings_of(runs: Sequence[Run]) -> Tensor:
    """What the formula takes of runs side by side, ``[5, runs]``, in fp64."""
    rows = [
        (
            run.ranks,
            run.config.local_steps,
            run.config.density,
            run.steps,
            has_measured_gain(run.config),
        )
        for run in runs
    ]
    return torch.tensor(rows, dtype=torch.float64).T


def formula(constants: Tensor, settings: Tensor) -> Tensor:
    """The law with other constants, for the settings of runs side by side."""
    waiting, apart, grows, shortens, least_apart, least, eight, beyond = constants
    ranks, local, density, steps, has_gains = settings
    growth = (ranks.clamp(max=8) / 4).clamp(min=1) ** eight * (ranks / 8).clamp(min=1) ** beyond
    entries = (
        waiting * (2 - has_gains) * (ranks - 1).clamp(max=3) * growth / density / (steps / 1000)
    )
    # A slope at zero steps apart would be infinite.
    steps_apart = (
        apart * (ranks - 1) ** grows * (1000 * (local - 1).clamp(min=1e-12) / steps) ** shortens
    )
    loss = entries + torch.maximum(steps_apart, least_apart * torch.log2(local))
    return torch.maximum(loss, least * torch.log2(ranks.clamp(max=4)))


def fit(runs: Sequence[Run], iterations: int = 2000) -> Tensor:
    """Constants whose errors are least, in units of a run's noise and a tenth of its loss; far ones
    count linearly.
    """
    seen = torch.tensor([run.loss for run in runs], dtype=torch.float64)
    noise = (
        torch.tensor([0.3 + 0.5 / math.sqrt(run.seeds) for run in runs], dtype=torch.float64)
        + 0.1 * seen.abs()
    )
    settings = settings_of(runs)
    logarithms = torch.tensor(CONSTANTS, dtype=torch.float64).log().requires_grad_()
    optimizer = torch.optim.Adam([logarithms], lr=0.01)
    for _ in range(iterations):
        optimizer.zero_grad()
        errors = (formula(logarithms.exp(), settings) - seen) / noise
        torch.nn.functional.huber_loss(errors, torch.zeros_like(errors)).backward()
        optimizer.step()
    return logarithms.detach().exp()


def tabulate_refits(runs: Sequence[Run]) -> tuple[list[Sequence[str]], str]:
    """For each kind, what constants say that were fitted to the others; in the last row and a note
    those of all.
    """
    rows: list[Sequence[str]] = [COLUMNS]
    for kind, ours in by_kind(runs).items():
        others = [run for run in runs if run.kind != kind]
        rows.append([kind, "no", *judged(ours, formula(fit(others), settings_of(ours)).tolist())])
    constants = fit(runs)
    rows.append(["all", "yes", *judged(runs, formula(constants, settings_of(runs)).tolist())])
    return (
        rows,
        (
            "Constants fitted to all:"
            f" {', '.join(f'{constant:.3f}' for constant in constants.tolist())}."
        ),
    )


def draw(file: Path, runs: Sequence[Run]) -> None:
    """Draw the loss of each run against what the law says, and what of it a run may take."""
    figure, axis = plt.subplots(figsize=(8, 6), layout="constrained")
    for number, (kind, ours) in enumerate(by_kind(runs).items()):
        look = {"color": f"C{number}", "marker": "oDs^vPX"[number % 7], "s": 24, "alpha": 0.8}
        axis.scatter([run.law for run in ours], [run.loss for run in ours], label=kind, **look)
    ends = (min(run.law for run in runs), max(run.law for run in runs))
    axis.plot(ends, ends, color="black", linewidth=1, label="the law")
    axis.axvspan(
        0.9 * ends[0], BOUND / SAFETY_FACTOR, color="gray", alpha=0.15, label="what a run may take"
    )
    axis.axhline(BOUND, color="black", linewidth=1, linestyle="--", label="what may be lost")
    axis.set(
        xscale="log", xlabel="loss against ddp by the law, %", ylabel="loss against ddp as seen, %"
    )
    axis.set_yscale("symlog", linthresh=2)
    axis.set_xticks([0.25, 0.5, 1, 2, 5, 10, 20], ["0.25", "0.5", "1", "2", "5", "10", "20"])
    axis.set_yticks(
        [-10, -5, -2, -1, 0, 1, 2, 5, 10], ["-10", "-5", "-2", "-1", "0", "1", "2", "5", "10"]
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="x-small", ncols=3)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables, and write the picture."""
    first, _, rest = (__doc__ or "").partition("\n")
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=first, epilog=rest, formatter_class=shape)
    parser.add_argument(
        "--refit", action="store_true", help="fit constants to all kinds but one, too"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/law.png"), help="the picture (%(default)s)"
    )
    arguments = parser.parse_args(words)
    runs = read()
    print(markdown(tabulate(runs), []))
    if arguments.refit:
        refits, note = tabulate_refits(runs)
        print(f"\n{markdown(refits, [note])}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(arguments.output, runs)
    print(f"\nWritten to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
