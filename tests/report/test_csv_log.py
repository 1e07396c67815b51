import math

import pytest

from lightning_dct.report.find_runs import read_all
from lightning_dct.report.logs import read_run
from made_up_runs import rows_of, write_csv, write_train_run


def read(folder):
    return read_run(folder, folder / "metrics.csv")


def test_every_value_is_read_under_its_step(tmp_path):
    run = read(write_csv(tmp_path / "version_0", rows_of(8.0), "width: 128\nsplit: {density: 0.2}\n"))
    assert run.series["dct/dp/bytes_sent"] == {n: 1000.0 * (n + 1) for n in range(9, 60, 10)}
    assert run.series["val/loss"] == {step: 5 - step / 20 for step in (19, 39, 59)}
    assert run.settings == {"width": "128", "split.density": "0.2"}
    assert run.problems == ()
    assert "step" not in run.series


def test_what_cannot_be_read_is_left_out_counted_and_named(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("loss,step,text\n1.0,0,\n2.0,1\nnan,2,hello\n3.0,three,\n4.0,4,world\n5.0,5")
    run = read(tmp_path)
    assert run.series.keys() == {"loss"}
    assert list(run.series["loss"]) == [0, 2, 4]
    assert math.isnan(run.series["loss"][2])
    assert run.problems == (f"{file}: 5 lines or values left out, first line 3: another number of fields",)


def test_a_step_logged_twice_counts_once(tmp_path):
    (tmp_path / "metrics.csv").write_text("loss,step\n1.0,4\n3.0,2\n2.0,4\n")
    assert read(tmp_path).series == {"loss": {2: 3.0, 4: 2.0}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "no column 'step'"),
        ("loss,epoch\n1,0\n", "no column 'step'"),
        ("loss,step\n", "no values"),
        ("a,step\n1\n", "no values"),
    ],
)
def test_a_file_without_values_is_refused_by_name(tmp_path, content, why):
    file = tmp_path / "metrics.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=why) as error:
        read(tmp_path)
    assert str(file) in str(error.value)


def test_settings_that_name_python_objects_run_no_code(tmp_path):
    settings = (
        f"a: !!python/object/apply:os.mkdir ['{tmp_path}/made']\nb: !!python/name:torch.relu ''\n"
        "c: !!python/tuple [1, 2]\nd: &id001 [0.9, 0.99]\ne: *id001\n"
    )
    run = read(write_csv(tmp_path / "run", rows_of(None), settings))
    betas = "[0.9, 0.99]"
    assert run.settings == {"a": f"[{tmp_path}/made]", "b": "torch.relu", "c": "[1, 2]", "d": betas, "e": betas}
    assert not run.problems
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "settings",
    ["a: [1", 5000 * "[" + 5000 * "]", "a: &a [*a]", "a: 1\n" * 100_000],
    ids=["no YAML", "deep", "itself", "long"],
)
def test_settings_that_cannot_be_shown_are_left_out_and_named(tmp_path, settings):
    folder = write_csv(tmp_path / "run", rows_of(None), settings)
    run = read(folder)
    assert run.settings == {}
    assert run.problems[0].startswith(f"{folder / 'hparams.yaml'}: left out, ")


def test_values_of_counters_that_are_not_finite_are_left_out_and_counted(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,dct/seconds,dct/dp/bytes_sent,loss\n0,1.0,inf,1\n1,nan,nan,nan\n2,inf,inf,inf\n3,4.0,nan,1\n")
    run = read(tmp_path)
    assert run.series["dct/seconds"] == {0: 1.0, 3: 4.0}
    assert run.milliseconds == 1000
    assert run.counted_bytes("bytes_sent") is None
    assert len(run.series["loss"]) == 4
    assert run.problems == (
        f"{file}: dct/dp/bytes_sent: values that are not finite, left out: 4",
        f"{file}: dct/seconds: values that are not finite, left out: 2",
    )


@pytest.mark.parametrize("overrides", ["[[a], [b]]", "- {a: 1}\n- b", "a: 1", "'text'"])
def test_damaged_overrides_are_left_out_and_named(tmp_path, overrides):
    for name in ("2026-01-01", "2026-01-02"):  # dates, for which the overrides would be the name
        home = write_train_run(tmp_path / name, rows_of(None), ["seed=0"])
        (home / ".hydra" / "overrides.yaml").write_text(overrides)
    reading = read_all([str(tmp_path)])
    assert [run.overrides for run in reading.runs] == [(), ()]
    assert f"{home / '.hydra' / 'overrides.yaml'}: left out, it is no list of words" in reading.problems
    (home / ".hydra" / "overrides.yaml").write_text("")
    assert not read_all([str(home)]).problems
