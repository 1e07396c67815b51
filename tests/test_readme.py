"""Runs what the README shows: every command, the long ones cut short by further overrides, and what
`plan` prints.

Trainings run on ranks that are there already: starting processes is the same for all of them (see
test_launchers.py) and takes longer than the rest.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import comparison.runs
import evidence.command
import evidence.results
from compare import main
from distributed.scripts import TRAIN, run_here
from lightning_dct import commands as cli
from lightning_dct.cost.timing import Speed

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PLANNING = (ROOT / "docs/planning.md").read_text()
TWO_RANKS = ["trainer.devices=2", "trainer.accelerator=cpu"]
SHORT = [
    "trainer.max_steps=4",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "logger=none",
]
REPOSITORY = re.search(
    r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
)[1]
SPEED = Speed(1e-9, 1e-10, 1e-11, "made up")


def commands() -> list[list[str]]:
    lines = [
        line
        for block in re.findall(r"^```bash\n([^`]*)^```$", README, re.MULTILINE)
        for line in block.splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str], tmp_path: Path) -> str:
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@cache
def is_built(folder: str) -> None:
    """By pip; its extras change nothing of that."""
    run([sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", folder], ROOT)


def test_it_is_short_and_begins_with_something_to_type() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert all(line.count("|") <= 6 for line in lines if line.startswith("|"))
    first_screen = "\n".join(lines[:20])
    assert "make demo" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("page", [README, PLANNING], ids=["README", "planning"])
def test_the_plan_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    """All but what is measured: two rows of a table, and the notes on time."""
    monkeypatch.setattr(cli, "measure_speed", lambda *_: SPEED)
    shown = re.findall(
        r"^```bash\n([^`]* plan [^`]*)```\n\n```text\n([^`]*)```", page, re.MULTILINE
    )
    assert shown
    for command, block in shown:
        words = shlex.split(command)
        assert cli.main(words[words.index("plan") :]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        description, *rest = block.split("\n\n")  # all there is about tables alone
        table, *notes = rest or [""]
        assert " ".join(description.split()) in printed
        rows = [" ".join(row.split()) for row in table.splitlines()]
        assert [row for row in rows if row not in printed] == [
            row for row in rows if row.startswith(("ms compressing", "ms together"))
        ]
        said = [
            " ".join(note.split()) for note in re.split(r"^- ", "".join(notes), flags=re.MULTILINE)
        ]
        assert [note for note in said if note not in printed] == [
            note for note in said if note.startswith(("Synchronising", "Compressing"))
        ]


def starts_on(ranks: Any, folder: Path) -> Callable[[list[str], object], int]:
    """What takes the place of `run_alone`: the same command, on ranks that are there already."""

    def start(command: list[str], output: object) -> int:
        assert command[:2] == [sys.executable, str(TRAIN)]
        ranks(2).run(run_here, str(TRAIN), tuple(command[2:]), str(folder))
        return 0

    return start


def with_one_seed(words: list[str]) -> list[str]:
    """One says as much as three of whether a command works."""
    if "--seeds" not in words:
        return words
    first = words.index("--seeds") + 1
    return [*words[: first + 1], *itertools.dropwhile(str.isdigit, words[first + 1 :])]


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_command(words, tmp_path, ranks, monkeypatch):
    match words:
        case ["make", target]:
            assert target in run(["make", "--dry-run", target], tmp_path) + target
        case ["git", "clone", url]:
            assert url == REPOSITORY
        case ["cd", folder]:
            assert folder == REPOSITORY.rpartition("/")[2]
        case ["python", "-m", "lightning_dct", "plan", *rest]:
            monkeypatch.setattr(cli, "measure_speed", lambda *_: SPEED)
            assert cli.main(["plan", *rest]) == 0
        case ["pip", "install", requirement]:
            extras = re.findall(r"\[(.*)\]", requirement)
            assert set(extras) <= set(metadata.metadata("lightning-dct").get_all("Provides-Extra"))
            is_built(requirement.partition("[")[0])
        case ["python", "experiments/compare.py", *rest]:
            monkeypatch.setattr(comparison.runs, "run_alone", starts_on(ranks, tmp_path))
            rest = with_one_seed(rest)
            settings = [*rest, *SHORT, *TWO_RANKS, "--output", str(tmp_path)]
            assert main(settings) == 0
            rows = [
                line
                for line in (tmp_path / "table.md").read_text().splitlines()
                if line.startswith("| ")
            ]
            assert len(rows) == 2 + rest.count("--strategy")
        case ["python", "experiments/evidence.py"]:
            assert evidence.command.main([]) == 0
        case ["python", "experiments/evidence.py", "run", name]:
            monkeypatch.setattr(comparison.runs, "run_alone", starts_on(ranks, tmp_path))
            (figure,) = evidence.command.chosen([name])
            short = figure._replace(words=(*figure.words, *SHORT, *TWO_RANKS), seeds=(0,))
            monkeypatch.setattr(evidence.command, "FIGURES", (short,))
            monkeypatch.setattr(evidence.command, "RESULTS", tmp_path / "results.csv")
            monkeypatch.setattr(evidence.command, "current_commit", lambda: str(tmp_path))
            assert evidence.command.main(["run", name]) == 0
            assert len(evidence.results.load(tmp_path / "results.csv")) == len(figure.strategies)
        case _:
            pytest.fail(f"the README has a command that no test runs: {' '.join(words)}")
