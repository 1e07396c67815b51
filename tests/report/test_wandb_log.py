import json
import math

import pytest

from lightning_dct.report.find_runs import read_all
from lightning_dct.report.logs import run_of_records

wandb = pytest.importorskip("wandb")


def record(kind, **content):
    return json.dumps({"num": 1, "type": kind, kind: content})


def row(**item):
    return record("history", item=item)


def test_records_become_a_run(tmp_path):
    lines = [
        record("run", display_name="brave", run_id="abc", config={"update": {"_wandb": {}}}),
        record("config", update={"split": {"density": 0.2}}),
        row(**{"trainer/global_step": 49, "_step": 0, "_runtime": 3.5, "loss": 2.0, "table": {"_type": "table"}}),
        row(**{"trainer/global_step": 49, "_step": 1, "_runtime": 4.5, "dct/dp/bytes_sent": 100, "on": True}),
        row(**{"trainer/global_step": 99, "_step": 2, "_runtime": 7.5, "loss": "NaN"}),
    ]
    run = run_of_records(lines, tmp_path / "run-abc.wandb")
    assert (run.name, run.seconds, run.problems) == ("brave", 7.5, ())
    assert run.series.keys() == {"loss", "dct/dp/bytes_sent"}
    assert run.series["dct/dp/bytes_sent"] == {49: 100.0}
    assert list(run.series["loss"]) == [49, 99]
    assert math.isnan(run.series["loss"][99])
    assert run.settings == {"split.density": "0.2"}


def test_malformed_records_are_counted(tmp_path):
    run = run_of_records(["{", "[]", row(loss=1.0), row(_step=0, loss=1.0)], tmp_path / "x.wandb")
    assert run.series["loss"] == {0: 1.0}
    assert run.problems == (f"{tmp_path / 'x.wandb'}: 3 malformed records left out",)


def test_an_offline_run_is_read_whole_cut_off_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(
        console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False
    )
    with wandb.init(mode="offline", dir=tmp_path, name="mine", config={"lr": 0.1}, settings=settings) as logged:
        for step in range(400):
            logged.log({"trainer/global_step": step, "val/loss": 4.0 - step / 100})
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    (run,) = read_all([str(tmp_path)]).runs
    assert run.name == "mine"
    assert run.series["val/loss"] == {step: 4.0 - step / 100 for step in range(400)}
    assert run.settings == {"lr": "0.1"}
    assert run.problems == ()

    content = log.read_bytes()
    log.write_bytes(content[: len(content) // 2])
    (run,) = read_all([str(log)]).runs
    assert 10 < len(run.series["val/loss"]) < 400
    assert str(log) in run.problems[0]

    log.write_bytes(b"no log")
    reading = read_all([str(log)])
    assert not reading.runs
    assert str(log) in reading.problems[0]
