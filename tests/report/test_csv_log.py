import math

import pytest

from lightning_dct.report.logs import read_csv_run, read_metrics
from lightning_dct.report.run import Series, UnreadableRun
from lightning_dct.report.settings import differing, read_settings
from made_up_runs import rows_of, write_csv


def test_every_value_is_read_under_its_step(tmp_path):
    run = read_csv_run(
        write_csv(tmp_path / "version_0", rows_of(8.0), "width: 128\nsplit: {density: 0.2}\n") / "metrics.csv"
    )
    assert run.series["dct/dp/bytes_sent"] == Series(
        (9, 19, 29, 39, 49, 59), tuple(1000.0 * n for n in range(10, 70, 10))
    )
    assert run.series["val/loss"] == Series((19, 39, 59), tuple(5 - step / 20 for step in (19, 39, 59)))
    assert run.settings == {"width": "128", "split.density": "0.2"}
    assert run.problems == ()
    assert "step" not in run.series


def test_what_cannot_be_read_is_left_out_counted_and_named(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("loss,step,text\n1.0,0,\n2.0,1\nnan,2,hello\n3.0,three,\n4.0,4,world\n5.0,5")
    series, problems = read_metrics(file)
    assert series["loss"].steps == (0, 2, 4)
    assert math.isnan(series["loss"].values[1])
    assert "text" not in series
    assert problems == [
        f"{file}: 3 malformed lines left out, the first in line 3: 2 fields instead of 3",
        f"{file}: 2 values that are no numbers left out, the first in line 4: text='hello'",
    ]


def test_a_step_logged_twice_counts_once():
    assert Series.of([(4, 1.0), (2, 3.0), (4, 2.0)]) == Series((2, 4), (3.0, 2.0))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "no column 'step'"),
        ("loss,epoch\n1,0\n", "no column 'step'"),
        ("loss,step\n", "no values"),
        ("a,step\n1\n", "1 mal"),
    ],
)
def test_a_file_without_values_is_refused_by_name(tmp_path, content, why):
    file = tmp_path / "metrics.csv"
    file.write_text(content)
    with pytest.raises(UnreadableRun, match=why) as error:
        read_metrics(file)
    assert str(file) in str(error.value)


def test_settings_that_name_python_objects_run_no_code(tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text(
        f"a: !!python/object/apply:os.mkdir ['{tmp_path}/made']\nb: !!python/name:torch.relu ''\n"
        "c: !!python/tuple [1, 2]\n"
    )
    settings, problems = read_settings(file)
    assert settings == {"a": f"[{tmp_path}/made]", "b": "torch.relu", "c": "[1, 2]"}
    assert not problems
    assert not (tmp_path / "made").exists()


def test_settings_that_are_no_yaml_are_reported(tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text("a: [1")
    assert read_settings(file)[0] == {}
    assert str(file) in read_settings(file)[1][0]


def test_settings_that_differ_come_apart_from_those_that_do_not():
    assert differing([{"a": "1", "b": "2"}, {}, {"a": "1", "b": "3", "c": "4"}]) == (["b", "c"], ["a"])
