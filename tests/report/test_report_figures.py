"""Figures on the page against plain arithmetic."""

import math
import re
from dataclasses import replace
from html import escape

import numpy as np
import pytest

from lightning_dct.report.charts import MOST_POINTS, chart, lines_of, make_sections
from lightning_dct.report.find_runs import read_all
from lightning_dct.report.page import baseline_of, tables_of
from lightning_dct.report.quality import find_quality, find_training_loss, higher_is_better
from lightning_dct.report.run import Run, counter_at
from made_up_runs import rows_of, write_csv


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_csv(folder / "1-dct", rows_of(8.0))
    write_csv(folder / "2-split", rows_of(4.0, inside=True))
    write_csv(folder / "3-plain", rows_of(None))
    return read_all([str(folder)]).runs


def of(tmp_path, **series):
    return Run("run", tmp_path, {name.replace("__", "/"): value for name, value in series.items()})


def test_quality_against_bytes_takes_bytes_at_the_same_step(runs):
    found = [run.series["val/loss"] for run in runs]
    lines = lines_of(found, [run.counted_bytes("bytes_sent") for run in runs])
    # 1,000 bytes a step, twice that where as much crosses inside the model; validations after 20, 40 and 60 steps.
    losses = [5 - step / 20 for step in (19, 39, 59)]
    assert {run: (list(x), list(y)) for run, (x, y) in lines.items()} == {
        0: ([20_000, 40_000, 60_000], losses),
        1: ([40_000, 80_000, 120_000], losses),
    }


def test_every_logged_kind_has_its_chart_and_says_which_runs_are_not_in_it(runs):
    sections = make_sections(runs, "train/loss", "val/loss")
    assert {title: len(charts) for title, charts in sections.items()} == {
        "Loss and quality": 4,
        "Traffic": 3,
        "Data parallelism": 4,
        "Inside the model": 4,
    }
    steps, over_bytes, *_ = sections["Loss and quality"]
    assert "Not shown" not in steps
    assert "Not shown: 3-plain (not logged with bytes, or not finite)." in over_bytes
    assert "Not shown: 1-dct, 3-plain" in sections["Inside the model"][0]
    assert make_sections(runs[2:], "train/loss", "val/loss").keys() == {"Loss and quality"}


def test_totals_are_those_of_the_log(runs):
    dct, split, plain = cells(tables_of(runs, runs[0], "val/loss")["Totals"])
    assert dct == {
        "val/loss, best": "2.05 at 59", "the same on test": "1.5", "steps": "60", "dense fp32 bytes": "480.00 kB",
        "inside the model: sent": "-", "ratio there": "-", "ms compressing, median": "2", "time, min:s": "0:30",
    }  # fmt: skip
    assert (split["inside the model: sent"], split["ratio there"]) == ("60.00 kB", "4.0x")
    assert (plain["steps"], plain["ms compressing, median"], plain["time, min:s"]) == ("60", "-", "-")


def cells(table):
    heads, rows = table
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_runs_are_compared_with_plain_ddp(tmp_path):
    """By hand: the loss of a run that is 3% higher from the start, and half a second a step."""
    worse = [
        {name: 1.03 * value if name == "val/loss" else value for name, value in row.items()} for row in rows_of(8.0)
    ]
    write_csv(tmp_path / "a", rows_of(8.0), "lightning_dct: {strategy: dct, ranks: 2}\n")
    write_csv(tmp_path / "b", worse, "lightning_dct: {strategy: dct, ranks: 4}\n")
    write_csv(tmp_path / "c", rows_of(1.0), "lightning_dct: {strategy: DDPStrategy, ranks: 2}\n")
    runs = read_all([str(tmp_path)]).runs
    baseline = baseline_of(runs)
    assert baseline.name == "c"
    same, more, ddp = cells(tables_of(runs, baseline, "val/loss")["Comparison"])
    assert same == {
        "strategy": "dct", "ranks": "2", "val/loss, last": "2.05", "against c": "+0.0%", "bytes sent": "60.00 kB",
        "ratio": "8.0x", "ms a step": "500", "time to the val/loss of c, min:s": "0:30",
    }  # fmt: skip
    assert (more["ranks"], more["against c"], more["time to the val/loss of c, min:s"]) == ("4", "+3.0%", "-")
    assert (ddp["strategy"], ddp["against c"], ddp["ratio"]) == ("DDPStrategy", "the baseline", "1.0x")
    assert baseline_of(runs[:2]).name == "a"
    # One run is compared with nothing.
    assert cells(tables_of(runs[:1], runs[0], "val/loss")["Comparison"])[0].keys() == same.keys() - {
        "against c", "time to the val/loss of c, min:s"
    }  # fmt: skip


def test_an_auc_is_compared_by_its_difference(tmp_path):
    one, other = (of(tmp_path, val__auc={9: auc}, dct__seconds={9: 1.0}) for auc in (0.74, 0.743))
    assert cells(tables_of([one, other], one, "val/auc")["Comparison"])[1]["against run"] == "+0.0030"


def test_shares_are_read_as_people_write_them(runs):
    (share,) = [one for one in make_sections(runs, None, None)["Data parallelism"] if "share of entries" in one]
    assert set(re.findall(r">([\d.]+%)<", share)) == {"0%", "1%", "2%", "3%"}


def test_bytes_between_and_after_logged_steps():
    counter = {9: 100.0, 29: 500.0}
    assert counter_at(counter, [-1, 4, 9, 19, 49]) == [0, 50, 100, 300, 900]
    assert math.isnan(counter_at(counter, [50])[0])
    assert counter_at({9: 100.0}, [14]) == [150]


def test_kinds_of_traffic_are_added_and_counters_that_begin_anew_go_on(tmp_path):
    run = of(
        tmp_path,
        dct__dp__bytes_sent={0: 10.0, 1: 20.0, 2: 10.0, 3: 20.0},
        dct__mp__bytes_sent={1: 5.0, 3: 9.0},
    )
    assert run.counted_bytes("bytes_sent") == {0: 10.0, 1: 25.0, 2: 37.0, 3: 49.0}
    assert run.counted_bytes("bytes_sent", ["mp"]) == {1: 5.0, 3: 9.0}
    assert of(tmp_path).counted_bytes("bytes_sent") is None


def test_long_series_are_averaged_and_it_is_said(tmp_path):
    long = {step: float(step % 7) for step in range(1000)}
    ((x, y),) = lines_of([long]).values()
    assert len(x) == len(y) <= MOST_POINTS
    assert np.mean(x) == pytest.approx(499.5, rel=1e-2)
    drawn = chart("title", "loss", "number", [of(tmp_path, loss=long)], [long])
    assert "Each point is a mean of neighbours, 150 at most a run." in drawn


def test_runs_without_a_finite_value_or_any_bytes_have_no_line():
    loss = {0: 2.0, 9: 1.0}
    assert lines_of([loss, {0: math.nan, 1: math.inf}]).keys() == {0}
    assert lines_of([loss, loss], [{0: 0.0, 9: 0.0}, {0: 10.0, 9: 100.0}]).keys() == {1}


def test_the_quality_metric_is_found():
    clicks = dict.fromkeys(
        ("val/accuracy", "val/auc", "val/loss", "test/auc", "test/best_auc", "train/loss", "dct/overhead_ms")
    )
    text = dict.fromkeys(("val/bits_per_byte", "val/loss", "train/loss"))
    underscores = dict.fromkeys(("val_loss", "train_loss_step", "train_loss_epoch"))
    assert find_quality([clicks]) == "val/auc"
    assert find_quality([text]) == find_quality([text, clicks]) == "val/loss"
    assert (find_quality([underscores]), find_training_loss([underscores])) == ("val_loss", "train_loss_step")
    assert find_quality([{"train/loss": None}]) is None
    assert [higher_is_better(name) for name in ("val/auc", "val/loss", "val/bits_per_byte", "val/reward")] == [
        True, False, False, None,
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_not_finite_is_unknown(tmp_path, seconds):
    run = of(tmp_path, val__loss={9: 2.0}, dct__seconds={9: seconds})
    for one in (run, replace(run, seconds=seconds)):
        (row,) = cells(tables_of([one], one, "val/loss")["Totals"])
        assert row["val/loss, best"] == "2 at 9"
        assert "time, min:s" not in row


def test_values_too_large_for_an_axis_are_not_drawn(tmp_path):
    huge = {9: 1e308, 19: -1e308, 29: 1.0, 39: 1e300, 49: -1e300}
    ((x, y),) = lines_of([huge]).values()
    assert x.tolist() == [*huge]
    np.testing.assert_array_equal(y, [np.nan, np.nan, 1.0, 1e300, -1e300])
    assert not lines_of([{9: 1e308}])
    assert list(lines_of([{0: 1.0, 10**305: 1.0}])[0][0]) == [0]
    for unit in ("number", "amount", "bytes", "ratio", "share"):
        assert "<svg" in chart("title", "loss", unit, [of(tmp_path, loss=huge)], [huge])


def test_names_of_metrics_are_text_and_no_formulas(tmp_path):
    for name in (r"val/loss_$_{a$", r"val/loss $\frac{$", r"a $x$ \1 \g<0>"):
        series = {9: 2.0, 19: 1.0}
        drawn = chart(f"{name} against steps", name, "number", [of(tmp_path, loss=series)], [series])
        # The caption, the name for those who do not see the chart, and the axis.
        assert drawn.count(escape(name)) >= 3
        assert f'aria-label="{escape(name)} against steps"' in drawn
