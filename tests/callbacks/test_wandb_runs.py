"""What W&B gets, read back from an offline run of two ranks whose model is split and whose
gradients are compressed.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from wandb_workspaces.reports.v2 import interface as panels

from distributed.test_logging import Memory
from distributed.training import Module, loader, rank, trainer_for
from lightning_dct import CompressionMonitor, DCTPipelineStrategy, DCTStrategy, SplitPoint
from lightning_dct.callbacks.wandb_runs import STEP, SUMMARIES, sections, settings_of
from offline_runs import OfflineRun
from rivals.hooks import CountedDDPStrategy

TENSORS = {
    "dct/dp/log10_density",
    "dct/dp/log10_threshold",
    "dct/dp/log10_residual_norm",
    "dct/dp/tensors",
}
TENSORS |= {"dct/mp/log10_threshold"}


class Split(Module):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(40, 24), SplitPoint(density=0.2), nn.Linear(24, 8))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        self.log("val/loss", loss)
        return loss


def train(folder: Path) -> tuple[dict[str, Any], list[tuple[int, dict[str, float]]]]:
    """Train, and give what the rank saves of its gradients, and what a logger that is not W&B's was
    given.
    """
    memory = Memory()
    strategy = DCTStrategy(
        compress="gradients", density=0.05, value_format="bf16", min_tensor_size=128
    )
    with patch.dict(os.environ, {"WANDB_SILENT": "true", "WANDB_DIR": str(folder)}):
        logger = WandbLogger(project="tests", save_dir=folder, offline=True)
        monitor = CompressionMonitor(tensors_every_n_steps=4)
        trainer = trainer_for(
            strategy, logger=[logger, memory], log_every_n_steps=2, callbacks=[monitor]
        )
        trainer.fit(Split(), loader(12, 40, 8))
        if rank() == 0:
            logger.experiment.finish()
    return strategy.synchronizer.state_dict(), memory.rows


@pytest.fixture(scope="module")
def trained(
    ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OfflineRun, dict[str, Any], list[Any]]:
    folder = tmp_path_factory.mktemp("wandb")
    state, rows = ranks(2).run(train, folder)[0]
    return OfflineRun(folder), state, rows


def keys(row: dict[str, Any]) -> set[str]:
    """Which of our keys a row has; of media one and not their parts."""
    return {key.partition(".")[0] for key in row if key.startswith("dct/")}


def test_one_row_a_step_and_tensors_now_and_then(trained: Any) -> None:
    run, _, _ = trained
    rows = [(row[STEP], keys(row)) for row in run.history if keys(row)]
    assert [step for step, _ in rows] == [1, 3, 5, 7, 9, 11, 12]
    assert [step for step, logged in rows if logged >= TENSORS] == [1, 5, 9, 12]
    assert [step for step, logged in rows if logged & TENSORS] == [1, 5, 9, 12]
    assert rows[-1][1] == TENSORS | {"dct/summary"}


def test_other_loggers_get_scalars_only(trained: Any) -> None:
    run, _, rows = trained
    scalars = [(step, row) for step, row in rows if "dct/compression_ratio" in row]
    assert [step for step, _ in scalars] == [1, 3, 5, 7, 9, 11]
    assert all(isinstance(value, int | float) for _, row in scalars for value in row.values())
    by_step = {row[STEP]: row for row in run.history if "dct/compression_ratio" in row}
    assert all(
        by_step[step][key] == pytest.approx(value)
        for step, row in scalars
        for key, value in row.items()
    )


def test_axis_and_summaries(trained: Any) -> None:
    run, _, _ = trained
    metrics = [record["metric"] for record in run.records if record["type"] == "metric"]
    ours = {metric.get("glob_name", metric.get("name")): metric for metric in metrics}
    assert {ours[key]["step_metric"] for key in ("dct/*", *SUMMARIES)} == {STEP}
    assert {key: ",".join(sorted(ours[key]["summary"])) for key in SUMMARIES} == {
        key: ",".join(sorted(summary.split(","))) for key, summary in SUMMARIES.items()
    }
    logged = [row["dct/overhead_ms"] for row in run.history if "dct/overhead_ms" in row]
    summary = run.state["summary"]
    assert summary["dct/overhead_ms"] == {
        "max": max(logged),
        "mean": pytest.approx(sum(logged) / len(logged)),
    }
    dense, sent = (
        sum(summary[f"dct/{part}/bytes_{kind}"] for part in ("dp", "mp"))
        for kind in ("dense", "sent")
    )
    assert summary["dct/run_compression_ratio"] == pytest.approx(dense / sent)
    assert summary["dct/dp/bytes_sent"] == max(
        row.get("dct/dp/bytes_sent", 0) for row in run.history
    )


def test_settings(trained: Any) -> None:
    config = trained[0].state["config"]["lightning_dct"]
    assert config["strategy"] == "dct"
    assert config["ranks"] == 2
    assert config["density"] == 0.05
    assert config["value_format"] == "bf16"


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (DDPStrategy(), {"strategy": "DDPStrategy"}),
        (CountedDDPStrategy("fp32"), {"strategy": "ddp"}),
        (CountedDDPStrategy("fp16"), {"strategy": "ddp_fp16"}),
        (CountedDDPStrategy("powersgd"), {"strategy": "powersgd"}),
        (SimpleNamespace(config={"zero_optimization": {}}), {"strategy": "SimpleNamespace"}),
        (
            DCTPipelineStrategy(micro_batches=8),
            {"strategy": "dct_pipeline", "stages": 2, "micro_batches": 8},
        ),
    ],
)
def test_settings_tell_strategies_apart(strategy: Any, settings: dict[str, Any]) -> None:
    found = settings_of(SimpleNamespace(strategy=strategy, world_size=4))  # type: ignore[arg-type]
    assert found | settings | {"ranks": 4} == found


def test_table_of_tensors(trained: Any) -> None:
    """Oracle: the state that the rank saves."""
    run, state, _ = trained
    columns, rows = run.table("dct/dp/tensors")
    assert columns == ["tensor", "entries", "density", "threshold", "residual_norm"]
    assert [row[:2] for row in rows] == [
        ["model.0.weight", 960],
        ["model.0.bias", 24],
        ["model.2.weight", 192],
        ["model.2.bias", 8],
    ]
    assert [row[2] for row in rows] == [48 / 960, 1.0, 10 / 192, 1.0]
    thresholds = state["thresholds"]["values"]
    assert [row[3] for row in rows] == [
        pytest.approx(thresholds[row[0]]) if row[2] < 1 else None for row in rows
    ]
    norms = {name: float(residual.norm()) for name, residual in state["residuals"].items()}
    assert [row[4] for row in rows] == [
        pytest.approx(norms.get(row[0], 0.0), rel=1e-5) for row in rows
    ]
    last = run.state["summary"]
    assert sum(last["dct/dp/log10_density"]["values"]) == 4
    assert (
        sum(last["dct/dp/log10_threshold"]["values"])
        == sum(last["dct/dp/log10_residual_norm"]["values"])
        == 2
    )
    assert sum(last["dct/mp/log10_threshold"]["values"]) == 1


def test_table_at_the_end(trained: Any) -> None:
    run, state, _ = trained
    columns, rows = run.table("dct/summary")
    assert columns == ["table", "figure", "value"]
    figures = {(table, figure): value for table, figure, value in rows}
    ratio = f"{state['traffic']['bytes_dense'] / state['traffic']['bytes_sent']:,.1f}x"
    assert figures["Synchronisation, rank 0 of 2, 12 optimizer steps", "compression ratio"] == ratio
    assert ("Inside the model, rank 0 of 2, 12 exchanges", "bytes sent") in figures


def keys_of(panel: Any) -> list[str]:
    match panel:
        case panels.LinePlot():
            return panel.y
        case panels.CustomChart():
            return [panel.query["summaryTable"]["tableKey"]]
    return [panel.table_name]


def test_the_dashboard_shows_what_a_run_logs_and_all_of_it(trained: Any) -> None:
    run, _, _ = trained
    panel_list = [panel for in_section in sections().values() for panel in in_section]
    trades = [panel for panel in panel_list if isinstance(panel, panels.ScatterPlot)]
    history = {key.partition(".")[0] for row in run.history for key in row}
    shown = {key for panel in panel_list if panel not in trades for key in keys_of(panel)}
    assert shown <= history
    assert {key for key in history if key.startswith("dct/")} <= shown
    assert len(trades) == 1
    for key in (axis.name for panel in trades for axis in (panel.x, panel.y)):
        name, _, kind = key.partition(".")
        found = run.state["summary"][name]
        assert isinstance(found[kind] if kind else found, float), key


@pytest.mark.parametrize(("setting", "error"), [(-1, ValueError), (2.5, TypeError)])
def test_refuses_what_is_no_rhythm(setting: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"CompressionMonitor\(tensors_every_n_steps\)"):
        CompressionMonitor(tensors_every_n_steps=setting)
