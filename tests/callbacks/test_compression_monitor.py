import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel

from distributed.training import trainer_for, warnings_of
from lightning_dct import CompressionMonitor
from lightning_dct.callbacks.compression_monitor import summary_rows
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.threshold import Thresholds
from lightning_dct.traffic import Traffic, TrafficTotals, format_bytes

TOTALS = TrafficTotals(4000, 123_456, 12_345_600, 500, 50_000, seconds=8.0, refreshes=4)
ROWS = [
    ("bytes sent", "123.46 kB instead of 12.35 MB dense in fp32"),
    ("compression ratio", "100.0x"),
    ("entries sent", "1% of 50,000 due"),
]
MODULE = LightningModule()


class Recorder:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))


class FakeTrainer(SimpleNamespace):
    """The parts of a Trainer that the monitor looks at."""

    def __init__(self, traffic: Traffic, **strategy: Any) -> None:
        super().__init__(
            strategy=SimpleNamespace(traffic=traffic, **strategy),
            is_global_zero=True,
            global_step=0,
            world_size=2,
            callbacks=[],
            loggers=[Recorder(), Recorder()],
            _logger_connector=SimpleNamespace(should_update_logs=True),
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
        )

    def batch(self, monitor: CompressionMonitor, **traffic: float) -> None:
        self.strategy.traffic.add(**traffic)
        monitor.on_train_batch_end(self, MODULE, None, None, 0)  # type: ignore[arg-type]
        self.fit_loop.epoch_loop._batches_that_stepped += 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (123_456, "123.46 kB"),
        (1_000_000, "1.00 MB"),
        (2_500_000_000, "2.50 GB"),
        (3 * 10**12, "3.00 TB"),
        (10**16, "10000.00 TB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_bytes_inside_the_node_are_shown_where_there_are_any() -> None:
    inside = dict(
        summary_rows(
            TrafficTotals(steps=1, bytes_sent=5, bytes_dense=10, bytes_inside_node=2_000_000)
        )
    )
    assert inside["bytes sent"] == "5 B instead of 10 B dense in fp32, and 2.00 MB inside the node"


def test_summary() -> None:
    assert summary_rows(TOTALS) == ROWS
    assert summary_rows(TOTALS, 0.0123)[2] == (
        "entries sent", "1% of 50,000 due; 1.2% of the weights' norm is not sent yet"
    )  # fmt: skip


def test_rows_of_growing_tables_are_counted_where_there_are_any() -> None:
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic(), split_traffic=Traffic())
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    for admitted, evicted in ((0, 0), (5, 0), (4, 3)):
        trainer.strategy.split_traffic.add(steps=1, admitted_rows=admitted, evicted_rows=evicted)
        trainer.batch(monitor, steps=1)
    counts = [
        [logged.get(f"dct/mp/{name}_rows") for name in ("admitted", "evicted")]
        for _, logged in trainer.loggers[0].logged
    ]
    assert counts == [[None, None], [5, 0], [9, 3]]
    rows = dict(summary_rows(trainer.strategy.split_traffic.totals))
    assert rows["rows of growing tables"] == "9 admitted, 3 evicted"


def test_values_are_those_since_the_last_log() -> None:
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic())
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    for logs, sent in ((True, 10), (False, 20), (False, 30), (True, 50)):
        trainer._logger_connector.should_update_logs = logs
        trainer.batch(monitor, steps=1, bytes_sent=sent, bytes_dense=1000, seconds=0.5)
    logged = trainer.loggers[0].logged
    assert [step for step, _ in logged] == [0, 3]
    assert [metrics["dct/compression_ratio"] for _, metrics in logged] == [100.0, 3000 / 100]
    assert [metrics["dct/run_compression_ratio"] for _, metrics in logged] == [100.0, 4000 / 110]
    assert [metrics["dct/overhead_ms"] for _, metrics in logged] == [500.0, 500.0]


def test_a_ratio_counts_the_steps_before_an_exchange_also_if_they_were_logged() -> None:
    """Every fourth step exchanges updates, and each is logged; rows of tables are exchanged in
    every step.
    """
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic(), split_traffic=Traffic())
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    for step in range(8):
        trainer.strategy.split_traffic.add(steps=1, bytes_sent=20, bytes_dense=200)
        trainer.batch(
            monitor, steps=1, bytes_sent=80 * (step % 4 == 3), bytes_dense=100, seconds=0.5
        )
    logged = [metrics for _, metrics in trainer.loggers[0].logged]
    assert [metrics.get("dct/dp/compression_ratio") for metrics in logged] == 2 * [
        None,
        None,
        None,
        400 / 80,
    ]
    assert [metrics["dct/mp/compression_ratio"] for metrics in logged] == 8 * [10.0]
    assert [metrics["dct/compression_ratio"] for metrics in logged] == 2 * [
        10.0,
        10.0,
        10.0,
        (400 + 200) / 100,
    ]
    assert [metrics["dct/overhead_ms"] for metrics in logged] == 8 * [500.0]


def test_what_is_due_in_a_batch_without_a_step_is_logged_with_the_next_step() -> None:
    """As where an optimizer steps by hand in even batches, and odd ones are logged."""
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic())
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    for batch in range(9):
        trainer._logger_connector.should_update_logs = batch % 4 == 3
        trainer.batch(
            monitor, steps=batch % 2 == 0, bytes_sent=10 * (batch % 2 == 0), bytes_dense=100
        )
    logged = trainer.loggers[0].logged
    assert [step for step, _ in logged] == [4, 8]
    assert [metrics["dct/dp/bytes_sent"] for _, metrics in logged] == [30, 50]


def test_a_single_process_logs_no_ratio() -> None:
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic())
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    trainer.batch(monitor, steps=1, entries=10, entries_sent=10)
    (_, metrics) = trainer.loggers[0].logged[0]
    assert not [key for key in metrics if "compression_ratio" in key]
    assert not any(math.isnan(value) for value in metrics.values())


def test_table_at_the_end_covers_this_fit_only(capsys: pytest.CaptureFixture[str]) -> None:
    feedback = ErrorFeedback({}, adapt_threshold=True, undoable=False)
    synchronizer = SimpleNamespace(
        feedback=feedback,
        thresholds=Thresholds(),
        norm=lambda: math.hypot(*feedback.norms().values()),
        flush=lambda: None,
    )
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic(), synchronizer=synchronizer)
    trainer.strategy.traffic.add(steps=1000, bytes_sent=10**9, bytes_dense=10**9)
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    trainer.batch(monitor, steps=3, bytes_sent=10, bytes_dense=1000, entries=100, entries_sent=5)
    monitor.on_fit_end(trainer, MODULE)  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "100.0x" in printed
    assert "10 B instead of 1.00 kB" in printed
    trainer.is_global_zero = False
    monitor.on_fit_end(trainer, MODULE)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("weight", "norm", "told"),
    [
        (3.0, 0.06, "; 2% of the weights' norm is not sent yet"),
        (math.nan, 0.06, ""),
        (math.inf, 0.06, ""),
        (0.0, 0.06, ""),
        (3.0, math.nan, ""),
        (3.0, math.inf, ""),
    ],
)
def test_what_is_not_sent_yet_is_told_where_it_is_known(
    capsys: pytest.CaptureFixture[str], weight: float, norm: float, told: str
) -> None:
    names = {torch.nn.Parameter(torch.tensor([weight])): "weight"}
    updates = SimpleNamespace(parameter_names=names, norm=lambda: torch.tensor(norm))
    monitor = CompressionMonitor()
    trainer = FakeTrainer(Traffic(), updates=updates)
    monitor.on_train_start(trainer, MODULE)  # type: ignore[arg-type]
    trainer.batch(monitor, steps=3, bytes_sent=10, bytes_dense=1000, entries=100, entries_sent=5)
    monitor.on_fit_end(trainer, MODULE)  # type: ignore[arg-type]
    assert f"5% of 100 due{told}\n" in capsys.readouterr().out


def test_warns_once_where_nothing_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_for(
        "auto", max_steps=3, limit_val_batches=0, callbacks=[CompressionMonitor()]
    )
    (said,) = [
        text for text in warnings_of(trainer.fit, BoringModel()) if "CompressionMonitor" in text
    ]
    assert "SingleDeviceStrategy does not count its traffic. Use `Trainer(strategy='dct')`" in said
    assert "Synchronisation" not in capsys.readouterr().out
