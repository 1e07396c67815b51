from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from lightning_dct import ThresholdRefresh

MODULE = LightningModule()


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), ("x", TypeError), (True, TypeError), (2.0, TypeError), (None, TypeError)],
)
def test_bad_intervals_are_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"`ThresholdRefresh\(every_n_steps\)`") as raised:
        ThresholdRefresh(every_n_steps=value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(("strategy", "name"), [("ddp", "DDPStrategy"), ("auto", "SingleDeviceStrategy")])
def test_strategies_without_thresholds_are_refused_by_name(strategy: str, name: str) -> None:
    callback = ThresholdRefresh()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match=rf"strategy='dct'.*this Trainer's strategy is {name}\."):
        callback.setup(trainer, MODULE, "fit")


class Synchronizer:
    """Counts as GradientSynchronizer does."""

    def __init__(self) -> None:
        self.steps_since_refresh = 0
        self.requested = False
        self.refreshed_at: list[int] = []

    def request_refresh(self) -> None:
        self.requested = True

    def synchronise(self, step: int) -> None:
        if self.requested:
            self.refreshed_at.append(step)
        self.steps_since_refresh = 1 if self.requested else self.steps_since_refresh + 1
        self.requested = False


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (3, 1), (5, 4), (100, 1)])
def test_refreshes_by_optimizer_steps_not_by_batches(every: int, accumulate: int) -> None:
    callback, synchronizer = ThresholdRefresh(every), Synchronizer()
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(synchronizer=synchronizer, activation_modules=[]))
    for batch in range(20 * accumulate):
        callback.on_train_batch_start(trainer, MODULE, None, batch)
        if batch % accumulate == accumulate - 1:
            synchronizer.synchronise(batch // accumulate)
    # The first synchronisation selects in any case, so it counts as a refresh.
    assert synchronizer.refreshed_at == list(range(every, 20, every))


def test_a_resumed_run_refreshes_on_the_same_steps() -> None:
    callback, synchronizer = ThresholdRefresh(10), Synchronizer()
    synchronizer.steps_since_refresh = 7
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(synchronizer=synchronizer, activation_modules=[]))
    for step in range(7, 25):
        callback.on_train_batch_start(trainer, MODULE, None, step)
        synchronizer.synchronise(step)
    assert synchronizer.refreshed_at == [10, 20]
