"""Runs Lightning's own tests of DDP with DCTStrategy in the place of DDPStrategy, in the Trainer and
in Fabric.

    make test-lightning                                        # clones Lightning's repository
    make test-lightning LIGHTNING=../pytorch-lightning         # or takes a checkout
    python tests/reliability/lightning_suite.py ../pytorch-lightning -k spawn     # what pytest takes

These are the tests whose name or body says DDP. Those in ``lightning_suite.txt`` fail by design: the
file says why, and one that passes by now is an error. Tests that want a GPU are skipped without one.
``--ddp`` as the first argument leaves DDPStrategy where it is: what fails then, fails without us.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BY_DESIGN = Path(__file__).with_suffix(".txt")
SECONDS_A_TEST = 180


def main(arguments: list[str]) -> int:
    """Start pytest in the checkout, with this file as its plugin."""
    replaced = arguments[0] != "--ddp"
    checkout, *rest = arguments if replaced else arguments[1:]
    tests = Path(checkout).resolve() / "tests"
    files = [path for path in sorted(tests.rglob("test_*.py")) if "ddp" in path.read_text().lower()]
    folders = [str(Path(__file__).parent), str(tests), os.environ.get("PYTHONPATH", "")]
    options = ["-p", Path(__file__).stem, "--timeout", str(SECONDS_A_TEST), "-q", "-rfEX"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files), *rest],
        cwd=tests,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "DCT_REPLACES_DDP": str(int(replaced)),
        },
    ).returncode


def fails_by_design() -> dict[str, str]:
    """The reasons by the tests' ids without their parameters."""
    lines = BY_DESIGN.read_text().splitlines()
    parts = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return dict(parts)  # type: ignore[arg-type]


def pytest_configure() -> None:
    """Let what tests import as DDPStrategy, and every name registered for it, be DCTStrategy."""
    if os.environ["DCT_REPLACES_DDP"] == "0":
        return
    import lightning.fabric.strategies as fabric
    import lightning.pytorch.strategies as pytorch

    import lightning_dct.fabric

    for module, registry, ours in (
        (pytorch, pytorch.StrategyRegistry, lightning_dct.DCTStrategy),
        (fabric, fabric.STRATEGY_REGISTRY, lightning_dct.fabric.DCTStrategy),
    ):
        for name, entry in registry.items():
            if entry["strategy"] is module.DDPStrategy:
                registry.register(
                    name, ours, entry["description"], override=True, **entry["init_params"]
                )
        module.DDPStrategy = ours


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out tests that have nothing to do with DDP, and mark those that fail by design."""
    import pytest

    chosen = [item for item in items if _is_about_ddp(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    if os.environ["DCT_REPLACES_DDP"] == "0":
        return
    reasons = fails_by_design()
    for item in items:
        if (
            reason := reasons.get(item.nodeid) or reasons.get(item.nodeid.partition("[")[0])
        ) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _is_about_ddp(item: Any) -> bool:
    body = inspect.getsource(item.function) if hasattr(item, "function") else ""
    return "ddp" in f"{item.nodeid.rpartition('::')[2]} {body}".lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
