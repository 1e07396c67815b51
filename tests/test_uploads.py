"""Loggers that upload checkpoints without their folders are warned of at the start of fit."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from distributed.training import Module, fit, warnings_of
from lightning_dct import DCTStrategy
from lightning_dct.saving import warn_of_uploads


@pytest.mark.parametrize("log_model", [True, "all"])
def test_uploads_are_warned_of(tmp_path: Path, log_model: Any) -> None:
    """Oracle: the logger's name, what is left behind, and the remedy."""
    with pytest.warns(
        UserWarning,
        match=r"`WandbLogger\(log_model=...\)`.* without the folder .* `artifact.add_dir",
    ):
        warn_of_uploads([CSVLogger(tmp_path), WandbLogger(log_model=log_model, save_dir=tmp_path)])


def test_loggers_that_upload_nothing_are_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Lightning takes a DummyLogger for `fast_dev_run` and for searches: it has a method of any
        # name.
        warn_of_uploads(
            [CSVLogger(tmp_path), WandbLogger(log_model=False, save_dir=tmp_path), DummyLogger()]
        )


class Uploading(CSVLogger):
    """Notes what it is to do with checkpoints as Lightning's own loggers do."""

    _log_model = True


def messages_of_fit(folder: Path) -> list[str]:
    said = warnings_of(fit, DCTStrategy(), Module(), 2, logger=Uploading(folder))
    return [one for one in said if "log_model" in one]


def test_fit_warns_once_on_rank_0(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(messages_of_fit, tmp_path)
    assert len(first) == 1
    assert first[0].startswith("`Uploading(log_model=...)`")
    assert second == []
