"""Gives ``lightning.pytorch`` under the name ``pytorch_lightning``, for libraries that import the
latter.

import lightning_dct.as_pytorch_lightning  # before the library
from darts.models import TCNModel

The two packages have the same code and classes of their own, so a Trainer of one takes no strategy,
module or callback of the other. After this import there is one of each in the process:
``pytorch_lightning`` and its modules are ``lightning.pytorch`` and its modules, and
``lightning_fabric`` is ``lightning.fabric``. Libraries need no change, and ``pytorch_lightning``
need not be installed. Pickles that name its classes load as well.

Raises:
    RuntimeError: ``pytorch_lightning`` or ``lightning_fabric`` is imported already.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""The packages that are replaced, and what takes their place."""


def real_name(name: str) -> str | None:
    """The name that a module goes by in ``lightning``; None if it belongs to no package that is
    replaced.
    """
    package, dot, rest = name.partition(".")
    return ALIASES[package] + dot + rest if package in ALIASES else None


class _Aliases(MetaPathFinder, Loader):
    """Finds the modules of packages that are replaced, and loads those that take their place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real = real_name(name)
        if real is None or (there := find_spec(real)) is None:
            return None
        return ModuleSpec(name, self, is_package=there.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        real = real_name(module.__name__)
        assert real is not None
        # What an import gives is what is listed under the name when the module has been executed.
        sys.modules[module.__name__] = import_module(real)


def _install() -> None:
    for name, real in ALIASES.items():
        if name in sys.modules and sys.modules[name] is not sys.modules.get(real):
            raise RuntimeError(
                f"`import {__name__}` comes too late: `{name}` is imported already, as something"
                f" else than `{real}`, by this program or a library. Put it at the top of the"
                " script that is started, before all other imports."
            )
    sys.meta_path.insert(0, _Aliases())


_install()
