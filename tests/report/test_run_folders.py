import pytest

from lightning_dct.report.reading import find_runs, read_all
from made_up_runs import rows_of, write_csv, write_train_run


def test_a_folder_stands_for_all_runs_below_it(tmp_path):
    for number in (9, 10):
        write_csv(tmp_path / "lightning_logs" / f"version_{number}", rows_of(None))
    reading = read_all([str(tmp_path)])
    assert [run.name for run in reading.runs] == ["version_9", "version_10"]
    assert read_all([str(tmp_path), str(tmp_path / "lightning_logs")]).runs == reading.runs


def test_what_train_leaves_is_one_run_from_whatever_part_is_named(tmp_path):
    home = write_train_run(
        tmp_path / "dct", rows_of(8.0), ["strategy.density=0.03"], steps=60, metrics={}, milliseconds_per_step=12.5
    )
    (home / "checkpoints").mkdir()
    for path in (home, home / "csv", home / "csv" / "metrics.csv"):
        (run,) = read_all([str(path)]).runs
        assert (run.name, run.milliseconds_per_step) == ("dct", 12.5)
        assert run.settings == {
            "strategy._target_": "lightning_dct.DCTStrategy",
            "strategy.density": "0.03",
            "seed": "0",
        }


def test_runs_in_folders_named_by_date_are_called_after_what_differs(tmp_path):
    for number, density in enumerate((0.01, 0.1)):
        write_train_run(
            tmp_path / f"2026-01-31_12-00-0{number}", rows_of(8.0), [f"strategy.density={density}", "seed=0"]
        )
    write_train_run(tmp_path / "named", rows_of(8.0), ["strategy.density=0.5"])
    assert [run.name for run in read_all([str(tmp_path)]).runs] == [
        "strategy.density=0.01", "strategy.density=0.1", "named",
    ]  # fmt: skip


def test_names_can_be_given_and_never_come_twice(tmp_path):
    for parent in ("a", "b"):
        write_csv(tmp_path / parent / "version_0", rows_of(None))
    words = [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert [run.name for run in read_all(words).runs] == ["a/version_0", "b/version_0"]
    assert [run.name for run in read_all([f"dense={words[0]}", words[1]]).runs] == ["dense", "b/version_0"]
    assert [run.name for run in read_all([f"lr=0.1={words[0]}"]).runs] == ["lr=0.1"]
    assert [run.name for run in read_all([f"x={word}" for word in words]).runs] == ["x (1)", "x (2)"]
    assert [run.name for run in read_all([f"x={tmp_path}"]).runs] == ["x/version_0 (1)", "x/version_0 (2)"]


def test_what_gives_no_run_is_named_and_the_others_are_read(tmp_path):
    good = write_csv(tmp_path / "good", rows_of(None))
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "metrics.csv").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    reading = read_all([str(tmp_path / "nowhere"), str(empty), str(bad), str(good)])
    assert [run.name for run in reading.runs] == ["good"]
    assert len(reading.problems) == 3
    for problem, folder in zip(reading.problems, ("nowhere", "empty", "bad"), strict=True):
        assert str(tmp_path / folder) in problem


def test_a_result_without_a_log_gives_its_validations_and_the_bytes_at_the_end(tmp_path):
    validations = [{"step": 30, "val/loss": 2.0}, {"step": 60, "val/loss": 1.0}]
    figures = {"steps": 60, "metrics": {"val/loss": 1.0, "test/loss": 1.5}, "validations": validations}
    counted = {"bytes_sent_per_step": 100.0, "bytes_dense_per_step": 800.0}
    write_train_run(tmp_path / "all", None, ["d=1"], **figures, **counted)
    (whole,) = read_all([str(tmp_path)]).runs
    assert whole.series["val/loss"] == {29: 2.0, 59: 1.0}
    assert whole.series["dct/dp/bytes_sent"] == {59: 6000.0}


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"steps": 3}', '{"steps": 0, "metrics": {}}'),
        *('{"steps": "many", "metrics": {}}', '{"steps": 3, "metrics": []}'),
        '{"steps": 3, "metrics": {}, "validations": 7}',
        '{"steps": 3, "metrics": {}, "milliseconds_per_step": "few"}',
    ],
)
def test_a_result_that_is_none_is_reported(tmp_path, content):
    home = write_train_run(tmp_path / "run", None, ["d=1"])
    (home / "result.json").write_text(content)
    reading = read_all([str(home)])
    assert not reading.runs
    assert str(home / "result.json") in reading.problems[0]
    write_csv(home / "csv", rows_of(None))
    assert len(read_all([str(home)]).problems) == (0 if content == '{"steps": 0, "metrics": {}}' else 1)


def test_logs_of_one_run_are_not_shown_twice(tmp_path):
    home = write_train_run(tmp_path / "run", rows_of(None), ["d=1"])
    log = home / "wandb" / "offline-run-20260131_120000-abc" / "run-abc.wandb"
    log.parent.mkdir(parents=True)
    log.touch()
    assert find_runs(home) == [(home, home / "csv" / "metrics.csv")]


def test_a_name_too_long_for_a_path_is_reported(tmp_path):
    run = write_csv(tmp_path / "run", rows_of(None))
    reading = read_all([5000 * "a", str(run)])
    assert len(reading.runs) == len(reading.unreadable) == 1


def test_the_end_of_a_run_comes_from_its_result(tmp_path):
    """A log of every 10th step of 25 has neither the last bytes nor the last step; result.json has both."""
    figures = {"steps": 25, "metrics": {"val/loss": 1.0}, "bytes_sent_per_step": 1000.0, "bytes_dense_per_step": 8000.0}
    write_train_run(tmp_path / "1-logged", rows_of(8.0, steps=25), ["d=1"], **figures)
    # Shorter than the logging interval: nothing but the validation after training is in the log.
    write_train_run(tmp_path / "2-short", [{"step": 25, "val/loss": 1.0}], ["d=2"], **figures)
    inside = {"split_ratio": 4.0, "split_bytes_per_step": 500.0, "split_bytes_dense_per_step": 2000.0}
    write_train_run(tmp_path / "3-split", None, ["d=3"], **figures, **inside)
    runs = read_all([str(tmp_path)]).runs
    for run, sent, dense in zip(runs, (25_000, 25_000, 37_500), (200_000, 200_000, 250_000), strict=True):
        counted = (run.counted_bytes(key)[24] for key in ("bytes_sent", "bytes_dense"))
        assert (run.steps_done, *counted) == (25, sent, dense)


def test_steps_of_a_log_alone(tmp_path):
    """Of 20 steps, logged at 19 where they train, and at 20 what comes after them."""
    for name, rows in {
        "1": [{"step": 19, "train/loss": 1.0}, {"step": 20, "test/loss": 1.0}],
        "2": [{"step": 9, "train/loss": 1.0}, {"step": 20, "val/loss": 1.0}],
        "3": [{"step": 20, "test/loss": 1.0}],
    }.items():
        write_csv(tmp_path / name, rows)
    assert [run.steps_done for run in read_all([str(tmp_path)]).runs] == [20, 20, 20]
