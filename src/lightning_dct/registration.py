"""Registers the strategies with Lightning's Trainer: at once if that is imported, else as soon as it is.

Importing Lightning takes longer than importing torch, and a plain loop does without. Lightning has no entry point for
strategies, so a hook of the import system waits for it.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TRAINER = "lightning.pytorch"
ENDINGS: dict[str, dict[str, Any]] = {
    "": {"start_method": "popen"},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
    "_find_unused_parameters_true": {"start_method": "popen", "find_unused_parameters": True},
}
"""Of names of strategies that start processes, with what each means."""
NAMES = {
    **{f"dct{ending}": ("DCTStrategy", settings) for ending, settings in ENDINGS.items()},
    **{f"dct_pipeline{end}": ("DCTPipelineStrategy", given) for end, given in ENDINGS.items() if "unused" not in end},
    "dct_fsdp": ("DCTFSDPStrategy", {}),
    "dct_elastic": ("DCTElasticStrategy", {}),
}
"""The public class of each name, and the settings that it begins with."""


def register_strategies() -> None:
    """Register the names of all strategies now, or when the Trainer is imported."""
    if TRAINER in sys.modules:
        _register()
    elif not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting())


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for name, (kind, settings) in NAMES.items():
        StrategyRegistry.register(name, partial(_make, kind), description=kind, override=True, **settings)


def _make(kind: str, **settings: Any) -> Any:
    # Imported only now, because one of this package's modules may be what imports the Trainer.
    return getattr(import_module("lightning_dct"), kind)(**settings)


class _Awaiting(MetaPathFinder):
    """Finds nothing itself: has the Trainer's package register the strategies at the end of its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
