"""The page of peers, from runs that are made up: what is run, what is left out, and what it
says.
"""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

import comparison.runs
import peers
from made_up_results import run_in_no_time

CONF = Path(__file__).parents[2] / "conf"
LOSSES: dict[str, float | None] = {"ddp": 2.0, "ddp_bf16": 2.02, "sparse_loco": 2.2}


def figures(settings: dict[str, str]) -> dict[str, Any] | None:
    strategy = settings["strategy"]
    return {"loss": LOSSES[strategy], "sent": 8000.0 if strategy == "ddp" else 80.0}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(comparison.runs, "run_alone", run_in_no_time(names, figures))
    return names


@pytest.mark.parametrize("method", peers.METHODS.values(), ids=list(peers.METHODS))
def test_every_row_is_known_to_hydra(method: peers.Method) -> None:
    choice, *overrides = method.settings.split()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        compose("train", ["experiment=lm", f"strategy={choice}", *overrides, *method.timing])


def test_a_page_is_continued_and_says_what_it_shows(tmp_path: Path, started: list[str]) -> None:
    words = [
        "--loopback",
        "--steps",
        "40",
        "--ranks",
        "2",
        "4",
        "--output",
        str(tmp_path),
        "--methods",
        "ddp",
    ]
    assert peers.main([*words, "bf16"]) == 0
    assert len(started) == 4
    assert peers.main([*words, "bf16", "sparse-loco-2"]) == 0
    assert len(started) == 6
    page = (tmp_path / "peers-40.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    heads = rows[0]
    assert [row[0] for row in rows if row[0] not in ("method", "---")] == 2 * [
        "ddp",
        "bf16",
        "sparse-loco-2",
    ]
    row = dict(zip(heads, rows[4], strict=True))
    assert row["method"] == "sparse-loco-2"
    assert row["code"] == "ours, by the paper"
    assert row["settings"] == "sync_every=2 top_k=128"
    # That of the test part, a thousandth above.
    assert row["test loss"] == "2.2010"
    assert row["against ddp"] == f"{2.201 / 2.001 - 1:+.2%}"
    assert row["bytes a step (calls)"] == "80"
    assert row["ratio"] == "100.0x"
    assert "exogym: left out" in page
    assert (tmp_path / "peers-40.png").stat().st_size > 0
    with (tmp_path / "peers-40-4.csv").open() as file:
        assert [line["strategy"] for line in csv.DictReader(file)] == [
            "ddp",
            "bf16",
            "sparse-loco-2",
        ]


def test_a_row_whose_package_is_missing_is_left_out(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = peers.Method("bf16", "bf16 hook", "no-such-package", "ddp_bf16")
    monkeypatch.setitem(peers.METHODS, "bf16", missing)
    assert (
        peers.main(
            ["--loopback", "--steps", "40", "--output", str(tmp_path), "--methods", "ddp", "bf16"]
        )
        == 0
    )
    assert len(started) == 1
    assert (
        "bf16: left out, because no-such-package is not installed"
        in (tmp_path / "peers-40.md").read_text()
    )


def test_a_method_that_diverges_has_a_row(
    tmp_path: Path,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(LOSSES, "ddp_bf16", None)
    assert (
        peers.main(
            ["--loopback", "--steps", "40", "--output", str(tmp_path), "--methods", "ddp", "bf16"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"\| bf16 \| torch \S+ \| - \| - \| - \| 80 \|", printed)
    assert "- bf16: 1 of 1 runs have no finite test/loss" in printed


@pytest.mark.parametrize(
    "words", [["--methods", "bf16"], ["--methods", "ddp", "--seeds", "0", "0"]]
)
def test_a_command_that_makes_no_sense_is_refused(
    tmp_path: Path, started: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit):
        peers.main([*words, "--output", str(tmp_path)])
