"""What the pages under docs/ show: their Python snippets run, their commands exist, files they name
are there.
"""

import argparse
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.run
from hydra import compose, initialize_config_dir
from lightning.pytorch.strategies import StrategyRegistry
from wandb.cli.cli import cli as wandb_cli

import lightning_dct
from distributed.scripts import run_here
from lightning_dct import commands
from lightning_dct.cost.timing import Speed
from lightning_dct.law import CANDIDATES, UserSettings, steps_needed

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"])
ROOM = "src|tests|experiments|conf|docs|examples"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def commands_in(page: Path) -> list[list[str]]:
    lines = [
        line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader would type them; none of them trains."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    if find_spec("torchrec") is None:
        monkeypatch.syspath_prepend(str(ROOT / "tests/stand_in"))
    with patch.dict(os.environ):  # `seed_everything` sets variables
        for block in blocks(page, "python"):
            exec(compile(block, named(page), "exec"), namespace)


def test_first_program_trains_and_prints_the_table(tmp_path: Path, ranks: Any) -> None:
    (program,) = (
        block for block in blocks(ROOT / "docs/trainer.md", "python") if "trainer.fit(" in block
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    printed, _ = ranks(2).run(run_here, str(script), (), str(tmp_path))
    ratio = re.search(r"compression ratio\W+([\d.]+)x", printed)
    assert ratio is not None
    assert float(ratio[1]) > 20


def test_first_recommender_trains_in_one_process() -> None:
    namespace: dict[str, Any] = {}
    exec(blocks(ROOT / "docs/recommender.md", "python")[0], namespace)
    model = namespace["Recommender"]()
    model.tables.materialize()
    optimizer = model.optimizer()
    before = model.tables.weight.detach().clone()
    model(torch.randn(4, 13), torch.tensor([[1, 2, 3]] * 4)).square().mean().backward()
    optimizer.step()
    assert int((model.tables.weight != before).any(dim=1).sum()) == 3


def test_first_pipeline_computes_a_loss() -> None:
    namespace: dict[str, Any] = {}
    exec(blocks(ROOT / "docs/pipeline.md", "python")[0], namespace)
    ids = torch.randint(1000, (4, 9))
    assert namespace["LanguageModel"]().training_step((ids, ids), 0).isfinite()
    assert isinstance(namespace["strategy"], lightning_dct.DCTPipelineStrategy)


def test_every_registered_name_is_on_the_page_of_the_trainer() -> None:
    (names,) = re.findall(
        r"^The registered names are(.*?)^$",
        text_of(ROOT / "docs/trainer.md"),
        re.MULTILINE | re.DOTALL,
    )
    registered = {
        name for name in StrategyRegistry.available_strategies() if name.startswith("dct")
    }
    assert set(re.findall(r"`(\w+)`", names)) == registered


COMMANDS = {" ".join(words): words for page in PAGES for words in commands_in(page)}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=list(COMMANDS))
def test_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    match words:
        case ["lightning-dct", "plan", *rest]:
            speed = Speed(1e-9, 1e-10, 1e-11, "made up")
            monkeypatch.setattr("lightning_dct.commands.measure_speed", lambda *_: speed)
            assert commands.main(["plan", *rest]) == 0
        case ["lightning-dct", command, *_]:
            # Its arguments are checked as it checks them; it does not start.
            reached = []
            summary, add_arguments, _ = commands.COMMANDS[command]
            run = (summary, add_arguments, lambda arguments: reached.append(arguments) or 0)
            monkeypatch.setitem(commands.COMMANDS, command, run)
            assert commands.main(words[1:]) == 0
            assert reached
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", requirement]:
            extras = set(re.findall(r"\[(.*)\]", requirement))
            assert extras <= set(metadata.metadata("lightning-dct").get_all("Provides-Extra"))
        case ["python", "experiments/train.py", *overrides]:
            composes(overrides)
        case ["python", "examples/elastic/start.py", ranks, "experiments/train.py", *overrides]:
            assert f"trainer.devices={ranks}" in overrides
            composes(overrides)
        case ["python", "experiments/compare.py", *rest]:
            given = iter(rest)
            common = []
            strategies = []
            for word in given:
                if word == "--strategy":
                    strategies.append(next(given).split(": ")[-1].split())
                elif word == "--sweep":
                    common.append(next(given).partition(",")[0])
                elif word == "--seeds":
                    # As many numbers as follow.
                    continue
                elif not word.isdigit():
                    common.append(word)
            assert strategies
            for choice, *overrides in strategies:
                composes([*common, f"strategy={choice}", *overrides])
        case ["wandb", command, *_]:
            assert command in wandb_cli.commands
        case ["torchrun", *rest]:
            # The script is the reader's own.
            assert (
                torch.distributed.run.get_args_parser().parse_args(rest).training_script
                == "train.py"
            )
        case ["python" | ".venv/bin/python", script, *rest] | [
            "sudo",
            ".venv/bin/python",
            script,
            *rest,
        ]:
            parses(script, rest, monkeypatch)
        case _:
            pytest.fail(f"docs have a command that no test looks at: {' '.join(words)}")


class ParsedError(Exception):
    """A script has read its arguments."""


def parses(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own parser takes these words; then it stops."""
    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)

        def parse_and_stop(*given: Any, parse: Callable[..., Any] = parse) -> None:
            parse(*given)
            raise ParsedError

        monkeypatch.setattr(argparse.ArgumentParser, name, parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(ParsedError):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def composes(overrides: list[str]) -> None:
    """Hydra knows every setting."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose("train", overrides)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """`paths/in/backticks` of this repository, and links to files."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(rf"`((?:{ROOM})/[\w./-]*)`", text):
        # Tables of tests name them from where those lie.
        assert (ROOT / path).exists() or (ROOT / "tests" / path).exists(), path
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        generated = page.parent.name == "docs" and link in ("contributing.md", "changelog.md")
        assert generated or (page.parent / link).exists(), link


def test_the_table_of_lengths_is_that_of_the_law() -> None:
    """Every rung for 2, 3, 4 and 8 ranks, with the steps that it needs, to three digits; no other
    row.
    """
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+)% \|(.*)\|$", text_of(ROOT / "docs" / "settings.md"), re.MULTILINE
    )
    for column, ranks in enumerate((2, 3, 4, 8)):
        told = {}
        for local_steps, percent, cells in rows:
            if cell := cells.split("|")[column].strip():
                told[int(local_steps), float(percent) / 100] = int(cell.replace(",", ""))
        needed = {
            (one.local_steps, one.density): steps_needed(one, ranks)
            for one in UserSettings.of({}).candidates(ranks)
        }
        assert told == pytest.approx(needed, rel=0.005, abs=5)
    assert {(int(steps), float(percent) / 100) for steps, percent, _ in rows} <= {*CANDIDATES}


def test_every_public_name_is_in_the_reference() -> None:
    import lightning_dct

    shown = {
        name
        for page in ROOT.glob("docs/api/*.md")
        for name in re.findall(r"^::: (\S+)$", text_of(page), re.M)
    }
    assert {
        f"lightning_dct.{name}" for name in lightning_dct.__all__ if name != "__version__"
    } <= shown
    assert "lightning_dct.fabric.DCTStrategy" in shown
