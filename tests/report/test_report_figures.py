"""Figures on the page against plain arithmetic."""

import math

import pytest

from lightning_dct.report.charts import MOST_POINTS, make_sections, over_bytes, over_steps
from lightning_dct.report.quality import find_quality, find_training_loss, higher_is_better, same_on_test
from lightning_dct.report.reading import read_all
from lightning_dct.report.run import Run, Series, averaged, best_of, counted_bytes, counter_at
from lightning_dct.report.totals import totals_of, totals_table
from made_up_runs import rows_of, write_csv


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_csv(folder / "1-dct", rows_of(8.0))
    write_csv(folder / "2-split", rows_of(4.0, inside=True))
    write_csv(folder / "3-plain", rows_of(None))
    return read_all([str(folder)]).runs


def charts_of(runs):
    return {chart.key: chart for section in make_sections(runs, "train/loss", "val/loss") for chart in section.charts}


def of(tmp_path, **series):
    return Run("run", tmp_path, "CSV log", {name.replace("__", "/"): value for name, value in series.items()})


def test_quality_against_bytes_takes_bytes_at_the_same_step(runs):
    dct, split = charts_of(runs)["quality-bytes"].lines
    # 1,000 bytes a step, twice that where as much crosses inside the model; validations after 20, 40 and 60 steps.
    losses = [5 - step / 20 for step in (19, 39, 59)]
    assert dct.points == tuple(zip((20_000.0, 40_000.0, 60_000.0), losses, strict=True))
    assert split.points == tuple(zip((40_000.0, 80_000.0, 120_000.0), losses, strict=True))


def test_a_run_whose_bytes_are_not_known_is_in_the_charts_against_steps_only(runs):
    charts = charts_of(runs)
    for key in ("training-steps", "quality-steps"):
        assert [line.run for line in charts[key].lines] == [0, 1, 2]
    for key in ("training-bytes", "quality-bytes"):
        assert [line.run for line in charts[key].lines] == [0, 1]
        assert "Not shown: 3-plain (its bytes were not logged)." in charts[key].remarks
    assert charts["quality-steps"].lines[2].points == ((19.0, 5 - 19 / 20), (39.0, 5 - 39 / 20), (59.0, 5 - 59 / 20))


def test_every_logged_kind_has_its_chart(runs):
    charts = charts_of(runs)
    names = ("compression-ratio", "density", "threshold", "residual-norm")
    assert charts.keys() == {
        "training-steps", "training-bytes", "quality-steps", "quality-bytes", "sent", "ratio", "overhead",
        *(f"dp-{name}" for name in names), *(f"mp-{name}" for name in names),
    }  # fmt: skip
    assert [line.run for line in charts["mp-threshold"].lines] == [1]
    assert set(charts["dp-density"].lines[0].points) == {(float(step), 0.03) for step in range(9, 60, 10)}
    assert charts["sent"].lines[1].points[-1] == (59.0, 120_000.0)
    plain = charts_of(runs[2:])
    assert plain.keys() == {"training-steps", "quality-steps"}


def test_totals_are_those_of_the_log(runs):
    dct, split, plain = (totals_of(run, "val/loss", "test/loss") for run in runs)
    assert (dct.steps, dct.counted_steps) == (60, 60)
    assert (dct.bytes_sent, dct.bytes_dense, dct.ratio) == (60_000, 480_000, 8)
    assert (dct.final, dct.best, dct.test) == (5 - 59 / 20, (59, 5 - 59 / 20), 1.5)
    assert (split.bytes_sent, split.inside_sent, split.ratio, split.inside_ratio) == (120_000, 60_000, 4, 4)
    assert (plain.bytes_sent, plain.bytes_dense, plain.ratio, plain.overhead_ms) == (None, None, None, None)
    heads, rows = totals_table(runs, "val/loss")
    table = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [row["bytes sent"] for row in table] == ["60.00 kB", "120.00 kB", "-"]
    assert [row["ratio"] for row in table] == ["8.0x", "4.0x", "-"]
    assert "time" not in heads


def test_bytes_between_and_after_logged_steps():
    counter = Series((9, 29), (100.0, 500.0))
    assert counter_at(counter, -1) == 0
    assert counter_at(counter, 4) == 50
    assert counter_at(counter, 9) == 100
    assert counter_at(counter, 19) == 300
    assert counter_at(counter, 49) == 900
    assert counter_at(counter, 50) is None
    assert counter_at(Series((9,), (100.0,)), 14) == 150


def test_kinds_of_traffic_are_added_and_counters_that_begin_anew_go_on():
    series = {
        "dct/dp/bytes_sent": Series((0, 1, 2, 3), (10.0, 20.0, 10.0, 20.0)),
        "dct/mp/bytes_sent": Series((1, 3), (5.0, 9.0)),
    }
    assert counted_bytes(series, "bytes_sent") == Series((0, 1, 2, 3), (10.0, 25.0, 35.0, 49.0))
    assert counted_bytes(series, "bytes_sent", ["mp"]) == Series((1, 3), (5.0, 9.0))
    assert counted_bytes({}, "bytes_sent") is None


def test_averaging_keeps_the_mean_and_leaves_gaps_where_nothing_is_finite():
    points = [(float(x), float(x % 7)) for x in range(1000)]
    short = averaged(points, 100)
    assert len(short) == 100
    assert sum(y for _, y in short) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert averaged([(0, math.nan), (1, 2.0), (2, math.nan), (3, math.inf)], 2)[0] == (0.5, 2.0)
    assert math.isnan(averaged([(0, math.nan), (1, 2.0), (2, math.nan), (3, math.inf)], 2)[1][1])


def test_long_series_are_averaged_and_it_is_said(tmp_path):
    long = Series(tuple(range(1000)), tuple(float(step) for step in range(1000)))
    run = of(tmp_path, loss=long)
    chart = over_steps("key", "", "", "number", [run], [long], most=MOST_POINTS)
    assert len(chart.lines[0].points) <= MOST_POINTS
    assert chart.remarks == ("Each point is a mean of neighbours, 150 at most a run.",)
    assert len(over_steps("key", "", "", "number", [run], [long]).lines[0].points) == 1000


def test_a_run_that_sends_nothing_has_no_place_over_bytes(tmp_path):
    loss = Series((0, 9), (2.0, 1.0))
    silent = of(tmp_path, loss=loss, dct__dp__bytes_sent=Series((0, 9), (0.0, 0.0)))
    sending = of(tmp_path, loss=loss, dct__dp__bytes_sent=Series((0, 9), (10.0, 100.0)))
    chart = over_bytes("key", "", "", [silent, sending], [loss, loss])
    assert [line.run for line in chart.lines] == [1]
    assert chart.remarks == ("Not shown: run (no bytes were sent).",)


def test_zeros_have_no_place_on_a_logarithmic_axis(tmp_path):
    zero, small, large = (Series((0, 1), values) for values in ((0.0, 0.0), (0.0, 0.1), (5.0, 10.0)))
    runs = [of(tmp_path, x=series) for series in (zero, small, large)]
    chart = over_steps("key", "", "", "amount", runs, [zero, small, large])
    assert chart.y_logarithmic
    assert [line.run for line in chart.lines] == [1, 2]
    assert math.isnan(chart.lines[0].points[0][1])
    assert chart.remarks == ("Not shown: run (zero throughout, which a logarithmic axis does not have).",)
    assert not over_steps("key", "", "", "number", runs, [zero, small, large]).y_logarithmic


def test_a_run_that_diverged_is_named_where_it_has_no_line(tmp_path):
    series = [Series((0, 1), (1.0, 2.0)), Series((0, 1), (math.nan, math.inf))]
    chart = over_steps("key", "", "", "number", [of(tmp_path, loss=each) for each in series], series)
    assert [line.run for line in chart.lines] == [0]
    assert chart.remarks == ("Not shown: run (no finite value).",)
    assert over_steps("key", "", "", "number", [of(tmp_path, loss=series[1])], series[1:]) is None
    assert totals_of(of(tmp_path, loss=series[1]), "loss", None).final == math.inf


def test_the_quality_metric_is_found(tmp_path):
    one = Series((0,), (1.0,))
    names = ("val/accuracy", "val/auc", "val/loss", "test/auc", "test/best_auc", "train/loss", "epoch")
    clicks = of(tmp_path, **{name.replace("/", "__"): one for name in names})
    text = of(tmp_path, val__bits_per_byte=one, val__loss=one, train__loss=one)
    underscores = of(tmp_path, val_loss=one, train_loss_step=Series((0, 1), (1.0, 1.0)), train_loss_epoch=one)
    assert find_quality([clicks]) == "val/auc"
    assert same_on_test("val/auc", [clicks]) == "test/auc"
    assert find_quality([text]) == find_quality([text, clicks]) == "val/loss"
    assert (find_quality([underscores]), find_training_loss([underscores])) == ("val_loss", "train_loss_step")
    assert find_quality([of(tmp_path, train__loss=one)]) is None
    assert [higher_is_better(name) for name in ("val/auc", "val/loss", "val/bits_per_byte", "val/reward")] == [
        True, False, False, None,
    ]  # fmt: skip


def test_the_best_is_the_lowest_or_the_highest_finite_value():
    series = Series((0, 1, 2, 3), (math.nan, 3.0, 1.0, 2.0))
    assert best_of(series, higher_is_better=False) == (2, 1.0)
    assert best_of(series, higher_is_better=True) == (1, 3.0)
    assert best_of(Series((0,), (math.nan,)), higher_is_better=True) is None
