"""What the runs of figures have found: read from the programs' files, kept as one CSV, shown as a
table.
"""

import csv
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from comparison.runs import Strategy
from comparison.table import Figure as Spread
from evidence.figures import Figure

BEGIN = "<!-- figures: python experiments/evidence.py write -->"
END = "<!-- end of figures -->"
HEAD = ("training", "ranks", "dense → compressed", "against dense", "fewer bytes")


class Result(NamedTuple):
    """One run.

    Attributes:
        figure: The name of the figure it belongs to.
        strategy: As it was given.
        seed: Of weights and batches.
        value: The metric, or the milliseconds of a step.
        ratio: Bytes of the dense fp32 exchange between ranks over bytes sent; None without such an
            exchange.
        inside: The same of rows of sharded tables, or of activations; None without.
        version: Of the package.
        commit: Of the repository.
        machine: What it ran on, and for times how loaded it was.
    """

    figure: str
    strategy: str
    seed: int
    value: float
    ratio: float | None
    inside: float | None
    version: str
    commit: str
    machine: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What only one run has."""
        return self.figure, self.strategy, self.seed


def read(figure: Figure, folder: Path, version: str, commit: str, machine: str) -> list[Result]:
    """The results that a program has written into a folder."""
    return [
        Result(figure.name, *found, version, commit, machine) for found in _found(figure, folder)
    ]


def _found(
    figure: Figure, folder: Path
) -> Iterator[tuple[str, int, float, float | None, float | None]]:
    """Of each run its strategy, seed, metric and both ratios of bytes."""
    texts = {Strategy.parse(text).label: text for text in figure.strategies}
    program = figure.program.__module__
    if program == "replicas":
        for row in json.loads((folder / "replicas.json").read_text())["rows"]:
            for name, found in row["results"].items():
                seed = int(name.split()[1])
                yield texts[row["strategy"]], seed, found["loss"], found["ratio"], None
        return
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        seed = int(row["seed"])
        if program == "unlike_ranks":
            yield row["strategy"], seed, float(row["loss"]), _number(row["ratio"]), None
        elif row["compared"] == "True":
            ratios = _number(row["compression_ratio"]), _number(row["split_ratio"])
            is_time = figure.metric == "ms"
            value = row["milliseconds_per_step" if is_time else f"test/{figure.metric}"]
            yield texts[row["strategy"]], seed, float(value), *ratios


def load(file: Path) -> dict[tuple[str, str, int], Result]:
    """All results of a CSV; none if there is no such file."""
    if not file.exists():
        return {}
    with file.open(newline="") as stream:
        found = [
            Result(
                *(row["figure"], row["strategy"], int(row["seed"]), float(row["value"])),
                *(_number(row["ratio"]), _number(row["inside"])),
                *(row["version"], row["commit"], row["machine"]),
            )
            for row in csv.DictReader(stream)
        ]
    return {one.key: one for one in found}


def save(file: Path, results: Iterable[Result], order: Sequence[str]) -> None:
    """Write results as a CSV, figures in an order."""
    rows = sorted(results, key=lambda one: (order.index(one.figure), one.seed, one.strategy))
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Result._fields)
        writer.writerows(["" if cell is None else cell for cell in row] for row in rows)


def table(
    figures: Sequence[Figure], results: Mapping[tuple[str, str, int], Result], version: str
) -> str:
    """The Markdown table of all figures that this version has results of, between two marks."""
    lines = [HEAD, ("---", "---:", "---:", "---:", "---:")]
    lines += [
        line
        for figure in figures
        if (line := _line(figure, [one for one in results.values() if one.version == version]))
    ]
    return "\n".join([BEGIN, *("| " + " | ".join(line) + " |" for line in lines), END])


def put(page: str, made: str) -> str:
    """A page with the table between its marks replaced.

    Raises:
        ValueError: The page has no such marks.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    return pattern.sub(lambda _: made, page)


def _line(figure: Figure, results: Sequence[Result]) -> tuple[str, ...] | None:
    """The cells of a figure; None if no seed has run under both strategies."""
    dense, compressed = (
        {one.seed: one for one in results if one[:2] == (figure.name, strategy)}
        for strategy in figure.strategies
    )
    seeds = sorted(dense.keys() & compressed.keys())
    if not seeds:
        return None
    before = statistics.fmean(dense[seed].value for seed in seeds)
    after = statistics.fmean(compressed[seed].value for seed in seeds)
    pairs = [(dense[seed].value, compressed[seed].value) for seed in seeds]
    repeated = "seed"
    if figure.metric == "ms":
        values = f"{before:.0f} → {after:.0f} ms"
        against = f"{_spread(after / before for before, after in pairs).write('{:.2f}')} times"
        repeated = "run"
    elif figure.metric == "auc":
        values = f"AUC {before:.4f} → {after:.4f}"
        against = _spread(after - before for before, after in pairs).write("{:+.4f}")
    else:
        values = f"{figure.metric} {before:.3f} → {after:.3f}"
        against = _spread(after / before - 1 for before, after in pairs).write("{:+.1%}")
    counted = f"{len(seeds)} {repeated}{'s' if len(seeds) > 1 else ''}"
    return (
        figure.title,
        str(figure.ranks),
        values,
        f"{_unsigned_zero(against)} ({counted})",
        _bytes([compressed[seed] for seed in seeds]),
    )


def _spread(values: Iterable[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread


def _unsigned_zero(text: str) -> str:
    """As text, a mean that is rounded to zero has no sign.

    Example:
        >>> _unsigned_zero("-0.0% ± 1.0%"), _unsigned_zero("-0.1%")
        ('0.0% ± 1.0%', '-0.1%')
    """
    return re.sub(r"^[+-](?=0\.0+(%|\b)(?!\d))", "", text)


def _bytes(runs: Sequence[Result]) -> str:
    ratios = [run.ratio for run in runs if run.ratio is not None]
    inside = [run.inside for run in runs if run.inside is not None]
    if ratios and inside:
        return f"rows {_times(inside)}, MLPs {_times(ratios)}"
    return _times(inside or ratios)


def _times(ratios: Sequence[float]) -> str:
    mean = statistics.harmonic_mean(ratios)
    return f"{mean:.0f}x" if mean >= 20 else f"{mean:.1f}x"


def _number(cell: Any) -> float | None:
    return float(cell) if cell not in (None, "") else None
