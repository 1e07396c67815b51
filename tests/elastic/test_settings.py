"""What cannot be elastic is refused by name; and what the strategy does by itself, without a group."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dct import DCTElasticStrategy, DCTStrategy
from lightning_dct.elastic.present import import_torchft


@pytest.mark.parametrize(
    "setting",
    [
        {"exchange": "sharded"},
        {"exchange": "by_node"},
        {"delay": 2},
        {"compress": "gradients"},
        {"target_overhead": 0.05},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_settings_that_take_all_ranks(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.elastic.elastic_strategy.import_torchft", lambda: None)
    with pytest.raises(ValueError, match=next(iter(setting))):
        DCTElasticStrategy(**setting)


def test_another_version_of_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.elastic.present.version", lambda name: "2026.1.1")
    with pytest.raises(ImportError, match=r"install '\.\[elastic\]'"):
        import_torchft()


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> DCTElasticStrategy:
    monkeypatch.setattr("lightning_dct.elastic.elastic_strategy.import_torchft", lambda: None)
    return DCTElasticStrategy()


def test_a_step_that_is_passed_over_returns_what_the_last_one_has(
    strategy: DCTElasticStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, weight = SimpleNamespace(trains=True), torch.ones((), requires_grad=True)
    monkeypatch.setattr(DCTElasticStrategy, "_elastic", updates)
    monkeypatch.setattr(DCTStrategy, "training_step", lambda self, batch: {"loss": 2 * weight, "preds": [3 * weight]})
    strategy.training_step(None)
    updates.trains = False
    output = strategy.training_step(None)
    assert output["preds"] == [torch.tensor(3.0)]
    assert not output["preds"][0].requires_grad
    output["loss"].backward()
    assert output["loss"].item() == 2.0
    assert weight.grad is None
