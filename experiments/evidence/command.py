"""Makes the figures of the present version, and writes them into the tables of the pages.

    python experiments/evidence.py                  # what there is, and what is missing
    python experiments/evidence.py run lm-2 lm-4    # the runs that are missing; all without names
    python experiments/evidence.py write            # the tables of README.md, docs/index.md and
                                                    # docs/evidence/index.md

Results are in docs/evidence/results.csv: a line for each run, with the version of the package, the
commit and the machine. Runs of this version that are there are not done again, so the same command
continues a stopped one. Only results of this version get into the table.
"""

import argparse
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmark.tables import describe_machine
from evidence.figures import FIGURES, Figure
from evidence.results import Result, load, put, read, save, table
from jobs import goes_on
from lightning_dct import __version__

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "evidence" / "results.csv"
README = ROOT / "README.md"
START = ROOT / "docs" / "index.md"
EVIDENCE = ROOT / "docs" / "evidence" / "index.md"
PAGES = (README, START, EVIDENCE)
NAMES = [figure.name for figure in FIGURES]


@goes_on
def main(words: Sequence[str] | None = None) -> int:
    """Do what is asked for; 0 when all of it is done."""
    given = make_parser().parse_args(words)
    if given.action == "run":
        return max(run(figure, given.seeds) for figure in chosen(given.names))
    if given.action == "write":
        for page in PAGES:
            page.write_text(written(page))
        return 0
    show()
    return 0


def written(page: Path) -> str:
    """A page with the table of the results that there are."""
    figures = [figure for figure in FIGURES if figure.in_readme or page == EVIDENCE]
    made = table(figures, load(RESULTS), __version__)
    folder = f"{page.parent.relative_to(ROOT)}/".removeprefix("./")
    return put(page.read_text(), made.replace(f"]({folder}", "]("))


def chosen(names: Sequence[str]) -> list[Figure]:
    """The figures of some names; all without names."""
    return [figure for figure in FIGURES if not names or figure.name in names]


def missing(figure: Figure, seeds: Sequence[int]) -> list[int]:
    """Seeds of a figure that this version has no results of."""
    found = {one.key for one in load(RESULTS).values() if one.version == __version__}
    return [
        seed
        for seed in seeds
        if any((figure.name, strategy, seed) not in found for strategy in figure.strategies)
    ]


def run(figure: Figure, seeds: Sequence[int] | None) -> int:
    """Do the runs of a figure that are missing, and keep their results; the program's status."""
    status = 0
    for seed in missing(figure, figure.seeds if seeds is None else seeds):
        commit = current_commit()
        folder = ROOT / "outputs" / "evidence" / commit / figure.name / str(seed)
        failed = figure.program([*figure.command([seed]), "--output", str(folder)])
        if failed:
            status = failed
            continue
        keep(read(figure, folder, __version__, commit, machine(with_load=figure.metric == "ms")))
    return status


def keep(results: Iterable[Result]) -> None:
    """Add results to the file, in place of those of the same runs."""
    save(RESULTS, {**load(RESULTS), **{one.key: one for one in results}}.values(), NAMES)


def current_commit() -> str:
    """Of the repository, with a plus if code has changed since; the results change with each run."""
    changed = _git("status", "--porcelain", "--", "src", "experiments", "conf")
    return _git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine(with_load: bool) -> str:
    """The processor, its cores, the version of torch, and how many processes want to run."""
    known = describe_machine()
    load = f", load {os.getloadavg()[1]:.1f}" if with_load else ""
    return f"{known['processor']}, {known['cores']} cores, torch {known['torch']}{load}"


def show() -> None:
    """Print a row for each figure."""
    known = load(RESULTS).values()
    shown = Table("figure", "seeds", "missing", "commit", "command")
    for figure in FIGURES:
        mine = [one for one in known if one.figure == figure.name and one.version == __version__]
        absent = missing(figure, figure.seeds)
        program = f"python experiments/{figure.program.__module__}.py"
        shown.add_row(
            figure.name,
            " ".join(map(str, sorted({one.seed for one in mine}))),
            " ".join(map(str, absent)),
            ", ".join(sorted({one.commit for one in mine})),
            " ".join([program, *figure.command(figure.seeds)]),
        )
    Console().print(shown)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action")
    running = actions.add_parser("run", help="do the runs that are missing")
    running.add_argument("names", nargs="*", metavar="FIGURE", help=", ".join(NAMES))
    running.add_argument("--seeds", type=int, nargs="+", help="instead of each figure's own")
    actions.add_parser("write", help="write the tables of the pages")
    return parser
