import itertools
from importlib.util import find_spec
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from omegaconf import DictConfig

from lightning_dct.base_strategy import DCTStrategyBase
from loggers import logged_in_to_wandb
from train import make_trainer, suggest

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
# Of the extras `peers` and `elastic`, by strategy.
PACKAGES = {
    "dct_elastic": "torchft",
    "demo": "pytorch_optimizer",
    "diloco": "torchft",
    "hivemind": "hivemind",
    "local_sgd": "torchft",
}
STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))
CALLBACKS = sorted(file.stem for file in (CONF / "callbacks").glob("*.yaml"))
LOGGERS = sorted(file.stem for file in (CONF / "logger").glob("*.yaml"))


@pytest.fixture(autouse=True)
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def configuration(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "train", [*overrides, f"paths.root_dir={folder}", f"paths.output_dir={folder}/run"]
        )


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("strategy.densty=0.15", "Did you mean `strategy.density`?"),
        ("sed=1", "Did you mean `seed`?"),
        (
            "trainer.limit_val_batches=2",
            (
                "An argument that no file in conf/ has needs a plus sign:"
                " `+trainer.limit_val_batches=2`."
            ),
        ),
        ("strategy.density=0.15", None),
    ],
)
def test_a_setting_that_does_not_exist_is_told_what_it_may_mean(
    word: str, hint: str | None
) -> None:
    assert suggest(["--multirun", "experiment=lm", word, "hydra.job.num=3"]) == hint


def test_the_groups_are_what_the_readme_names() -> None:
    assert {"dlrm", "lm"} <= set(EXPERIMENTS)
    assert STRATEGIES == [
        "dct",
        "dct_elastic",
        "dct_fsdp",
        "dct_pipeline",
        "ddp",
        "ddp_bf16",
        "ddp_fp16",
        "demo",
        "diloco",
        "hivemind",
        "hsdp",
        "local_sgd",
        "none",
        "powersgd",
        "sparse_loco",
        "top_k",
    ]
    assert LOGGERS == ["csv", "none", "tensorboard", "wandb"]


def test_every_strategy_instantiates_and_changes_nothing_else(tmp_path: Path) -> None:
    """Each with one experiment and one logger after the other."""
    installed = [name for name in STRATEGIES if name not in PACKAGES or find_spec(PACKAGES[name])]
    plain = {}
    for experiment in EXPERIMENTS:
        plain[experiment] = configuration(tmp_path, f"experiment={experiment}")
        assert isinstance(hydra.utils.instantiate(plain[experiment].data), LightningDataModule)
        assert isinstance(hydra.utils.instantiate(plain[experiment].model), LightningModule)
        del plain[experiment].strategy, plain[experiment].logger, plain[experiment].trainer.devices
    for strategy, experiment, logger in zip(
        installed, itertools.cycle(EXPERIMENTS), itertools.cycle(LOGGERS), strict=False
    ):
        config = configuration(
            tmp_path, f"experiment={experiment}", f"strategy={strategy}", f"logger={logger}"
        )
        if strategy == "dct_elastic":
            config.trainer.devices = 1  # Lightning does not start its other ranks
        trainer = make_trainer(config)
        assert isinstance(trainer, Trainer)
        assert isinstance(trainer.strategy, DDPStrategy | ModelParallelStrategy)
        assert len(trainer.loggers) == (logger != "none")
        assert isinstance(trainer.strategy, DCTStrategyBase) == strategy.startswith("dct")
        del config.strategy, config.logger, config.trainer.devices
        assert config == plain[experiment]


@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_every_group_of_callbacks_instantiates(callbacks: str, tmp_path: Path) -> None:
    """Oracle: those of the default, and one that is named as its file is."""
    trainer = make_trainer(
        configuration(tmp_path, "experiment=lm", f"callbacks={callbacks}", "logger=none")
    )
    names = {type(callback).__name__.lower() for callback in trainer.callbacks}
    assert {"compressionmonitor", "steptimer"} <= names
    assert callbacks == "default" or any(
        name.startswith(callbacks.replace("_", "")) for name in names
    )


def test_the_command_line_replaces_the_data_of_an_experiment(tmp_path: Path) -> None:
    config = configuration(tmp_path, "experiment=dlrm", "data=movielens", "data.root=/somewhere")
    assert config.data._target_ == "dlrm.movielens.MovieLens"
    assert config.data.root == "/somewhere"


def test_wandb_is_offline_unless_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*overrides: str) -> bool:
        config = configuration(tmp_path, "experiment=lm", "logger=wandb", *overrides)
        return hydra.utils.instantiate(config.logger.wandb)._offline

    assert not logged_in_to_wandb()
    assert offline()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert logged_in_to_wandb()
    assert not offline()
    assert offline("logger.wandb.offline=true")
    (tmp_path / "netrc").write_text("machine example.org login user password key\n")
    assert not logged_in_to_wandb()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert logged_in_to_wandb()
