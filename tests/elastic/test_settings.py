"""What cannot be elastic is refused by name; and what the strategy does by itself, without a
group.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dct import DCTElasticStrategy, DCTStrategy
from lightning_dct.config import DCTConfig
from lightning_dct.elastic import elastic_strategy
from lightning_dct.elastic.elastic_updates import Header, refuse_not_in_place
from lightning_dct.elastic.joining import (
    compare_settings,
    compare_starts,
    settings_of,
    situation_of,
    take_situation,
)
from lightning_dct.elastic.present import import_torchft
from lightning_dct.law import RunLength


@pytest.fixture(autouse=True)
def _without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.elastic.elastic_strategy.import_torchft", lambda: None)


@pytest.mark.parametrize(
    "setting",
    [
        {"exchange": "two_phase"},
        {"exchange": "hierarchical"},
        {"overlap_steps": 2},
        {"compress": "gradients"},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_settings_that_take_all_ranks(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        DCTElasticStrategy(**setting)


def test_ranks_that_lightning_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end all of them if one dies. Those with a number are there already."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(
        ValueError, match=r"`devices=3`.*`python examples/elastic/start.py 3 train.py`"
    ):
        Trainer(strategy="dct_elastic", accelerator="cpu", devices=3, logger=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (
        Trainer(strategy="dct_elastic", accelerator="cpu", devices=3, logger=False).global_rank == 1
    )


def test_parameters_that_cannot_be_read_in_place() -> None:
    parameters = {
        torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)): "half",
        torch.nn.Parameter(torch.ones(2, 3).t()): "turned",
    }
    for parameter, name in parameters.items():
        with pytest.raises(ValueError, match=f"(?s){name}.*Use `strategy='dct'`"):
            refuse_not_in_place({parameter: name})
        refuse_not_in_place({parameter.requires_grad_(False): name})


def test_settings_on_the_command_line() -> None:
    """LightningCLI reads from the source of ``__init__`` which settings it passes on, and some code
    it cannot read.
    """
    given = {
        "": "lightning_dct.DCTElasticStrategy",
        ".local_steps": "4",
        ".density": "0.5",
        ".bucket_cap_mb": "7",
    }
    words = [f"--trainer.strategy{setting}={value}" for setting, value in given.items()]
    cli = LightningCLI(
        BoringModel,
        run=False,
        seed_everything_default=None,
        args=["--trainer.accelerator=cpu", *words],
    )
    strategy = cli.trainer.strategy
    assert (strategy.config.local_steps, strategy.config.density) == (4, 0.5)
    assert (strategy.config.exchange, strategy._ddp_kwargs["bucket_cap_mb"]) == ("all_gather", 7)


def test_another_version_of_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.elastic.present.version", lambda name: "2026.1.1")
    with pytest.raises(ImportError, match=r"install '\.\[elastic\]'"):
        import_torchft()


@pytest.fixture
def strategy() -> DCTElasticStrategy:
    return DCTElasticStrategy()


def test_a_step_that_is_passed_over_returns_what_the_last_one_has(
    strategy: DCTElasticStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = SimpleNamespace(trains=True)
    weight = torch.ones((), requires_grad=True)
    monkeypatch.setattr(DCTElasticStrategy, "_elastic", updates)
    monkeypatch.setattr(
        DCTStrategy,
        "training_step",
        lambda self, batch: {"loss": 2 * weight, "preds": [3 * weight]},
    )
    strategy.training_step(None)
    updates.trains = False
    output = strategy.training_step(None)
    assert output["preds"] == [torch.tensor(3.0)]
    assert not output["preds"][0].requires_grad
    output["loss"].backward()
    assert output["loss"].item() == 2.0
    assert weight.grad is None


class OneOther:
    """A group of two, in which the other sends what a function makes of what this one does."""

    def __init__(self, other: Any, text: str = "") -> None:
        self.other = other
        self.text = text
        self.waited: list[float | None] = []

    def all_gather(
        self, sent: torch.Tensor, patience_s: float | None = None
    ) -> torch.Tensor | None:
        self.waited.append(patience_s)
        theirs = self.other(sent)
        return None if theirs is None else torch.stack([theirs, sent])

    def start_quorum(self) -> bool:
        return True

    def should_commit(self) -> bool:
        return True

    def size(self) -> int:
        return 2

    def spread(self, tensor: torch.Tensor) -> None:
        pass

    def spread_text(self, text: str) -> str:
        return self.text


@pytest.mark.parametrize("takes", [1000.0, float("inf")])
def test_ranks_choose_settings_by_the_steps_that_the_first_one_expects(
    strategy: DCTElasticStrategy, monkeypatch: pytest.MonkeyPatch, takes: float
) -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.trainer = SimpleNamespace(checkpoint_callbacks=[])
    monkeypatch.setattr(elastic_strategy, "run_length", lambda trainer: RunLength(10.0))
    monkeypatch.setattr(DCTElasticStrategy, "world_size", 2)
    monkeypatch.setattr(DCTElasticStrategy, "global_rank", 1)
    strategy._lightning_module = module
    strategy.present = OneOther(lambda sent: torch.tensor(Header(*sent.tolist())._replace(rank=0)))  # type: ignore[assignment]
    strategy.present.text = json.dumps(situation_of(module, [takes, "why"]))  # type: ignore[attr-defined]
    strategy._join()
    assert strategy._agreed_length() == (takes, "why", 0.0)


def test_a_rank_can_join_after_something_is_unfrozen() -> None:
    peer = torch.nn.Linear(2, 2)
    joiner = torch.nn.Linear(2, 2)
    peer.trainer = joiner.trainer = SimpleNamespace(checkpoint_callbacks=[])  # type: ignore[assignment]
    joiner.weight.requires_grad_(False)
    config = DCTConfig()
    compare_settings(settings_of(peer, config, 1), settings_of(joiner, config, 1))
    peer.bias.requires_grad_(False)
    take_situation(joiner, situation_of(peer, []))  # type: ignore[arg-type]
    assert joiner.weight.requires_grad
    assert not joiner.bias.requires_grad
    with pytest.raises(ValueError, match="settings of this rank differ"):
        compare_settings(
            settings_of(peer, config, 1), settings_of(torch.nn.Linear(3, 2), config, 1)
        )


def test_ranks_wait_for_the_slowest_to_read_its_checkpoint() -> None:
    checkpoint = {"state_dict": {"w": torch.ones(3)}, "global_step": 5}
    alike = OneOther(lambda sent: sent)
    compare_starts(alike, checkpoint, 0, "x.ckpt", 300.0)  # type: ignore[arg-type]
    assert alike.waited == [300.0]
    with pytest.raises(ValueError, match="different checkpoints"):
        compare_starts(OneOther(lambda sent: sent + 1), checkpoint, 0, "x.ckpt", 300.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, {"checkpoint": {"of": "a peer"}}])
def test_ranks_meet_again_if_one_goes_while_it_reads_its_checkpoint(
    strategy: DCTElasticStrategy, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    read = {"state_dict": {"w": torch.ones(3)}, "global_step": 5}
    answers = [False, True]
    strategy._lightning_module = SimpleNamespace(
        trainer=SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    )  # type: ignore[assignment]
    strategy.present = OneOther(lambda sent: sent if answers.pop(0) else None)  # type: ignore[assignment]
    # As expected before the checkpoint, in which is nothing of this strategy.
    strategy.length = RunLength(20.0)
    monkeypatch.setattr(DCTElasticStrategy, "global_rank", 0)
    monkeypatch.setattr(DCTStrategy, "load_checkpoint", lambda *_: read)
    monkeypatch.setattr(strategy, "_join", lambda: setattr(strategy, "_given", given))
    assert strategy.load_checkpoint("x.ckpt") == (given["checkpoint"] if given else read)
    assert answers == ([True] if given else [])
    assert strategy._agreed_length().steps == (20.0 if given else 15.0)


@pytest.mark.parametrize("search", [LearningRateFinder, BatchSizeFinder])
def test_searches_are_refused_before_anything_is_set_up(
    strategy: DCTElasticStrategy, search: Any
) -> None:
    strategy._lightning_module = SimpleNamespace(automatic_optimization=True)  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING), callbacks=[search()]
    )
    with pytest.raises(ValueError, match=f"cannot run `{search.__name__}`.* Run the search first"):
        strategy.setup(trainer)


def test_a_save_after_fit_comes_from_the_first_rank_that_was_present(
    strategy: DCTElasticStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be gone, and then nobody else would save."""
    saved: list[Any] = []
    monkeypatch.setattr(
        DCTStrategy, "save_checkpoint", lambda self, *_: saved.append(self.present.rank())
    )
    monkeypatch.setattr(DCTElasticStrategy, "global_rank", 1)
    strategy.save_checkpoint({}, "before-fit.ckpt")
    strategy.synchronizer = SimpleNamespace()  # type: ignore[assignment]
    for place in (1, 0):
        strategy.present = SimpleNamespace(rank=lambda place=place: place)  # type: ignore[assignment]
        strategy.save_checkpoint({}, "after-fit.ckpt")
    assert saved == [0]


def test_settings_that_are_not_of_the_config_reach_the_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`project`, and `broadcast_buffers=False`, which leaves each rank its own buffers."""
    monkeypatch.setattr("lightning_dct.elastic.elastic_strategy.import_torchft", lambda: None)
    monkeypatch.setattr(
        elastic_strategy, "PresentRanks", lambda *_: SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    )
    monkeypatch.setattr(DCTElasticStrategy, "global_rank", 0)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")
    module: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for settings, buffers, bound in (
        ({}, 3, 9.0),
        ({"broadcast_buffers": False, "project": clamp}, 0, 0.5),
    ):
        strategy = DCTElasticStrategy(**settings)
        strategy._lightning_module = module
        torch.nn.init.constant_(module[0].weight, 9.0)
        updates = strategy._make_updates()
        assert len(updates.buffers.named()) == buffers
        if updates.project is not None:
            updates.project()
        assert float(module[0].weight.max()) == bound


def clamp(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.5, 0.5)
