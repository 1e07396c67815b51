"""Runs what the README shows: its Python snippets and every command, the long ones cut short by further overrides.

Trainings run on ranks that are there already: starting processes is the same for all of them (see test_launchers.py)
and takes longer than the rest.
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
import torch

import comparison.runs
import lightning_dct
from compare import main
from distributed.scripts import TRAIN, run_here, train_on_ranks
from zoo.command import main as zoo

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TWO_RANKS = ["trainer.devices=2", "trainer.accelerator=cpu"]
SHORT = ["trainer.max_steps=4", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "logger=none"]
MOVIELENS = ROOT.parent / "shared" / "data" / "ml-100k"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
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


def python(words: list[str]) -> list[str]:
    return [sys.executable, "-W", "ignore", *words]


@cache
def is_built(folder: str) -> None:
    """By pip; its extras change nothing of that."""
    run(python(["-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", folder]), ROOT)


def test_first_snippet_trains_and_prints_the_table(tmp_path, ranks):
    script = tmp_path / "snippet.py"
    script.write_text(blocks("python")[0])
    printed, _ = ranks(2).run(run_here, str(script), (), str(tmp_path))
    ratio = re.search(r"compression ratio\W+([\d.]+)x", printed)
    assert ratio is not None
    assert float(ratio[1]) > 50


def test_settings_snippet_is_valid():
    namespace: dict[str, object] = {}
    exec(blocks("python")[1], namespace)
    assert namespace["strategy"].config.density_per_parameter == {"*embedding*": 0.001}


def with_data(words: list[str]) -> list[str]:
    """Point at MovieLens where this machine has it; elsewhere the command would download it."""
    if "data=movielens" in words and not MOVIELENS.exists():
        pytest.skip("MovieLens 100K is not on this machine")
    return [f"data.root={MOVIELENS}" if word.startswith("data.root=") else word for word in words]


def test_tables_snippet_trains_in_one_process():
    namespace: dict[str, Any] = {}
    exec(blocks("python")[2], namespace)
    model = namespace["Recommender"]()
    model.tables.materialize()
    optimizer = model.optimizer()
    before = model.tables.weight.detach().clone()
    model(torch.randn(4, 13), torch.tensor([[1, 2, 3]] * 4)).square().mean().backward()
    optimizer.step()
    assert int((model.tables.weight != before).any(dim=1).sum()) == 3


def test_pipeline_snippet_is_valid():
    namespace: dict[str, Any] = {}
    exec(blocks("python")[3], namespace)
    ids = torch.randint(1000, (4, 9))
    assert namespace["network"](ids, tokens=ids).shape == (4, 9, 1000)
    assert isinstance(namespace["strategy"], lightning_dct.DCTPipelineStrategy)


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


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_command(words, tmp_path, ranks, monkeypatch):
    match words:
        case ["make", target]:
            assert target in run(["make", "--dry-run", target], tmp_path) + target
        case ["pip", "install", requirement]:
            extras = re.findall(r"\[(.*)\]", requirement)
            assert set(extras) <= set(metadata.metadata("lightning-dct").get_all("Provides-Extra"))
            is_built(requirement.partition("[")[0])
        case ["python", "experiments/train.py", *overrides]:
            train_on_ranks(ranks, tmp_path, *with_data(overrides), *SHORT, f"hydra.run.dir={tmp_path}/run")
            assert (tmp_path / "run" / "result.json").exists()
        case ["python", "experiments/compare.py", *rest]:
            monkeypatch.setattr(comparison.runs, "run_alone", starts_on(ranks, tmp_path))
            rest = with_one_seed(rest)
            settings = [*with_data(rest), *SHORT, *TWO_RANKS, "--output", str(tmp_path)]
            assert main(settings) == 0
            rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
            assert len(rows) == 2 + rest.count("--strategy")
        case ["python", "experiments/zoo.py", *rest]:
            monkeypatch.setattr(comparison.runs, "run_alone", starts_on(ranks, tmp_path))
            # One member says as much as all of whether the command works.
            assert (
                zoo([*with_one_seed(rest), *SHORT, *TWO_RANKS, "--only", "autoencoder", "--output", str(tmp_path)]) == 0
            )
            assert "| autoencoder |" in (tmp_path / "table.md").read_text()
        case ["python", "experiments/benchmark/kernels.py" as script]:
            run(python([script, "--entries", "20000", "--rounds", "1", "--output", str(tmp_path)]), tmp_path)
            assert "torch.topk" in (tmp_path / "kernels.md").read_text()
        case ["sudo", ".venv/bin/python", script]:
            run(python([script, "--help"]), tmp_path)
        case _:
            pytest.fail(f"the README has a command that no test runs: {' '.join(words)}")
