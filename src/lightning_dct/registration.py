"""Registers the strategies with Lightning's Trainer: at once if that is imported, else as soon as it is.

Importing Lightning takes longer than importing torch, and a plain loop does without. Lightning has no entry point for
strategies, so a hook of the import system waits for it.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TRAINER = "lightning.pytorch"


def register_strategies() -> None:
    """Register the names of all strategies now, or when the Trainer is imported."""
    if TRAINER in sys.modules:
        _register()
    elif not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting())


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_dct.elastic.elastic_strategy import DCTElasticStrategy
    from lightning_dct.fsdp.fsdp_strategy import DCTFSDPStrategy
    from lightning_dct.pipeline.pipeline_strategy import DCTPipelineStrategy
    from lightning_dct.strategy import DCTStrategy

    for strategy in (DCTStrategy, DCTPipelineStrategy, DCTFSDPStrategy, DCTElasticStrategy):
        strategy.register_strategies(StrategyRegistry)


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
