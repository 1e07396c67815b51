"""Lightning's own callbacks, tuner and profilers do under DCTStrategy what they do under
DDPStrategy.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from distributed.training import (
    Module,
    Run,
    SearchLater,
    State,
    Watch,
    assert_replicas_equal,
    assert_weights_close,
    assert_weights_equal,
    fit,
    hash_of,
    loader,
    rank,
    summary,
    trainer_for,
    weights_of,
)
from fsdp.training import Plain, fsdp, train
from lightning_dct import DCTStrategy, SplitPoint

BATCHES = 4
EPOCHS = 4


class Evaluated(Module):
    """Logs a loss of validation that differs from rank to rank, and that of training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def val_dataloader(self) -> Any:
        return loader(2, 40, 8)


class Epochs(Callback):
    """Keeps the weights at the end of each epoch, before and after Lightning averages them at the
    very end.
    """

    def __init__(self) -> None:
        self.weights: list[State] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights.append(weights_of(pl_module))


class Feature(NamedTuple):
    """Callbacks and settings of a Trainer, and what they shall leave, for a look at it after
    fit.
    """

    callbacks: Callable[[Path], list[Callback]]
    trainer: dict[str, Any] = {}
    look: Callable[[list[Callback]], Any] = lambda callbacks: None


def checkpoints(callbacks: list[Callback]) -> Any:
    (saver,) = (callback for callback in callbacks if isinstance(callback, ModelCheckpoint))
    weights = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    return Path(saver.best_model_path).name, float(saver.best_model_score), list(weights)


FEATURES = {
    "EarlyStopping": Feature(
        lambda _: [EarlyStopping("val_loss", min_delta=1.0, patience=1)],
        look=lambda callbacks: (callbacks[0].stopped_epoch, float(callbacks[0].best_score)),
    ),
    "StochasticWeightAveraging": Feature(
        lambda _: [StochasticWeightAveraging(0.05, swa_epoch_start=2)]
    ),
    "WeightAveraging": Feature(lambda _: [WeightAveraging()]),
    "EMAWeightAveraging": Feature(
        lambda _: [EMAWeightAveraging(decay=0.9, update_every_n_steps=2)]
    ),
    "GradientAccumulationScheduler": Feature(
        lambda _: [GradientAccumulationScheduler({0: 4, 2: 2})]
    ),
    "ModelCheckpoint": Feature(
        lambda folder: [ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1)],
        {"enable_checkpointing": True},
        look=checkpoints,
    ),
    "ModelPruning": Feature(
        lambda _: [ModelPruning("l1_unstructured", amount=0.2, use_global_unstructured=True)]
    ),
    "monitors": Feature(
        lambda _: [LearningRateMonitor(), Timer()], {"logger": CSVLogger, "log_every_n_steps": 4}
    ),
    "detect_anomaly": Feature(lambda _: [], {"detect_anomaly": True}),
    "overfit_batches": Feature(lambda _: [], {"overfit_batches": 3}),
}


def train_with(name: str, folder: Path) -> list[tuple[Run, Any, list[State]]]:
    """Under DDP, under DCT at density 1.0 and at 0.1: the run, what the feature has left, weights
    after each epoch.
    """
    feature = FEATURES[name]
    results = []
    for strategy in (
        DDPStrategy(),
        DCTStrategy(compress="gradients", density=1.0),
        DCTStrategy(compress="gradients", density=0.1, refresh_every=5),
    ):
        here = folder / str(len(results))
        callbacks = feature.callbacks(here)
        epochs = Epochs()
        settings = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **feature.trainer}
        if "logger" in settings:
            settings["logger"] = settings["logger"](here)
        run = fit(strategy, Evaluated(), BATCHES, callbacks=[epochs, *callbacks], **settings)
        results.append((run, feature.look(callbacks), epochs.weights))
    return results


@pytest.mark.parametrize("name", FEATURES)
def test_feature(ranks: Any, tmp_path: Path, name: str) -> None:
    """Oracles: DDPStrategy, bitwise, at density 1.0; replicas equal below it; and a check of the
    feature's own.
    """
    by_rank = ranks(2).run(train_with, name, tmp_path)
    for ddp, dense, _ in by_rank:
        assert_weights_equal(ddp[0].weights, dense[0].weights)
        assert ddp[0].losses == dense[0].losses
        assert ddp[1] == dense[1]
    assert_replicas_equal([compressed for _, _, (compressed, _, _) in by_rank])
    run, left, epochs = by_rank[0][2]
    assert run.residuals
    assert_feature(name, run, left, epochs, tmp_path)


def assert_feature(name: str, run: Run, left: Any, epochs: list[State], folder: Path) -> None:
    """What the compressed run must show of the feature."""
    steps = EPOCHS * BATCHES
    match name:
        case "EarlyStopping":
            steps = BATCHES * (left[0] + 1)
            assert 0 < left[0] < EPOCHS - 1
        case "StochasticWeightAveraging":
            # Lightning takes the weights up as an epoch starts: from the second on, so all but
            # those of the last.
            mean = {
                key: sum(weights[key] for weights in epochs[:-1]) / (EPOCHS - 1)
                for key in run.weights
            }
            assert_weights_close(mean, run.weights)
        case "EMAWeightAveraging" | "WeightAveraging":
            assert any(
                not torch.equal(weight, epochs[-1][key]) for key, weight in run.weights.items()
            )
        case "GradientAccumulationScheduler":
            steps = 2 * BATCHES // 4 + 2 * BATCHES // 2
        case "ModelCheckpoint":
            # Of a checkpoint that was bettered, the folder is gone too.
            assert {entry.name for entry in (folder / "2").iterdir()} == {left[0], f"{left[0]}.dct"}
        case "ModelPruning":
            zeros = sum(int((weight == 0).sum()) for weight in run.weights.values())
            assert zeros > 0.5 * sum(weight.numel() for weight in run.weights.values())
        case "monitors":
            (metrics,) = (folder / "2").rglob("metrics.csv")
            header = metrics.read_text().splitlines()[0]
            assert all(key in header for key in ("lr-SGD", "dct/dp/compression_ratio"))
        case "overfit_batches":
            steps = EPOCHS * 3
    assert run.synchronisations == steps


def find_rate_and_fit(folder: Path, settings: dict[str, Any], search: str | None) -> Run:
    strategy = DCTStrategy(refresh_every=4, **settings)
    watch = Watch()
    module = Module()
    module.lr = 0.1
    finder = LearningRateFinder(num_training_steps=6, max_lr=0.1, attr_name="lr")
    callbacks = [watch, *[finder] * (search == "callback")]
    trainer = trainer_for(strategy, callbacks=callbacks, default_root_dir=folder, max_epochs=2)
    if search == "tuner":
        rates = {
            "num_training": 6,
            "max_lr": 0.1,
            "early_stop_threshold": None,
            "update_attr": False,
        }
        found = Tuner(trainer).lr_find(module, loader(BATCHES, 40, 8), **rates)
        assert len(found.results["loss"]) >= 5
    trainer.fit(module, loader(BATCHES, 40, 8))
    watch.hashes = watch.hashes[-2 * BATCHES :]
    return summary(strategy, module, watch)


@pytest.mark.parametrize(
    "settings", [{"compress": "gradients", "density": 0.1}, {"local_steps": 2, "density": 0.1}, {}]
)
def test_search_for_a_learning_rate_leaves_nothing_behind(
    ranks: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Oracle: the same fit without a search, bitwise: weights, residuals, thresholds, traffic."""
    plain = ranks(2).run(find_rate_and_fit, tmp_path, settings, None)
    for search in ("tuner", "callback"):
        for expected, run in zip(
            plain, ranks(2).run(find_rate_and_fit, tmp_path, settings, search), strict=True
        ):
            assert run.hashes == expected.hashes
            assert_weights_equal(expected.residuals, run.residuals)
            assert run.state["thresholds"] == expected.state["thresholds"]
            assert run.totals.bytes_sent == expected.totals.bytes_sent
            assert run.synchronisations == 2 * BATCHES
    assert not list(tmp_path.iterdir())


class Notes(Callback):
    """Notes the weights that a hook sees at the beginning of each epoch, after the search, and what
    is sent then.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(hash_of(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.optimizers[0].param_groups[0]["lr"] > 0.1:  # in a trial only
            trainer.strategy.set_density(1.0)


def search_in_mid_run(folder: Path, searches: bool) -> tuple[Run, list[str]]:
    strategy = DCTStrategy()
    module = Module()
    watch = Watch()
    notes = Notes()
    module.lr = 0.1
    rates: dict[str, Any] = {"num_training_steps": 6, "max_lr": 1.0, "early_stop_threshold": None}
    search = [SearchLater(update_attr=False, **rates)] if searches else []
    averages = EMAWeightAveraging(decay=0.9)
    run = fit(
        strategy,
        module,
        loader(BATCHES, 40, 8),
        callbacks=[averages, *search, notes, watch],
        max_epochs=3,
    )
    return run, notes.seen


def test_a_search_in_mid_run_leaves_averages_and_hooks_as_they_were(
    ranks: Any, tmp_path: Path
) -> None:
    """Oracle: the same fit without a search; all ranks see the same weights where an epoch
    begins.
    """
    plain = ranks(2).run(search_in_mid_run, tmp_path, False)
    found = ranks(2).run(search_in_mid_run, tmp_path, True)
    for (expected, seen), (run, theirs) in zip(plain, found, strict=True):
        assert_weights_equal(expected.weights, run.weights)
        assert theirs == seen == plain[0][1]
        assert run.totals.bytes_sent == expected.totals.bytes_sent


def train_an_averaged_split(folder: Path) -> tuple[Any, Any]:
    """What the checkpoint says of a split point, and what the split point does."""
    split = SplitPoint(density=0.2)
    saver = ModelCheckpoint(folder, every_n_train_steps=BATCHES)
    module = Module(nn.Sequential(nn.Linear(40, 24), split, nn.Linear(24, 8)))
    averages = [EMAWeightAveraging(decay=0.9), saver]
    trainer_for(DCTStrategy(), callbacks=averages, enable_checkpointing=True).fit(
        module, loader(BATCHES, 40, 8)
    )
    return torch.load(saver.best_model_path)["state_dict"][
        "model.1._extra_state"
    ], split.get_extra_state()


def test_a_checkpoint_of_averages_has_the_thresholds_of_training(
    ranks: Any, tmp_path: Path
) -> None:
    """Lightning copies the module before training, and averages nothing but parameters and
    buffers.
    """
    for saved, current in ranks(1).run(train_an_averaged_split, tmp_path):
        assert saved == current
        assert saved["threshold"] is not None


def wrapped_backwards() -> list[int]:
    counts = []
    for strategy, module in (
        (DCTStrategy(local_steps=2), Module()),
        (DCTStrategy(compress="gradients"), Module()),
        (fsdp(local_steps=2), Plain()),
    ):
        with patch.object(Strategy, "backward", wraps=strategy.backward) as backward:
            train(strategy, module, BATCHES)
        counts.append(backward.call_count)
    return counts


def test_backward_is_lightnings_own(ranks: Any) -> None:
    """As Lightning's tests mock it: a strategy that overrides it would call itself without end."""
    assert ranks(2).run(wrapped_backwards) == 2 * [3 * [BATCHES]]


PROFILERS = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": partial(PyTorchProfiler, row_limit=-1, export_to_chrome=False),
    # A profiler of torch that Lightning knows nothing of.
    "torch": None,
}


class TorchProfiler(Callback):
    def on_train_start(self, *_: Any) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.start()

    def on_train_end(self, *_: Any) -> None:
        self.profiler.stop()
        self.table = self.profiler.key_averages().table(row_limit=-1, max_name_column_width=200)


def profile(name: str, compress: str, folder: Path) -> str:
    """What the profiler says of a run of this rank."""
    profiler = PROFILERS[name]
    callback = TorchProfiler()
    if profiler is None:
        fit(
            DCTStrategy(compress=compress, density=0.1, local_steps=1),
            Module(),
            BATCHES,
            callbacks=[callback],
        )
        return str(callback.table)
    here = profiler(dirpath=folder, filename="profile")
    fit(
        DCTStrategy(compress=compress, density=0.1, local_steps=1), Module(), BATCHES, profiler=here
    )
    return (folder / f"fit-profile-{rank()}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("simple", "gradients"),
        ("advanced", "updates"),
        ("pytorch", "updates"),
        ("torch", "gradients"),
    ],
)
def test_profiler_shows_an_exchange(ranks: Any, tmp_path: Path, name: str, compress: str) -> None:
    """Oracle: every span on every rank, and with the simple profiler one of each for every step (of
    one bucket).
    """
    for report in ranks(2).run(profile, name, compress, tmp_path):
        for work in ("compress", "exchange", "decompress", *["apply"] * (compress == "updates")):
            lines = [
                line for line in report.splitlines() if f"[Strategy]DCTStrategy.{work}" in line
            ]
            assert lines, report
            if name == "simple" and compress == "gradients":
                (line,) = lines
                assert int(line.split("|")[3]) == BATCHES
