"""Figures, tables and the picture of a comparison, out of made-up results."""

import csv
from pathlib import Path

import pytest

from comparison.runs import Entry, Run
from comparison.table import Figure, bytes_per_step, draw, main_metric, to_markdown, write_runs
from made_up_results import made_up


def entry(label: str, sent: float = 1000.0, **metrics: list[float | None]) -> Entry:
    """Runs of seeds 0, 1, ... with the metrics of each."""
    runs = [
        Run(
            seed,
            (),
            Path(f"{label}-{seed}"),
            made_up(seed=seed, sent=sent, **dict(zip(metrics, figures, strict=True))),
        )
        for seed, figures in enumerate(zip(*metrics.values(), strict=True))
    ]
    return Entry(label, tuple(runs))


def by_head(entries: list[Entry]) -> list[dict[str, str]]:
    lines = [line for line in to_markdown(entries, "title").splitlines() if line.startswith("| ")]
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_losses_are_set_against_the_baseline_in_percent_and_seed_by_seed() -> None:
    """The strategy is 10% worse than the baseline on either seed: the seeds' own spread is no part
    of that.
    """
    baseline, dct = by_head(
        [entry("ddp", 8000, loss=[0.999, 1.999]), entry("dct", loss=[1.099, 2.199])]
    )
    assert baseline["test/loss"] == "1.5000 ± 0.7071"
    assert baseline["loss against ddp"] == "-"
    assert dct["loss against ddp"] == "+10.0% ± 0.0%"
    assert (dct["seeds"], dct["gradient ratio"], dct["gradient kB a step"]) == ("2", "8.0x", "1.0")
    assert "val/loss" not in dct
    assert "inside ratio" not in dct


def test_scores_are_set_against_the_baseline_as_they_are() -> None:
    entries = [entry("ddp", auc=[0.7], loss=[0.5]), entry("dct", auc=[0.6], loss=[0.501])]
    _, dct = by_head(entries)
    assert dct["auc against ddp"] == "-0.1000"
    assert dct["loss against ddp"] == "+0.2%"
    assert main_metric(["test/accuracy", "test/loss", "test/auc"]) == "auc"


def test_a_run_that_is_missing_or_diverged_takes_its_seed_out_of_the_difference_and_is_told() -> (
    None
):
    entries = [
        entry("ddp", loss=[1.0, 2.0, 3.0]),
        entry("dct", loss=[1.5, None]),
        Entry("failed", ()),
    ]
    _, dct, failed = by_head(entries)
    assert dct["test/loss"] == "1.5010"
    assert dct["loss against ddp"] == "+50.0%"
    assert failed == {**dict.fromkeys(dct, "-"), "strategy": "failed", "seeds": "0"}
    (note,) = [line for line in to_markdown(entries, "title").splitlines() if "finite" in line]
    assert note == "- dct: 1 of 2 runs have no finite test/loss; means leave them out."


def test_what_crosses_inside_a_model_has_columns_and_counts() -> None:
    split = made_up(auc=0.7) | {"split_ratio": 120.0, "split_bytes_per_step": 500.0}
    assert bytes_per_step(split) == 1500.0
    assert bytes_per_step(made_up() | {"bytes_sent_per_step": None}) is None
    ddp, dct = by_head([entry("ddp", auc=[0.7]), Entry("dct", (Run(0, (), Path("x"), split),))])
    assert (ddp["inside ratio"], dct["inside ratio"], dct["inside kB a step"]) == (
        "-",
        "120.0x",
        "0.5",
    )


def test_the_table_says_how_to_read_it() -> None:
    text = to_markdown(
        [entry("a|b", loss=[1.0, 2.0]), entry("dct", loss=[1.0, 2.0])], "title", ["oh"]
    )
    assert text.startswith("title\n\n| strategy | seeds |")
    assert "| a\\|b | 2 |" in text
    assert (
        "- 2 processes; seeds 0, 1.\n- Mean ± sample standard deviation over the seeds.\n- Against"
        " a|b: seed" in text
    )
    assert text.endswith("- oh\n")


def test_the_file_for_spreadsheets_has_every_run_once(tmp_path: Path) -> None:
    whole = entry("dct, 1%", loss=[1.0, 2.0])
    trial = Run(0, ("x=1",), Path("trial"), made_up(loss=3.0))
    write_runs(tmp_path / "x.csv", [Entry(whole.label, whole.runs, (trial, whole.runs[0]))])
    with (tmp_path / "x.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["strategy"], row["compared"], row["seed"]) for row in rows] == [
        ("dct, 1%", "False", "0"),
        ("dct, 1%", "True", "0"),
        ("dct, 1%", "True", "1"),
    ]
    assert [row["swept"] for row in rows] == ["x=1", "", ""]
    assert float(rows[2]["val/loss"]) == 2.0
    assert float(rows[2]["bytes_sent_per_step"]) == 1000.0


def test_the_picture_takes_whatever_there_is(tmp_path: Path) -> None:
    """A strategy that sends nothing, one that diverged, one that failed, and a single seed."""
    entries = [
        entry("ddp", 8000, loss=[1.0, 2.0]),
        entry("none", 0, loss=[2.0]),
        entry("diverged", loss=[None]),
        entry("half", loss=[1.0, None]),
        Entry("failed", ()),
    ]
    draw(tmp_path / "all.png", entries, "title")
    draw(tmp_path / "none.png", entries[1:], "title")
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "none.png").stat().st_size > 0


def test_figures() -> None:
    assert Figure.of([1.0, None, 3.0]) == Figure(2.0, pytest.approx(2**0.5))
    assert Figure.of([4.0]) == Figure(4.0, None)
    assert Figure.of([None]) is None
