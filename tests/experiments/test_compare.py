"""What is run and what is chosen: sweeps, folders, and whole comparisons whose runs take no
time.
"""

import fcntl
import json
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest

import comparison.runs
from compare import main, take_seeds
from comparison.runs import (
    OUTPUT,
    RESULT,
    Runner,
    Strategy,
    collect,
    plan_run,
    read_result,
    require_distinct,
)
from comparison.sweep import Axis, choose, combinations
from made_up_results import made_up, run_in_no_time

RATES = Axis.parse("model.learning_rate=0.003,0.01,0.03")


def trials(*figures: float | None, metric: str = "loss") -> dict[tuple[str, ...], dict[str, Any]]:
    """One run for each rate; the test part would choose the other way round."""
    results = [made_up(**{metric: figure}) for figure in figures]
    for result, figure in zip(results, figures, strict=True):
        result["metrics"][f"test/{metric}"] = None if figure is None else -figure
    return dict(zip(combinations([RATES]), results, strict=True))


def test_a_sweep_goes_by_validation() -> None:
    swept, values, note = choose([RATES], trials(1.2, 1.0, 1.1), seed=5)
    assert swept == ("model.learning_rate=0.01",)
    assert values == {"model.learning_rate": "0.01"}
    assert note.startswith("val/loss of seed 5 is 1.2000 at model.learning_rate=0.003, 1.0000 at")
    assert choose([RATES], trials(0.7, 0.9, 0.8, metric="auc"), 0)[1] == {
        "model.learning_rate": "0.01"
    }


@pytest.mark.parametrize(
    ("figures", "end"), [((0.9, 1.0, 1.1), "below 0.003"), ((1.2, None, 1.1), "above 0.03")]
)
def test_a_best_value_at_the_edge_is_told(figures: tuple[float | None, ...], end: str) -> None:
    _, values, note = choose([RATES], trials(*figures), 0)
    assert values["model.learning_rate"].endswith(" (edge)")
    assert f"model.learning_rate {end} was not tried" in note
    assert ("1 of 3 values have none" in note) == (None in figures)


def test_only_what_has_an_order_has_edges() -> None:
    betas = Axis.parse("model.betas=[0.9,0.999],[0.0,0.999]")
    both = combinations([RATES, betas])
    assert len(both) == 6
    results = {swept: made_up(loss=1.0 + abs(place - 2)) for place, swept in enumerate(both)}
    assert choose([RATES, betas], results, 0)[1] == {
        "model.learning_rate": "0.01",
        "model.betas": "[0.9,0.999]",
    }
    assert combinations([]) == [()]


def test_a_sweep_without_any_result_chooses_nothing() -> None:
    with pytest.raises(ValueError, match="no value of the sweep has a result"):
        choose([RATES], dict.fromkeys(combinations([RATES])), 0)
    with pytest.raises(ValueError, match="finite val/loss"):
        choose([RATES], trials(None, None, None), 0)
    with pytest.raises(ValueError, match="give several values"):
        Axis.parse("model.learning_rate=0.1")


def test_labels_and_settings() -> None:
    masks = 'dct strategy.density_per_parameter={"*": 0.001}'
    assert Strategy.parse(masks).overrides[0] == "strategy=dct"
    assert Strategy.parse("d = 1%: default: dct seed=1").label == "d = 1%: default"
    with pytest.raises(ValueError, match="must name a file of conf/strategy first"):
        Strategy.parse("strategy.density=0.1")
    ddp = Strategy.parse("ddp")
    dct = Strategy.parse("dct model.learning_rate=1")
    varied = {"seed": "--seeds", "data.batch_size": "--sweep"}
    require_distinct([ddp, dct], [], varied)
    for strategies, common, message in (
        ([ddp, Strategy.parse("ddp: dct")], [], "label of its own"),
        ([ddp, dct], ["data.batch_size=3"], "--sweep sets data.batch_size already"),
        ([ddp, dct], ["strategy=ddp"], "--strategy sets strategy already"),
        ([Strategy.parse("ddp seed=1")], [], "--seeds sets seed already"),
    ):
        with pytest.raises(ValueError, match=message):
            require_distinct(strategies, common, varied)


def test_seeds_are_given_in_one_place() -> None:
    assert take_seeds(["a=1"], None) == (["a=1"], [0])
    assert take_seeds(["a=1", "seed=1,2"], None) == (["a=1"], [1, 2])
    assert take_seeds(["a=1"], [3, 4]) == (["a=1"], [3, 4])
    for overrides, seeds in ((["seed=1"], [2]), ([], [1, 1]), (["seed=one"], None)):
        with pytest.raises(ValueError):
            take_seeds(overrides, seeds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "ddp"], "say what all runs share"),
        (["experiment=lm", "--collect", "multirun"], "takes runs as they are"),
        (["--collect", "multirun", "--seeds", "1"], "takes runs as they are"),
        (["--collect", "multirun", "--link", "10"], "takes runs as they are"),
        (["experiment=lm", "--strategy", "ddp", "--strategy", "ddp"], "label of its own"),
        (["experiment=lm"], "--strategy --collect is required"),
        (
            ["experiment=lm", "seed=range(3)", "--strategy", "ddp"],
            "seed=range(3): write the seeds as in --seeds",
        ),
        (["experiment=lm", "--strategy", "ddp", "--sweep", "seed=0,1"], "neither seed (--seeds)"),
        (
            ["experiment=lm", "--strategy", "ddp", "--sweep", "strategy=ddp,dct"],
            "nor strategy (--strategy)",
        ),
        (
            ["experiment=lm", "--strategy", "ddp", "--sweep", "a=1,2", "--sweep", "a=3,4"],
            "each setting once",
        ),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_no_two_runs_share_a_folder(tmp_path: Path) -> None:
    """Texts that a slug alone would not tell apart, and a label, which is no setting."""
    common = ["data.rows=[1,2]"], ["data.rows=[12]"], ["+data.rows=[1,2]"]
    texts = (
        "dct strategy.density=0.1",
        "dct strategy.density=-0.1",
        "dct a=1 b=2",
        "dct a=1,b=2",
        "x" * 300,
        "x" * 301,
    )
    plans = [
        plan_run(shared, Strategy.parse(text), swept, seed, tmp_path)
        for shared in common
        for text in texts
        for swept in ((), ("a.b=1",))
        for seed in (0, 1)
    ]
    assert len({plan.folder for plan in plans}) == len(plans)
    assert all(len(plan.folder.name) < 128 and "=" not in plan.folder.name for plan in plans)
    on_hosts = plan_run(common[0], Strategy.parse(texts[0]), (), 0, tmp_path, ("--hosts", "2"))
    assert on_hosts.folder not in {plan.folder for plan in plans}
    labelled = plan_run(common[0], Strategy.parse("a label: dct a=1 b=2"), (), 0, tmp_path)
    assert labelled.folder in {plan.folder for plan in plans}


def test_the_result_of_another_run_is_refused(tmp_path: Path) -> None:
    planned = plan_run(
        ["experiment=lm", "hydra.verbose=true"], Strategy.parse("ddp"), (), 1, tmp_path
    )
    assert read_result(planned) is None
    planned.folder.mkdir()
    file = planned.folder / "result.json"
    file.write_text(json.dumps(made_up(["experiment=lm", "strategy=ddp", "seed=1"])))
    assert read_result(planned) is not None
    for text in (json.dumps(made_up(["experiment=lm", "strategy=ddp", "seed=2"])), "[]", "{"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"result\.json is"):
            read_result(planned)


def test_a_run_that_a_killed_comparison_has_left_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        comparison.runs, "run_alone", lambda *_: pytest.fail("started beside the one that runs")
    )
    planned = plan_run(["experiment=lm"], Strategy.parse("ddp"), (), 1, tmp_path)
    planned.folder.mkdir()
    # As its processes have it, which inherit what the comparison has locked.
    left = (planned.folder / OUTPUT).open("w")
    fcntl.flock(left, fcntl.LOCK_EX)
    left.write("so far\n")

    def end() -> None:
        (planned.folder / RESULT).write_text(json.dumps(made_up(list(planned.overrides), loss=1.0)))
        left.close()

    threading.Timer(0.3, end).start()
    found = Runner().get(planned)
    assert found is not None
    assert found.result["metrics"]["val/loss"] == 1.0
    assert (planned.folder / OUTPUT).read_text() == "so far\n"


def test_runs_on_hosts_are_told_how_and_may_have_the_overrides_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], output: Any) -> int:
        commands.append(command)
        folder = Path(command[-1].partition("=")[2].strip("'"))
        (folder / "result.json").write_text(
            json.dumps(made_up([*command[6:-1], "trainer.num_nodes=2"], loss=1.0))
        )
        return 0

    monkeypatch.setattr(comparison.runs, "run_alone", run)
    words = [
        "experiment=lm",
        "--strategy",
        "ddp",
        "--hosts",
        "2",
        "--link",
        "100:50",
        "--output",
        str(tmp_path),
    ]
    assert main(words) == 0
    ((_, script, *options),) = commands
    assert Path(script).name == "train_on_hosts.py"
    assert options[:-1] == [
        "--hosts",
        "2",
        "--link",
        "100.0:50.0",
        "experiment=lm",
        "strategy=ddp",
        "seed=0",
    ]
    with pytest.raises(SystemExit):
        main([*words, "--link", "0"])


def figures_of(settings: dict[str, str]) -> dict[str, float]:
    """The strategy's loss, and more at rates other than 0.01 and with later seeds."""
    rate = float(settings.get("model.learning_rate", "0.01"))
    return {
        "loss": {"ddp": 1.0, "dct": 1.1}[settings["strategy"]]
        + abs(rate - 0.01)
        + 0.01 * int(settings["seed"])
    }


SWEPT = shlex.split(
    "experiment=lm --seeds 0 1 --sweep model.learning_rate=0.01,1"
    " --strategy ddp --strategy '1%: dct strategy.density=0.01'"
)


def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    whole = run_in_no_time(started, figures_of)

    def interrupted(command: list[str], output: Any) -> int:
        if len(started) == 4:
            raise KeyboardInterrupt
        return whole(command, output)

    words = [*SWEPT, "--output", str(tmp_path)]
    monkeypatch.setattr(comparison.runs, "run_alone", interrupted)
    assert main(words) == 130
    assert not (tmp_path / "table.md").exists()
    before = list(started)
    assert main([*words, "--collect-only"]) == 1
    assert "1%, model.learning_rate=1, seed 0: missing" in (tmp_path / "table.md").read_text()
    assert started == before

    monkeypatch.setattr(comparison.runs, "run_alone", whole)
    assert main(words) == 0
    # Both rates of both strategies with the first seed, and the better of them with the second.
    assert len(started) == len(set(started)) == 2 * (2 + 1)
    ddp, dct = (tmp_path / "table.md").read_text().splitlines()[4:6]
    assert ddp.startswith("| ddp | 2 | 0.01 (edge) | 1.0060 ± 0.0071 | - |")
    assert dct.startswith("| 1% | 2 | 0.01 (edge) | 1.1060 ± 0.0071 | +9.9% ± 0.1% |")
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 6
    for picture in ("quality.png", "pace.png"):
        assert (tmp_path / picture).stat().st_size > 0

    (tmp_path / "table.md").unlink()
    assert main([*words, "--collect-only"]) == 0
    assert len(started) == 6
    assert (tmp_path / "table.md").read_text().splitlines()[4:6] == [ddp, dct]


def test_what_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def figures(settings: dict[str, str]) -> dict[str, float] | None:
        return (
            None
            if (settings["strategy"], settings["seed"]) == ("ddp", "0")
            else figures_of(settings)
        )

    monkeypatch.setattr(comparison.runs, "run_alone", run_in_no_time(started, figures))
    words = [
        "experiment=lm",
        "--seeds",
        "0",
        "1",
        "--strategy",
        "ddp",
        "--strategy",
        "dct",
        "--output",
        str(tmp_path),
    ]
    assert main(words) == 1
    assert len(started) == 4
    printed = capsys.readouterr().out
    assert "a line of what went wrong" in printed
    table = (tmp_path / "table.md").read_text()
    assert "- ddp, seed 0: has failed with exit status 1; see " in table
    # Against the one seed that both have.
    assert "| dct | 2 | 1.1060 ± 0.0071 | +9.9% |" in table
    # Of a sweep of which all values fail nothing is chosen.
    assert main([*words, "--sweep", "model.learning_rate=0.01,1"]) == 1
    table = (tmp_path / "table.md").read_text()
    assert "- ddp: no value of the sweep has a result to go by" in table
    assert "| ddp | 0 | - |" in table


def test_a_sweep_of_hydra_is_grouped_by_all_but_the_seed(tmp_path: Path) -> None:
    """Twelve jobs, so that job 10 comes behind job 9 and not behind job 1."""
    densities = ("0.1", "0.01", "0.5", "0.05", "0.3", "0.03")
    jobs = [(density, seed) for density in densities for seed in (0, 1)]
    for number, (density, seed) in enumerate(jobs):
        folder = tmp_path / str(number)
        (folder / ".hydra").mkdir(parents=True)
        overrides = ["experiment=lm", f"strategy.density={density}", f"seed={seed}"]
        (folder / ".hydra" / "overrides.yaml").write_text(
            "".join(f"- {override}\n" for override in overrides)
        )
        (folder / "result.json").write_text(json.dumps(made_up(overrides, seed, loss=1.0)))
    entries, common, unfinished = collect([tmp_path])
    assert [found.label for found in entries] == [f"dct density={density}" for density in densities]
    assert all([run.seed for run in found.runs] == [0, 1] for found in entries)
    assert (common, unfinished) == (["experiment=lm"], [])

    (tmp_path / "3" / "result.json").unlink()
    _, _, unfinished = collect([tmp_path])
    assert unfinished == [f"{tmp_path / '3'} has left no result.json"]
    with pytest.raises(ValueError, match="are the same run"):
        collect([tmp_path, tmp_path / "1"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no result\.json below"):
        collect([tmp_path / "empty"])
