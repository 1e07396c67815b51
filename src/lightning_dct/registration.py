"""Registers the strategies with Lightning's Trainer: at once if that is imported, else as soon as
it is.

Importing Lightning takes longer than importing torch, and a plain loop does without. Lightning has
no entry point for strategies, so a hook of the import system waits for it.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

TRAINER = "lightning.pytorch"
OTHER_TRAINER = "pytorch_lightning"
USE_LIGHTNING = (
    "In your own code, import from `lightning`. If a library imports `pytorch_lightning`, put"
    " `import lightning_dct.as_pytorch_lightning` at the top of the script, before the library."
)
ENDINGS: dict[str, dict[str, Any]] = {
    "": {"start_method": "popen"},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
    "_find_unused_parameters_true": {"start_method": "popen", "find_unused_parameters": True},
}
"""Of names of strategies that start processes, with what each means."""
NAMES = {
    # Libraries look for "ddp" in a name before they do what several ranks need.
    **{
        f"{name}{ending}": ("DCTStrategy", given)
        for name in ("dct", "ddp_dct")
        for ending, given in ENDINGS.items()
    },
    **{
        f"dct_pipeline{end}": ("DCTPipelineStrategy", given)
        for end, given in ENDINGS.items()
        if "unused" not in end
    },
    "dct_fsdp": ("DCTFSDPStrategy", {}),
    "dct_elastic": ("DCTElasticStrategy", {}),
}
"""The public class of each name, and the settings that it begins with."""


def register_strategies() -> None:
    """Register the names of all strategies now, or when the Trainer is imported.

    The Trainer of ``pytorch_lightning`` has another registry. There the names end in an error that
    says what to do.
    """
    for package, register in {TRAINER: _register, OTHER_TRAINER: _register_refusals}.items():
        if package in sys.modules:
            register()
        elif not any(
            isinstance(finder, _Awaiting) and finder.package == package for finder in sys.meta_path
        ):
            sys.meta_path.insert(0, _Awaiting(package, register))


def other_trainer_is_there() -> bool:
    """Whether ``pytorch_lightning`` is imported, and is not this package's alias of
    ``lightning.pytorch``.
    """
    other = sys.modules.get(OTHER_TRAINER)
    return other is not None and other is not sys.modules.get(TRAINER)


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for name, (kind, settings) in NAMES.items():
        StrategyRegistry.register(
            name, partial(_make, kind), description=kind, override=True, **settings
        )


def _register_refusals() -> None:
    if not other_trainer_is_there():
        return
    registry = import_module(f"{OTHER_TRAINER}.strategies").StrategyRegistry
    for name, (kind, _) in NAMES.items():
        registry.register(
            name, partial(_refuse, name), description=f"{kind}, for {TRAINER}", override=True
        )


def _refuse(name: str, **_: Any) -> NoReturn:
    raise RuntimeError(
        f"`strategy={name!r}` is for the Trainer of `{TRAINER}`, and this one is"
        f" `{OTHER_TRAINER}`'s. {USE_LIGHTNING}"
    )


def _make(kind: str, **settings: Any) -> Any:
    # Imported only now, because one of this package's modules may be what imports the Trainer.
    return getattr(import_module("lightning_dct"), kind)(**settings)


class _Awaiting(MetaPathFinder):
    """Finds nothing itself: has a package of a Trainer register the strategies at the end of its
    import.
    """

    def __init__(self, package: str, register: Callable[[], None]) -> None:
        self.package = package
        self._register = register
        self._is_asking_others = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.package or self._is_asking_others:
            return None
        self._is_asking_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                # Not when it is found: a library may look only whether it is installed.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                self._register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
