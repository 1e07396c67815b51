"""Runs Lightning's own tests with DCTStrategy in the place of DDPStrategy, in the Trainer and in
Fabric.

    git clone --branch 2.6.6 https://github.com/Lightning-AI/pytorch-lightning
    python tests/reliability/lightning_suite.py pytorch-lightning            # every test file that names DDP
    python tests/reliability/lightning_suite.py pytorch-lightning -k spawn   # or what else pytest takes

Tests that want a GPU are skipped without one. ``--ddp`` as the first argument leaves DDPStrategy
where it is: what fails then, fails without us.
"""

import os
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Start pytest in the checkout, with this file as its plugin."""
    replaced = arguments[0] != "--ddp"
    checkout, *rest = arguments if replaced else arguments[1:]
    tests = Path(checkout).resolve() / "tests"
    files = [path for path in sorted(tests.rglob("test_*.py")) if "ddp" in path.read_text().lower()]
    plugin = ["-p", Path(__file__).stem] if replaced else []
    folders = [str(Path(__file__).parent), str(tests), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *map(str, files), *rest],
        cwd=tests,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    ).returncode


def pytest_configure() -> None:
    """Let what tests import as DDPStrategy, and every name registered for it, be DCTStrategy."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
