"""What users of a Trainer see: logs, metrics, evaluation of ragged batches, predictions, saved best
models.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanSquaredError

from distributed.training import Noise, trainer_for
from pipeline.split_models import (
    MICRO_BATCHES,
    SplitModule,
    batches,
    replica,
    strategy_for,
    train_alone,
)

EVALUATED = {"density": 0.3, "forward_format": "int8"}


class Ragged(Noise):
    """Batches of 7, 6, 5, ... rows."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs[: 7 - index], targets[: 7 - index]


def ragged(count: int, stages: int) -> DataLoader:
    return DataLoader(Ragged(count, 40, 8, 7, 50 + replica(stages)), batch_size=None)


def expected_validation(
    module: SplitModule, counts: list[int], call: Any = None
) -> dict[str, float]:
    """What validation of so many ragged batches of each pipeline comes to, in one process.

    ``call`` is how the network is called, if not with the inputs alone.
    """
    module.eval()
    sums = 0.0
    rows = 0
    means = []
    for pipeline, count in enumerate(counts):
        data = Ragged(count, 40, 8, 7, 50 + pipeline)
        total = 0.0
        seen = 0
        for index in range(count):
            inputs, targets = data[index]
            with torch.no_grad():
                # The network runs in micro-batches, each masked by itself, as in training.
                parts = [
                    (call or module.network)(part) for part in inputs.tensor_split(MICRO_BATCHES)
                ]
                total += float((torch.cat(parts) - targets).square().mean()) * len(inputs)
            seen += len(inputs)
        sums = sums + total
        rows = rows + seen
        means = [*means, total / seen]
    return {"val/mean": sums / rows, "val/rows": float(rows)}


def fit_and_validate(
    stages: int, counts: list[int]
) -> tuple[dict[str, float], dict[str, float], dict[str, Tensor]]:
    """What is logged in fit and in a validation after it, and the state of this pipeline's first
    replica.
    """
    module = SplitModule(2, EVALUATED)
    strategy = strategy_for(stages, density=1.0)
    trainer = trainer_for(strategy)
    held_out = ragged(counts[replica(stages)], stages)
    trainer.fit(module, batches(4, stages), held_out)
    within = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (after,) = trainer.validate(module, held_out, verbose=False)
    return within, after, module.state_dict()


@pytest.mark.parametrize(("world", "counts"), [(2, [3]), (4, [3, 2])])
def test_validation_of_ragged_batches(ranks: Any, world: int, counts: list[int]) -> None:
    """Oracle: the model in one process, every row once; pipelines with unequal numbers of batches
    do not hang.
    """
    told = ranks(world).run(fit_and_validate, 2, counts)
    module = SplitModule(2, EVALUATED)
    module.load_state_dict(told[0][2])
    expected = expected_validation(module, counts)
    losses, _ = train_alone(2, EVALUATED, width=len(counts), count=4)
    for rank, (within, after, _) in enumerate(told):
        assert (
            within.keys()
            == told[0][0].keys()
            >= {"train/loss", "train/rows", "train/largest", "val/loss"}
        )
        assert within["train/loss"] == pytest.approx(losses[rank // 2][-1], abs=1e-6)
        assert within["train/rows"] == 2.0
        assert within["train/largest"] >= within["train/loss"]
        assert after["val/mean"] == pytest.approx(expected["val/mean"], rel=1e-5)
        assert after["val/rows"] == expected["val/rows"]
        if world == 2:  # with more replicas, each uses thresholds of its own during fit
            assert within["val/mean"] == pytest.approx(expected["val/mean"], rel=1e-5)


def predict(stages: int) -> tuple[list[Tensor], list[Tensor]]:
    module = SplitModule(2)
    trainer = trainer_for(strategy_for(stages))
    predicted = trainer.predict(module, ragged(3, stages))
    with torch.no_grad():
        return predicted, [module.network(inputs) for inputs, _ in ragged(3, stages)]


def test_predictions_reach_every_rank(ranks: Any) -> None:
    """Oracle: the network's outputs in one process; every rank still has the whole model."""
    for predicted, expected in ranks(2).run(predict, 2):
        assert [one.shape[0] for one in predicted] == [7, 6, 5]
        for one, other in zip(predicted, expected, strict=True):
            torch.testing.assert_close(one, other)


class Measured(SplitModule):
    """Logs metric objects."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.sizes = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = self.network(inputs)
        self.error(outputs, targets)
        self.sizes.update(torch.tensor([len(inputs)]))
        self.log("train/error", self.error, on_step=True, on_epoch=True)
        return {"loss": (outputs - targets).square().mean()}

    def on_train_epoch_end(self) -> None:
        self.log("train/examples", self.sizes.compute().sum())


def fit_measured() -> dict[str, float]:
    trainer = trainer_for(strategy_for(2, density=1.0))
    trainer.fit(Measured(), batches(3, 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_metric_objects_come_out_alike_on_every_rank(ranks: Any) -> None:
    """Oracle: the mean of all losses over both pipelines, and the number of all rows."""
    told = ranks(4).run(fit_measured)
    losses, _ = train_alone(2, width=2, count=3)
    for rank, metrics in enumerate(told):
        assert metrics["train/error_epoch"] == pytest.approx(sum(map(sum, losses)) / 6, rel=1e-5)
        assert metrics["train/error_step"] == pytest.approx(losses[rank // 2][-1], rel=1e-5)
        assert metrics["train/examples"] == 48.0


class Accumulating(SplitModule):
    """Never resets its metric: every epoch's value is that of all epochs so far."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/mean", self.mean.compute())


def fit_accumulating() -> tuple[list[float], list[str]]:
    module = Accumulating()
    seen = []
    trainer = trainer_for(strategy_for(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.validate(module, ragged(3 - len(seen), 2), verbose=False)
            seen.append(float(trainer.callback_metrics["val/mean"]))
    return seen, [str(warning.message) for warning in caught]


def test_metrics_that_are_not_reset_go_on(ranks: Any) -> None:
    """Oracle: batches of 7, 6, 5, and then 7, 6 rows again, in one process; no rank says that it
    has no data.
    """
    once, again = (expected_validation(SplitModule(2), [count])["val/mean"] for count in (3, 2))
    for seen, said in ranks(2).run(fit_accumulating):
        assert seen == pytest.approx([once, (18 * once + 13 * again) / 31])
        assert not any("before the ``update`` method" in text for text in said)


def fit_with_monitors(folder: Path) -> tuple[str, int, float]:
    """Stops early because the loss does not fall by 10; saves the best."""
    module = SplitModule(2, EVALUATED)
    best = ModelCheckpoint(folder, "{epoch}", monitor="val/loss")
    stopping = EarlyStopping("val/loss", min_delta=10.0, patience=1)
    trainer = trainer_for(
        strategy_for(2), callbacks=[best, stopping], max_epochs=9, enable_checkpointing=True
    )
    trainer.fit(module, batches(2, 2), ragged(2, 2))
    (scores,) = trainer.validate(module, ragged(2, 2), ckpt_path="best", verbose=False)
    return (
        best.best_model_path,
        trainer.current_epoch,
        scores["val/loss"] - float(best.best_model_score),
    )


def test_monitors_decide_alike(ranks: Any, tmp_path: Path) -> None:
    """Oracle: one decision on both ranks, and the best model's own score when it is loaded."""
    told = ranks(2).run(fit_with_monitors, tmp_path)
    assert told[0] == told[1]
    path, epochs, difference = told[0]
    assert path.startswith(str(tmp_path))
    assert epochs == 2
    assert difference == pytest.approx(0.0, abs=1e-6)
