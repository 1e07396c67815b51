import doctest
import importlib
import pkgutil

import pytest

import lightning_dct

COMPARISON = ["comparison.table", "comparison.runs", "comparison.sweep"]
MODULES = [
    *COMPARISON,
    "lightning_dct",
    *(m.name for m in pkgutil.walk_packages(lightning_dct.__path__, "lightning_dct.")),
]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_say_what_happens(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_there_are_examples() -> None:
    for module in (
        *COMPARISON,
        "lightning_dct.traffic",
        "lightning_dct.callbacks.compression_monitor",
    ):
        assert module in MODULES
        assert doctest.testmod(importlib.import_module(module)).attempted > 0
