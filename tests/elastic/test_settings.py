"""What cannot be elastic is refused by name."""

from typing import Any

import pytest

from lightning_dct import DCTElasticStrategy
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
