"""The present version's figures: their commands are complete, their results are read from what
programs write, and the pages have the table of the results.
"""

from pathlib import Path

import pytest

import compare
import comparison.runs
import replicas
from comparison.runs import Strategy
from evidence import command
from evidence.figures import FIGURES, Figure
from evidence.results import Result, load, put, read, save, table
from made_up_results import run_in_no_time

OF = ("1.0", "abc", "a machine")
LM = next(figure for figure in FIGURES if figure.name == "lm-2")


@pytest.mark.parametrize("page", command.PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_pages_show_the_results(page: Path) -> None:
    """``python experiments/evidence.py write`` makes them so."""
    assert page.read_text() == command.written(page)


def test_each_result_belongs_to_a_figure() -> None:
    known = {(figure.name, strategy) for figure in FIGURES for strategy in figure.strategies}
    assert {(one.figure, one.strategy) for one in load(command.RESULTS).values()} <= known
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_programs_know_the_commands(figure: Figure) -> None:
    words = figure.command(figure.seeds)
    if figure.program is compare.main:
        parsed = compare.make_parser().parse_intermixed_args(words)
        assert [Strategy.parse(text).overrides[0] for text in parsed.strategy]
        assert parsed.seeds == list(figure.seeds)
    else:
        with pytest.raises(SystemExit) as left:
            figure.program([*words, "--help"])
        assert left.value.code == 0


def test_missing_runs_are_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def figures(settings: dict[str, str]) -> dict[str, float]:
        is_dense = settings["strategy"] == "ddp"
        return {"loss": 2.0 if is_dense else 2.1, "sent": 8000.0 if is_dense else 160.0}

    monkeypatch.setattr(comparison.runs, "run_alone", run_in_no_time(started, figures))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(command, "current_commit", lambda: str(tmp_path / "outputs"))
    assert command.main(["run", "lm-2", "--seeds", "0"]) == 0
    assert len(started) == 2
    assert command.main(["run", "lm-2", "--seeds", "0", "1"]) == 0
    assert len(started) == 4
    assert command.missing(LM, [0, 1, 2]) == [2]
    shown = table(FIGURES, load(command.RESULTS), command.__version__).splitlines()
    assert shown[3:-1] == [
        f"| {LM.title} | 2 | loss 2.001 → 2.101 | +5.0% ± 0.0% (2 seeds) | 50x |"
    ]


def test_a_run_that_fails_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison.runs, "run_alone", run_in_no_time([], lambda settings: None))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(command, "current_commit", lambda: str(tmp_path / "outputs"))
    assert command.main(["run", "lm-2", "--seeds", "0"]) == 1
    assert load(command.RESULTS) == {}


def test_results_of_real_programs_are_read(tmp_path: Path) -> None:
    """A few steps of replicas in one process."""
    long = next(figure for figure in FIGURES if figure.program is replicas.main)
    words = tuple("20" if word == "12000" else word for word in long.words)
    short = long._replace(words=(*words, "--val-rows", "8"))
    assert replicas.main([*short.command([3]), "--output", str(tmp_path)]) == 0
    dense, compressed = read(short, tmp_path, *OF)
    assert dense.key == ("lm-long", "ddp", 3)
    assert compressed.key == ("lm-long", long.strategies[1], 3)
    assert compressed.value == pytest.approx(dense.value, rel=0.5)
    assert dense.ratio == pytest.approx(1.0)
    assert compressed.ratio > 5.0


def test_results_survive_the_file(tmp_path: Path) -> None:
    results = [
        Result("lm-2", "dct", 1, 1.25, 50.0, None, *OF),
        Result("recommender", "dct", 0, 0.75, 100.0, 90.5, *OF),
        Result("stages", "none", 0, 1.5, None, None, *OF),
    ]
    names = [figure.name for figure in FIGURES]
    save(tmp_path / "results.csv", results, names)
    assert load(tmp_path / "results.csv") == {one.key: one for one in results}


def test_scores_and_rows_have_their_own_words() -> None:
    recommender = next(figure for figure in FIGURES if figure.metric == "auc")
    results = [
        Result("recommender", "ddp", 0, 0.75, 1.0, None, *OF),
        Result("recommender", "dct", 0, 0.749, 110.0, 100.0, *OF),
        Result("recommender", "dct", 1, 0.7, 1.0, 1.0, *OF),
    ]
    line = table([recommender], {one.key: one for one in results}, "1.0").splitlines()[3]
    assert "| AUC 0.7500 → 0.7490 | -0.0010 (1 seed) | rows 100x, MLPs 110x |" in line
    # Figures of another version are not shown.
    assert len(table([recommender], {one.key: one for one in results}, "2.0").splitlines()) == 4


def test_times_are_read_and_compared_as_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the page of evidence shows a figure that is not of the README."""
    step = next(figure for figure in FIGURES if figure.metric == "ms" and not figure.in_readme)
    step = step._replace(words=LM.words)
    start = run_in_no_time([], lambda settings: {"loss": 2.0, "sent": 160.0})
    monkeypatch.setattr(comparison.runs, "run_alone", start)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(command, "current_commit", lambda: str(tmp_path / "outputs"))
    monkeypatch.setattr(command, "FIGURES", (step,))
    assert command.main(["run", step.name, "--seeds", "0"]) == 0
    compressed, dense = load(command.RESULTS).values()
    assert ", load " in dense.machine
    command.keep([dense._replace(value=40.0)])
    assert compressed.value == 10.0
    assert "| 40 → 10 ms | 0.25 times (1 run) | 50x |" in command.written(command.EVIDENCE)
    assert "ms |" not in command.written(command.README)


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no lines"):
        put("# A page", "a table")


def test_keeping_results_changes_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else runs after the first would be of other code, by what the file says."""
    asked: list[tuple[str, ...]] = []

    def git(*words: str) -> str:
        asked.append(words)
        return "abcd1234" if words[0] == "rev-parse" else ""

    monkeypatch.setattr(command, "_git", git)
    assert command.current_commit() == "abcd1234"
    folders = asked[0][asked[0].index("--") + 1 :]
    assert not any(command.RESULTS.is_relative_to(command.ROOT / one) for one in folders)
    monkeypatch.setattr(command, "_git", lambda *words: "abcd1234")
    assert command.current_commit() == "abcd1234+"
