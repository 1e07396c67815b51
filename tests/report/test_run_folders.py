from lightning_dct.report.find_runs import find_runs, read_all
from made_up_runs import rows_of, write_csv, write_train_run


def test_a_folder_stands_for_all_runs_below_it(tmp_path):
    for number in (9, 10):
        write_csv(tmp_path / "lightning_logs" / f"version_{number}", rows_of(None))
    reading = read_all([str(tmp_path)])
    assert [run.name for run in reading.runs] == ["version_9", "version_10"]
    assert read_all([str(tmp_path), str(tmp_path / "lightning_logs")]).runs == reading.runs


def test_what_train_leaves_is_one_run_from_whatever_part_is_named(tmp_path):
    home = write_train_run(tmp_path / "dct", rows_of(8.0), ["strategy.density=0.03"])
    (home / "checkpoints").mkdir()
    for path in (home, home / "csv", home / "csv" / "metrics.csv"):
        (run,) = read_all([str(path)]).runs
        assert run.name == "dct"
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


def test_steps_of_a_log_alone(tmp_path):
    """Of 20 steps, logged at 19 where they train, and at 20 what comes after them."""
    for name, rows in {
        "1": [{"step": 19, "train/loss": 1.0}, {"step": 20, "test/loss": 1.0}],
        "2": [{"step": 9, "train/loss": 1.0}, {"step": 20, "val/loss": 1.0}],
        "3": [{"step": 20, "test/loss": 1.0}],
    }.items():
        write_csv(tmp_path / name, rows)
    assert [run.steps_done for run in read_all([str(tmp_path)]).runs] == [20, 20, 20]
