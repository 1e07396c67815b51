"""Runs train.py in two processes: those of the command a user runs, or where starting proves
nothing, kept ones.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint

from differences import assert_same
from distributed.scripts import TRAIN, run_here, train_on_ranks
from distributed.training import trainer_for
from dlrm.data import SyntheticClicks
from dlrm.module import ClickModule
from lightning_dct.callbacks.wandb_runs import GROUPS, QUALITY
from lightning_dct.traffic import Traffic, all_reduce_bytes
from nlp.data import TextData
from nlp.module import LanguageModule
from offline_runs import OfflineRun
from reporting import StepTimer

SMALL_CLICKS = (
    "experiment=dlrm",
    "data.table_rows=[400,90,3000,7]",
    "data.eval_rows=3000",
    "data.batch_size=32",
    "model.bottom_sizes=[16]",
    "model.top_sizes=[16]",
)


def result(folder: Path) -> dict:
    files = list(folder.glob("outputs/*/*/result.json"))
    assert len(files) == 1, f"one result a run, by rank 0: {files}"
    return json.loads(files[0].read_text())


def test_help_says_how_to_begin_and_what_there_is(tmp_path: Path) -> None:
    printed = run_here(str(TRAIN), ("--help",), str(tmp_path))
    assert "python experiments/train.py experiment=lm" in printed
    strategies = (
        "dct, dct_elastic, dct_fsdp, dct_pipeline, ddp, ddp_bf16, ddp_fp16, demo, diloco, hivemind,"
        " hsdp"
    )
    assert f"strategy: {strategies}" in printed
    assert "  density: 0.2\n" in printed


def test_the_time_of_a_step_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps between two exchanges send nothing, so a median would not show what an exchange
    costs.
    """
    fitting = SimpleNamespace(fn="fit")
    strategy = SimpleNamespace(traffic=Traffic(), split_traffic=Traffic())
    clock = 0.0
    trainer = SimpleNamespace(global_step=0, state=fitting, callback_metrics={"val/loss": 2})
    trainer.strategy = strategy
    monkeypatch.setattr("reporting.time.perf_counter", lambda: clock)
    strategy.traffic.add(seconds=1000.0)  # before the run was resumed
    timer = StepTimer(skip=2)
    whole = StepTimer(skip=0)
    timer.on_train_start(trainer, None)
    whole.on_train_start(trainer, None)
    for step, seconds in enumerate([9.0, 9.0, 0.1, 0.1, 0.1, 0.5], start=1):
        clock = clock + seconds
        trainer.global_step = step
        strategy.traffic.add(seconds=seconds / 4, seconds_waiting=seconds / 10)
        strategy.split_traffic.add(seconds=seconds / 4)
        timer.on_train_batch_end(trainer)
        whole.on_train_batch_end(trainer)
        clock += 5.0  # A validation, which is not part of a step.
        timer.on_validation_end(trainer, None)
    assert timer.mean_milliseconds == pytest.approx(200)
    assert timer.mean_costs == (pytest.approx(100), pytest.approx(20))
    assert whole.mean_costs[0] == pytest.approx(1e3 * 18.8 / 2 / 6)
    assert timer.history[1] == {"step": 2, "seconds": 18.0, "metrics": {"val/loss": 2.0}}
    assert timer.history[-1]["seconds"] == pytest.approx(18.8)


def test_dlrm_with_ddp(ranks: Any, tmp_path: Path) -> None:
    printed = train_on_ranks(ranks, tmp_path, *SMALL_CLICKS, "strategy=ddp", "trainer.max_steps=30")
    assert printed.count("compression ratio, against dense fp32") == 1
    figures = result(tmp_path)
    assert figures["choices"]["strategy"] == "ddp"
    assert figures["world_size"] == 2
    assert figures["steps"] == 30
    assert figures["seed"] == 0
    assert figures["compression_ratio"] == pytest.approx(1.0)
    assert figures["bytes_sent_per_step"] == all_reduce_bytes(
        4 * figures["trainable_parameters"], 2
    )
    assert figures["milliseconds_per_step"] > 0
    for name in ("val/auc", "val/loss", "test/auc", "test/loss", "test/accuracy"):
        assert 0 < figures["metrics"][name] < 2
    assert figures["metrics"]["test/auc"] < figures["best_known"]["test/auc"]


def test_lm_with_powersgd_counts_what_it_sends(ranks: Any, tmp_path: Path) -> None:
    printed = train_on_ranks(
        ranks,
        tmp_path,
        "experiment=lm",
        "data=documentation",
        "strategy=powersgd",
        "strategy.rank=2",
        "strategy.start_step=4",
        "trainer.max_steps=10",
        "data.context_length=32",
        "model.width=32",
        "model.num_layers=1",
        "logger=none",
    )
    figures = result(tmp_path)
    assert "PowerSGD sends its first 4 steps dense (`strategy.start_step`)" in printed
    assert not [file for file in tmp_path.rglob("*.log") if not file.stat().st_size]
    width = 32
    context = 32
    vocabulary = 256
    rank = 2
    matrices = [(vocabulary, width), (context, width), (3 * width, width), (width, width)]
    matrices += [(4 * width, width), (width, 4 * width), (vocabulary, width)]
    vectors = 2 * 2 * width + 2 * width + 3 * width + width + 4 * width + width
    entries = sum(rows * columns for rows, columns in matrices) + vectors
    assert figures["trainable_parameters"] == entries
    factors = [
        vectors,
        sum(rows * rank for rows, _ in matrices),
        sum(columns * rank for _, columns in matrices),
    ]
    sent = 4 * all_reduce_bytes(4 * entries, 2) + 6 * sum(
        all_reduce_bytes(4 * size, 2) for size in factors
    )
    assert figures["bytes_sent_per_step"] == pytest.approx(sent / 10)
    assert figures["bytes_dense_per_step"] == all_reduce_bytes(4 * entries, 2)
    assert figures["milliseconds_per_step"] is None  # All of the steps are among those skipped.


def test_ranks_that_torchrun_starts_share_one_folder_and_one_result(
    ranks: Any, tmp_path: Path
) -> None:
    """Oracle: of each thing a run writes there is one, and what Hydra says of the run is rank
    0's.
    """
    size = (
        "data.context_length=16",
        "data.eval_batch_size=512",
        "model.width=16",
        "model.num_layers=1",
    )
    overrides = (
        "experiment=lm",
        "data=documentation",
        *size,
        "trainer.max_steps=4",
        "trainer.val_check_interval=4",
    )
    output = train_on_ranks(ranks, tmp_path, *overrides)
    assert output.count("compression ratio, against dense fp32") == 1
    assert output.count("Synchronisation, rank 0") == 1
    (run,) = tmp_path.glob("outputs/lm/*")
    figures = json.loads((run / "result.json").read_text())
    assert figures["world_size"] == 2
    assert figures["steps"] == 4
    assert figures["overrides"] == [*overrides, "trainer.devices=2", "trainer.accelerator=cpu"]
    assert [file.name for file in tmp_path.rglob("result.json")] == ["result.json"]
    assert [file.name for file in tmp_path.rglob("metrics.csv")] == ["metrics.csv"]
    assert [file.name for file in tmp_path.rglob("*.ckpt")] == ["latest.ckpt"]
    # The checkpoint has the compression state of both ranks beside it.
    assert len(list((run / "checkpoints" / "latest.ckpt.dct").rglob("*.pt"))) == 2
    hydra = (run / ".hydra" / "hydra.yaml").read_text()
    assert "name: train\n" in hydra
    assert "train_ddp_process" not in hydra


def train_with_wandb(arguments: tuple[str, ...], folder: str) -> None:
    run_here(str(TRAIN), arguments, folder)
    wandb.finish()  # as where the process ends


def test_dlrm_with_dct_is_hybrid(ranks: Any, tmp_path: Path) -> None:
    settings = (
        "strategy=dct",
        "strategy.density=0.01",
        "strategy.min_tensor_size=1",
        "logger=wandb",
    )
    settings += (
        "trainer.max_steps=25",
        "trainer.log_every_n_steps=5",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
    )
    ranks(2).run(train_with_wandb, (*SMALL_CLICKS, *settings), str(tmp_path))
    figures = result(tmp_path)
    assert figures["compression_ratio"] > 5
    assert figures["bytes_sent_per_step"] < figures["bytes_dense_per_step"] / 5
    # Embedding rows stay where they live; what crosses is ids and changes.
    assert figures["split_ratio"] > 5
    assert figures["split_bytes_dense_per_step"] > 5 * figures["split_bytes_per_step"] > 0
    (folder,) = tmp_path.glob("outputs/dlrm/*")
    logged = OfflineRun(folder).state
    # What the dashboard shows of quality, and by what it groups runs.
    assert set(QUALITY) <= set(logged["summary"])
    assert set(GROUPS) <= set(logged["config"]["lightning_dct"])
    assert (logged["config"]["task_name"], logged["config"]["seed"]) == ("dlrm", 0)


def test_dlrm_with_the_papers_exchange(ranks: Any, tmp_path: Path) -> None:
    settings = ("strategy=dct", "model.tables=thresholded", "model.exchange.value_format=bf16")
    train_on_ranks(ranks, tmp_path, *SMALL_CLICKS, *settings, "trainer.max_steps=10", "logger=none")
    assert 10 < result(tmp_path)["split_ratio"] < 40


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("experiment=dlrm", "strategy=dct", "strategy.density=2"), "`density` is the share"),
        (("experiment=lm", "strategy=ddp", "data.path=nowhere"), "data.path=nowhere"),
    ],
)
def test_a_bad_setting_says_so_before_processes_start(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        run_here(str(TRAIN), overrides, str(tmp_path))


def make_clicks() -> tuple[ClickModule, SyntheticClicks]:
    torch.manual_seed(0)
    data = SyntheticClicks(
        [50, 9, 3], batch_size=16, eval_batch_size=64, batches_per_epoch=8, eval_rows=100
    )
    return ClickModule(4, [8], [8], learning_rate=0.05), data


def make_text() -> tuple[LanguageModule, TextData]:
    torch.manual_seed(0)
    data = TextData(context_length=16, batch_size=2, eval_batch_size=512)
    return LanguageModule(num_layers=1, width=16, num_heads=2, warmup_steps=3), data


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("make", [make_clicks, make_text])
def test_a_run_continues_from_a_checkpoint(make: object, tmp_path: Path) -> None:
    def run(folder: Path, checkpoint: Path | None = None) -> torch.nn.Module:
        module, data = make()
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        settings = {
            "max_steps": 12,
            "max_epochs": -1,
            "limit_val_batches": 0,
            "enable_checkpointing": True,
        }
        trainer = trainer_for("auto", callbacks=[saver], **settings)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        return module

    whole = run(tmp_path / "whole")
    continued = run(tmp_path / "continued", tmp_path / "whole" / "step=5.ckpt")
    assert_same(whole.state_dict(), continued.state_dict())
    loaded = type(whole).load_from_checkpoint(tmp_path / "whole" / "step=10.ckpt")
    assert set(loaded.state_dict()) == set(whole.state_dict())
