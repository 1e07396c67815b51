from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from lightning_dct import ThresholdRefresh

MODULE = LightningModule()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        ("x", TypeError),
        (True, TypeError),
        (2.0, TypeError),
        (None, TypeError),
    ],
)
def test_bad_intervals_are_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"`ThresholdRefresh\(every_n_steps\)`") as raised:
        ThresholdRefresh(every_n_steps=value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "DDPStrategy"), ("auto", "SingleDeviceStrategy")]
)
def test_strategies_without_thresholds_are_refused_by_name(strategy: str, name: str) -> None:
    callback = ThresholdRefresh()
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    with pytest.raises(
        MisconfigurationException, match=rf"strategy='dct'.*this Trainer's strategy is {name}\."
    ):
        callback.setup(trainer, MODULE, "fit")
