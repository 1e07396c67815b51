"""The cases whose ranks differ train on real ranks, and end in a table; a finished run is not done
again.
"""

import csv
from pathlib import Path

import pytest

import unlike_ranks
from unlike.cases import CASES

NEED_TRANSFORMERS = {"gpt2", "gpt2-free", "domains", "domains-sgd"}


def test_a_table_of_two_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: dense training of the same case, and the table's own figures."""
    words = [
        "--only",
        "rows",
        "--ranks",
        "2",
        "--seeds",
        "0",
        "--steps",
        "60",
        "--output",
        str(tmp_path),
    ]
    words += ["--strategy", "ddp", "--strategy", "dct density=0.3"]
    assert unlike_ranks.main(words) == 0
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(row["case"], row["strategy"]) for row in rows] == [
        ("rows", "ddp"),
        ("rows", "dct density=0.3"),
    ]
    losses = [float(row["loss"]) for row in rows]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert float(rows[1]["ratio"]) > 1.0
    capsys.readouterr()
    assert unlike_ranks.main(words) == 0
    again = capsys.readouterr()
    assert "against ddp" in again.out
    assert "Run(" not in again.err


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("gpt2", "gpt2-free", "domains", "domains-sgd")]
)
def test_ranks_draw_other_batches_of_one_model(name: str) -> None:
    """Each rank alone: the same weights, and losses of its own."""
    ranks = [
        CASES[name](seed=3, rank=rank, ranks=1 if name == "contrastive" else 2) for rank in range(2)
    ]
    for one, other in zip(*(rank.model.parameters() for rank in ranks), strict=True):
        assert one.equal(other)
    assert float(ranks[0].loss().detach()) != float(ranks[1].loss().detach())
    assert float(ranks[0].validate().detach()) == pytest.approx(float(ranks[1].validate().detach()))
