"""What can be imported: most tests run a script in a fresh interpreter."""

import ast
import importlib
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_dct

ROOT = Path(__file__).resolve().parent.parent

# transformers is none of ours; torchmetrics imports it where it is.
OPTIONAL = [
    "hydra",
    "omegaconf",
    "wandb",
    "numba",
    "rich",
    "tokenizers",
    "matplotlib",
    "transformers",
    "torchft",
    "torchrec",
    "triton",
]

WITHOUT_OPTIONAL_PACKAGES = f"""
    import importlib.metadata as metadata
    import sys

    OPTIONAL = {OPTIONAL!r}
    DISTRIBUTIONS = {{*OPTIONAL, "hydra-core"}}

    class Absent:
        '''Packages that are not installed: neither modules nor metadata of them can be found.'''

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in OPTIONAL:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    find = metadata.Distribution.from_name.__func__

    def from_name(cls, name):
        if name.lower() in DISTRIBUTIONS:
            raise metadata.PackageNotFoundError(name)
        return find(cls, name)

    metadata.Distribution.from_name = classmethod(from_name)
    sys.meta_path.insert(0, Absent())
"""


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_without_any_optional_package(tmp_path: Path) -> None:
    script = (
        WITHOUT_OPTIONAL_PACKAGES
        + """
    for name in OPTIONAL:
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{name} should be absent")

    import lightning_dct
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(
        strategy="dct", accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )
    assert type(trainer.strategy) is lightning_dct.DCTStrategy
    trainer.fit(BoringModel())
    try:
        lightning_dct.DCTElasticStrategy()
    except ImportError as error:
        print("elastic", error)
    print("steps", trainer.global_step, trainer.strategy.synchronizer.synchronisations)
    print("loaded", sorted(set(OPTIONAL) & {name.partition(".")[0] for name in sys.modules}))
    """
    )
    printed = run(textwrap.dedent(script), tmp_path)
    assert "steps 2 2" in printed
    assert "loaded []" in printed
    assert (
        "elastic `strategy='dct_elastic'` needs torchft 0.2.0: `pip install '.[elastic]'` in a"
        " clone" in printed
    )
    assert "Synchronisation" not in printed  # nobody to send to


def test_a_plain_loop_needs_no_lightning(tmp_path: Path) -> None:
    script = """
    import sys

    import torch
    import torch.distributed as dist

    import lightning_dct

    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    model = torch.nn.Linear(32, 2)
    optimizer = torch.optim.Adam(model.parameters())
    updates = lightning_dct.Updates(model, optimizer, density=0.03)
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    with updates.shared_weights():
        assert updates.state_dict()["synchronisations"] == 1
    updates.close()
    dist.destroy_process_group()
    assert not {"lightning", "torchmetrics"} & sys.modules.keys()

    # The Trainer, imported later, knows the strategies.
    from lightning.pytorch import Trainer

    trainer = Trainer(strategy="dct", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is lightning_dct.DCTStrategy
    assert set(dir(lightning_dct)) == set(lightning_dct.__all__)
    """
    run(textwrap.dedent(script), tmp_path)


@pytest.mark.parametrize(
    "first",
    [
        "from lightning_dct import DCTStrategy",
        "import lightning_dct.callbacks.run_advice",
        "import lightning_dct.pipeline.pipeline_strategy",
        "import lightning_dct.fabric",
        # Libraries ask whether Lightning is installed, without an import of it.
        (
            "import importlib.util, lightning_dct\nassert"
            " importlib.util.find_spec('lightning.pytorch')"
        ),
    ],
)
def test_any_name_may_be_imported_before_lightning(tmp_path: Path, first: str) -> None:
    script = (
        "from lightning.pytorch.strategies import"
        " StrategyRegistry\nprint(StrategyRegistry.get('dct_pipeline'))"
    )
    assert "DCTPipelineStrategy" in run(f"{first}\n{script}", tmp_path)


def test_names_where_newer_ones_are_missing(tmp_path: Path) -> None:
    """Without what torch 2.8 does not have; the errors of `strategy="dct"` before processes
    start.
    """
    script = """
    import importlib
    import pkgutil

    import pytorch_lightning
    import torch.distributed
    import torch.nn.parallel.distributed as ddp
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import StrategyRegistry

    def refusal(kind, strategy):
        try:
            kind(strategy=strategy, devices=2, accelerator="cpu", logger=False)
        except Exception as error:
            return " ".join(str(error).split())

    assert "invalid strategy name: `strategy='dct'`" in refusal(Trainer, "dct")

    del torch.distributed.all_gather_single
    bucket_size = vars(ddp).pop("_DEFAULT_BUCKET_CAP_MB")

    import lightning_dct

    for module in pkgutil.walk_packages(lightning_dct.__path__, "lightning_dct."):
        if not module.name.endswith(("__main__", "as_pytorch_lightning", "torchrec")):
            importlib.import_module(module.name)
    ddp._DEFAULT_BUCKET_CAP_MB = bucket_size  # this torch itself cannot do without

    assert refusal(Trainer, "dct") is None
    assert "`strategy='dct'` is for the Trainer of `lightning.pytorch`" in refusal(pytorch_lightning.Trainer, "dct")
    for given in ("dct", "ddp_dct_spawn", lightning_dct.DCTStrategy()):
        assert "put `import lightning_dct.as_pytorch_lightning` at the top" in refusal(pytorch_lightning.Trainer, given)
    said = refusal(pytorch_lightning.Trainer, lightning_dct.DCTStrategy())
    assert said.index("as_pytorch_lightning") < 300  # what to do comes before all settings
    try:
        import lightning_dct.as_pytorch_lightning
    except RuntimeError as error:
        assert "comes too late: `pytorch_lightning` is imported already" in str(error)
    else:
        raise AssertionError("two packages of one name")

    trainer = Trainer(
        strategy=lightning_dct.DCTStrategy(compress="gradients"), accelerator="cpu", devices=1, max_steps=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    assert trainer.strategy.synchronizer.synchronisations == 2

    ENDINGS = ("", "_spawn", "_fork", "_notebook", "_find_unused_parameters_true")
    NAMES = {name + ending for name in ("dct", "ddp_dct") for ending in ENDINGS}
    METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}
    for _ in range(2):
        assert set(StrategyRegistry.available_strategies()) >= NAMES
        for name in NAMES:
            strategy = StrategyRegistry.get(name)
            assert isinstance(strategy, lightning_dct.DCTStrategy)
            assert strategy._start_method == METHODS.get(name.rpartition("_")[2], "popen")
            assert strategy._ddp_kwargs.get("find_unused_parameters", False) == name.endswith("parameters_true")
        importlib.reload(lightning_dct)

    everything = {}
    exec("from lightning_dct import *", everything)
    assert set(everything) - {"__builtins__"} == set(lightning_dct.__all__)
    """
    run(textwrap.dedent(script), tmp_path)


@pytest.mark.parametrize("first", ["import lightning_dct", "import lightning.pytorch", ""])
def test_pytorch_lightning_may_be_lightning(tmp_path: Path, first: str) -> None:
    """Oracle: the very same modules and classes, and a training by what a library would import."""
    script = f"""
    {first}
    import lightning_dct.as_pytorch_lightning

    import pytorch_lightning as pl
    import pytorch_lightning.callbacks.early_stopping as stopping
    from lightning_fabric.utilities.seed import seed_everything
    from pytorch_lightning.demos.boring_classes import BoringModel
    from pytorch_lightning.utilities import rank_zero_only

    import importlib.util
    import lightning
    import lightning_dct
    import pickle
    import sys

    assert pl is lightning.pytorch
    assert stopping.EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
    assert seed_everything is lightning.fabric.utilities.seed.seed_everything
    assert pickle.loads(b"cpytorch_lightning.callbacks.timer\\nTimer\\n.") is lightning.pytorch.callbacks.Timer
    assert importlib.util.find_spec("pytorch_lightning.no_such_module") is None
    assert not [name for name, one in sys.modules.items() if "pytorch_lightning" in str(getattr(one, "__file__", "")) \
        and not name.startswith("lightning_dct")]
    for strategy in ("dct", "ddp_dct"):
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )
        trainer.fit(BoringModel())
        assert isinstance(trainer.strategy, lightning_dct.DCTStrategy)
        assert trainer.global_step == 2
    import lightning_dct.as_pytorch_lightning
    """
    run(textwrap.dedent(script), tmp_path)


def test_public_names() -> None:
    assert lightning_dct.__all__ == sorted(lightning_dct.__all__)
    assert all(hasattr(lightning_dct, name) for name in lightning_dct.__all__)
    assert {
        "DCTConfig",
        "DCTStrategy",
        "ThresholdRefresh",
        "CompressionMonitor",
        "CompressionRatio",
    } <= set(lightning_dct.__all__)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(lightning_dct.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["experiments", "examples"])
def test_scripts_import_what_the_package_has(folder: str) -> None:
    """Few of these scripts run in tests, and a name that is gone shows only when one starts."""
    files = sorted((ROOT / folder).rglob("*.py"))
    imports = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    named = [
        (file, node.module, alias.name)
        for file, node in imports
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.partition(".")[0] == "lightning_dct"
        for alias in node.names
    ]
    assert named
    gone = [place for place in named if not has(place[1], place[2])]
    assert not gone


def has(module: str, name: str) -> bool:
    """Whether a module has an attribute or a module of this name."""
    if module == "lightning_dct.torchrec" and find_spec("torchrec") is None:
        source = Path(
            find_spec(module).origin
        ).read_text()  # it cannot be imported without TorchRec
        return name in {
            node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)
        }
    return (
        hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None
    )
