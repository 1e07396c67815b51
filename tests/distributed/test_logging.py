"""The traffic reaches every logger, one dict a logged step, and is counted to the byte."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy

from distributed.training import Module, Run, fit
from lightning_dct import CompressionMonitor, DCTStrategy
from lightning_dct.compress.bucket_plan import BucketPlan
from lightning_dct.traffic import all_gather_bytes, all_reduce_bytes

KEYS = {
    "dct/compression_ratio",
    "dct/run_compression_ratio",
    "dct/overhead_ms",
    "dct/seconds",
    "dct/dp/compression_ratio",
    "dct/dp/density",
    "dct/dp/threshold",
    "dct/dp/residual_norm",
    "dct/dp/bytes_sent",
    "dct/dp/bytes_dense",
}
# One bucket: gain, second.bias, first.bias are sent dense, first.weight and second.weight are
# compressed at 5%.
SIZES = (1, 960, 24, 192, 8)
TARGETS = (0, 48, 0, 10, 0)
WHOLE_BYTES = 4 * (1 + 24 + 8)


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = "memory"
    version = "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any) -> None:
        pass


def train(batches: int, settings: dict[str, Any], strategy: dict[str, Any]) -> Any:
    memory = Memory()
    own = {"density": 0.05, "min_tensor_size": 128, **strategy}
    run = fit(
        DCTStrategy(compress="gradients", **own), Module(), batches, logger=memory, **settings
    )
    return run, [
        (step, row) for step, row in memory.rows if any(key.startswith("dct/") for key in row)
    ]


@pytest.mark.parametrize(("world_size", "value_format"), [(2, "bf16"), (3, "1bit")])
def test_logged_bytes_are_the_payloads(ranks: Any, world_size: int, value_format: str) -> None:
    """Oracle: PayloadLayout.num_bytes to each other rank, and a ring all-reduce of all entries in
    fp32.
    """
    results = ranks(world_size).run(
        train, 12, {"log_every_n_steps": 4}, {"value_format": value_format}
    )
    run, rows = results[0]
    assert [step for step, _ in rows] == [3, 7, 11]
    layout = BucketPlan(("",) * 5, SIZES, TARGETS, torch.float32, value_format).layout
    assert layout.dense_bytes == WHOLE_BYTES
    payload = layout.num_bytes
    dense = all_reduce_bytes(4 * sum(SIZES), world_size)
    for step, row in rows:
        assert set(row) == KEYS
        assert row["dct/dp/bytes_sent"] == (step + 1) * all_gather_bytes(payload, world_size)
        assert row["dct/dp/bytes_dense"] == (step + 1) * dense
        ratio = dense / all_gather_bytes(payload, world_size)
        for key in (
            "dct/compression_ratio",
            "dct/run_compression_ratio",
            "dct/dp/compression_ratio",
        ):
            assert row[key] == pytest.approx(ratio)
        assert 0 < row["dct/dp/density"] <= (48 + 10 + 33) / sum(SIZES)
        assert row["dct/overhead_ms"] > 0
    state = run.state
    held = torch.cat(list(state["residuals"].values())).norm()
    assert rows[-1][1]["dct/dp/residual_norm"] == pytest.approx(float(held), rel=1e-5)
    assert rows[-1][1]["dct/dp/threshold"] == pytest.approx(
        sum(state["thresholds"]["values"].values()) / 2
    )
    assert all(theirs == [] for _, theirs in results[1:])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"log_every_n_steps": 5}, [4, 9]),
        ({"log_every_n_steps": 2, "accumulate_grad_batches": 3}, [1, 3]),
        ({"log_every_n_steps": 1, "accumulate_grad_batches": 4}, [0, 1, 2]),
        ({"log_every_n_steps": 0}, []),
    ],
    ids=str,
)
def test_one_dict_a_logged_step(ranks: Any, settings: dict[str, Any], steps: list[int]) -> None:
    """Oracle: the optimizer steps at which Lightning logs; each figure is that of the step it is
    logged under.
    """
    run, rows = ranks(2).run(train, 12, settings, {})[0]
    assert [step for step, _ in rows] == steps
    for step, row in rows:
        assert row["dct/dp/bytes_sent"] == (step + 1) * run.totals.bytes_sent / run.synchronisations


class Logging(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def train_with_loggers(folder: Path) -> Run:
    loggers = [
        CSVLogger(folder, name="csv", version=""),
        TensorBoardLogger(folder, name="tensorboard", version=""),
    ]
    strategy = DCTStrategy(compress="gradients", density=0.05)
    return fit(strategy, Logging(), 12, logger=loggers, log_every_n_steps=4)


def csv_rows(folder: Path, name: str = "csv") -> list[dict[str, str]]:
    with (folder / name / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["dct/dp/bytes_sent"]]


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        key: [(event.step, event.value) for event in events.Scalars(key)]
        for key in events.Tags()["scalars"]
    }


def test_loggers_get_every_key(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the files that the loggers have written; W&B's are in test_wandb_runs.py."""
    run = ranks(2).run(train_with_loggers, tmp_path)[0]
    expected = [(step, run.totals.bytes_sent // 12 * (step + 1)) for step in (3, 7, 11)]
    rows = csv_rows(tmp_path)
    assert [(int(row["step"]), float(row["dct/dp/bytes_sent"])) for row in rows] == expected
    assert all(row[key] for row in rows for key in KEYS)
    scalars = tensorboard_scalars(tmp_path)
    assert set(scalars) >= KEYS
    assert scalars["dct/dp/bytes_sent"] == expected


def train_under_ddp(folder: Path) -> None:
    logger = CSVLogger(folder, name="ddp", version="")
    fit(
        DDPStrategy(),
        Logging(),
        12,
        logger=logger,
        log_every_n_steps=4,
        callbacks=[CompressionMonitor()],
    )


def test_a_run_of_plain_ddp_is_counted_and_describes_itself(ranks: Any, tmp_path: Path) -> None:
    """Oracle: in a ring of two, each sends half of the gradients, then half of the sums: 4 bytes a
    parameter.
    """
    ranks(2).run(train_under_ddp, tmp_path)
    rows = csv_rows(tmp_path, "ddp")
    assert {int(row["step"]): float(row["dct/dp/bytes_sent"]) for row in rows} == {
        step: 4 * sum(SIZES) * (step + 1) for step in (3, 7, 11)
    }
    assert float(rows[0]["dct/seconds"]) < float(rows[-1]["dct/seconds"])
    settings = yaml.safe_load((tmp_path / "ddp" / "hparams.yaml").read_text())["lightning_dct"]
    assert settings == {"strategy": "DDPStrategy", "ranks": 2}
