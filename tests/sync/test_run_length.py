"""Settings that follow the length of a run, on real ranks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from distributed.resuming import SaveAndStop, fit_half, without_times
from distributed.training import (
    Module,
    Noise,
    SearchLater,
    Watch,
    fit,
    launched,
    loader,
    perceptron,
    rank,
    trainer_for,
    warnings_of,
)
from lightning_dct import CompressionMonitor, DCTStrategy, base_strategy, law
from lightning_dct.callbacks import run_advice
from lightning_dct.config import DCTConfig
from lightning_dct.fabric import DCTStrategy as FabricDCTStrategy
from lightning_dct.law import UserSettings


def settings_in(trainer: Trainer) -> tuple[int, float]:
    """``local_steps`` and the density."""
    config = trainer.strategy.synchronizer.config
    return config.local_steps, config.density


def settings_of(batches: int, settings: dict[str, Any]) -> list[tuple[int, float]]:
    seen = Watch(look=settings_in)
    strategy = DCTStrategy(**settings)
    fit(strategy, Module(), loader(batches, 40, 8), callbacks=[seen])
    assert (strategy.config.local_steps, strategy.config.density) == seen.seen[-1]
    return seen.seen


def test_a_run_takes_the_settings_of_its_length(ranks: Any) -> None:
    """Eight batches are too few for more than the first settings, whatever the ranks; what is given
    is kept.
    """
    assert ranks(2).run(settings_of, 8, {}) == [[(1, 0.3)] * 8] * 2
    assert ranks(3).run(settings_of, 8, {"local_steps": 4}) == [[(4, 0.3)] * 8] * 3


def two_of_three() -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    return groups[rank() == 2]


def needed_by_ranks(config: DCTConfig, ranks: int) -> int:
    return int(10 * ranks * config.local_steps / config.density)


def density_in_a_group() -> list[float]:
    """Of the Trainer, with what it says at its start, and of Fabric."""
    with (
        patch.object(law, "steps_needed", needed_by_ranks),
        patch.object(run_advice, "rank_zero_info") as said,
    ):
        strategy = DCTStrategy(process_group=two_of_three)
        fit(strategy, Module(), 100, callbacks=[Stops(3)])
        told = " ".join(call.args[0] for call in said.call_args_list)
        fabric = launched(FabricDCTStrategy(process_group=two_of_three))
        with patch.object(law, "SHORTEST", 100):
            fabric.setup(model := perceptron(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert rank() or f"density={strategy.config.density:g}" in told
    return [strategy.config.density, fabric.strategy.config.density]


class Stops(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.after


def test_the_ranks_of_a_process_group_are_counted(ranks: Any) -> None:
    """Oracle: the settings for two ranks and a hundred steps.

    Three would take 0.3; the one by itself sends nothing.
    """
    two, also_two, _ = ranks(3).run(density_in_a_group)
    assert two == also_two == [0.2, 0.2]


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(Noise(self.batches, 40, 8, rank=rank()))


def train_on_a_stream(epochs: int) -> tuple[list[tuple[int, float]], list[str], list[str]]:
    """The settings in each step, what is told, and what is warned of; ten batches an epoch."""
    with (
        patch.object(law, "steps_needed", needed_by_steps),
        patch.object(run_advice, "steps_needed", needed_by_steps),
        patch.object(base_strategy, "steps_needed", needed_by_steps),
        patch.object(run_advice, "rank_zero_info") as at_start,
        patch.object(base_strategy, "rank_zero_info") as later,
    ):
        seen = Watch(look=settings_in)
        data = DataLoader(Stream(10), batch_size=None)
        warned = warnings_of(
            fit, DCTStrategy(), Module(), data, callbacks=[seen], max_epochs=epochs
        )
    told = [call.args[0] for call in (*at_start.call_args_list, *later.call_args_list)]
    return seen.seen, told, [one for one in warned if "This run has ended" in one]


def needed_by_steps(config: DCTConfig, ranks: int) -> int:
    return int(6 * config.local_steps / config.density)


def test_data_without_a_length_is_told_and_counted_when_an_epoch_ends(ranks: Any) -> None:
    """By hand: 1,000 steps would allow 1.5%; thirty steps allow 20%, and ten are too few for
    anything.
    """
    seen, told, warned = ranks(2).run(train_on_a_stream, 3)[0]
    assert seen == [(1, 0.015)] * 10 + [(1, 0.2)] * 20
    assert any(
        "as for a run of 1,000 optimizer steps" in one and "Trainer(max_steps=...)" in one
        for one in told
    )
    assert any(
        one.startswith("30 optimizer steps on 2 ranks: DCT takes local_steps=1, density=0.2")
        for one in told
    )
    assert not warned
    seen, _, warned = ranks(2).run(train_on_a_stream, 1)[0]
    assert seen == [(1, 0.015)] * 10
    assert len(warned) == 1
    assert "Tell its length by `Trainer(max_steps=10)`" in warned[0]


def needed(config: DCTConfig, ranks: int) -> int:
    return int(1.2 * config.local_steps / config.density)


def test_ranks_with_more_batches_take_the_same_settings(ranks: Any) -> None:
    """The first rank's eight batches decide, because ranks with settings of their own would wait
    for ever.
    """
    (first, other) = ranks(2).run(uneven_settings)
    assert first == other[: len(first)] == [(2, 0.3)] * 8


def uneven_settings() -> list[tuple[int, float]]:
    with patch.object(law, "steps_needed", needed):
        seen = Watch(look=settings_in)
        fit(
            DCTStrategy(),
            Module(),
            loader((8, 16)[rank()], 40, 8),
            callbacks=[seen],
            limit_train_batches=8,
        )
        return seen.seen


@contextmanager
def unknown_length() -> Iterator[None]:
    """A run of unknown length takes new settings every four steps."""
    with (
        patch.object(law, "steps_needed", needed),
        patch.object(law, "SHORTEST", 4),
        patch.object(Trainer, "estimated_stepping_batches", PropertyMock(return_value=math.inf)),
    ):
        yield


def logged_settings(folder: Path) -> tuple[int, float]:
    logger = CSVLogger(folder, name="", version="")
    seen = Watch(look=settings_in)
    fit(
        DCTStrategy(),
        Module(),
        loader(16, 40, 8),
        callbacks=[CompressionMonitor(), seen],
        logger=logger,
    )
    return seen.seen[-1]


def test_the_log_has_the_settings_that_a_run_has_chosen(ranks: Any, tmp_path: Path) -> None:
    """And the latest, if it changes them."""
    chosen = []
    for name, run in (("known", [logged_settings]), ("unknown", [train_unknown, logged_settings])):
        folder = tmp_path / name
        chosen.append(ranks(2).run(*run, folder)[0])
        logged = load_hparams_from_yaml(folder / "hparams.yaml")["lightning_dct"]
        assert (logged["local_steps"], logged["density"]) == chosen[-1]
    assert chosen[0] != chosen[1]


def train_unknown(function: Any, *arguments: Any) -> Any:
    with unknown_length():
        return function(*arguments)


def test_a_run_of_unknown_length_sends_less_as_it_goes_on(ranks: Any) -> None:
    """By hand: 4, 8, 16, 24 and 32 steps are expected; 1.2 / density, times the local steps, are
    needed.
    """
    (seen, other) = ranks(2).run(train_unknown, settings_of, 20, {})
    expected = [(1, 0.3)] * 4 + [(2, 0.3)] * 4 + [(1, 0.1)] * 4 + [(1, 0.05)] * 8
    assert seen == other == expected
    assert UserSettings.of({}).for_run(2, 20).local_steps == 1


def train_counting(save: Path | None, load: Path | None) -> Any:
    """Saved between two changes of settings."""
    return train_unknown(fit_half, save, load, DCTStrategy(warmup_steps=3))


class TwoNets(Module):
    """Two optimizers that step ``every`` so many batches each, by hand."""

    automatic_optimization = False

    def __init__(self, first: int = 1, second: int = 1) -> None:
        super().__init__()
        self.every = first, second

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, every in zip(self.optimizers(), self.every, strict=True):
            loss = self.loss(batch)
            self.manual_backward(loss)
            if (batch_idx + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(one.parameters(), 0.01)
            for one in (self.model.first, self.model.second)
        ]


def counted_settings(module: LightningModule, settings: dict[str, Any]) -> list[tuple[int, float]]:
    with patch.object(law, "steps_needed", needed):
        seen = Watch(look=settings_in)
        fit(
            DCTStrategy(),
            module,
            loader(64, 40, 8),
            callbacks=[seen, *settings.pop("callbacks", [])],
            **settings,
        )
        return seen.seen


def chosen_for(steps: float) -> tuple[int, float]:
    with patch.object(law, "steps_needed", needed):
        config = UserSettings.of({}).for_run(2, steps)
        return config.local_steps, config.density


@pytest.mark.parametrize(
    ("steps", "trainer", "makes", "counted_after"),
    [((1, 1), {"max_steps": 64}, 32, 16), ((4, 4), {}, 16, 32), ((1, 2), {}, 32, 16)],
    ids=["two optimizers", "accumulation by hand", "one of them every other time"],
)
def test_steps_by_hand_are_counted(
    ranks: Any, steps: tuple[int, int], trainer: dict[str, Any], makes: int, counted_after: int
) -> None:
    """Oracle: the settings of a run of as many steps as the optimizer makes that makes the fewest;
    64 batches.
    """
    assert chosen_for(makes) != chosen_for(64)
    for seen in ranks(2).run(counted_settings, TwoNets(*steps), trainer):
        assert seen[0] == chosen_for(64 if not trainer else makes)  # at most
        assert set(seen[counted_after:]) == {chosen_for(makes)}


class Skips(Module):
    """Ends each epoch after four batches, as `on_train_batch_start` may."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx >= 4 else None


def test_epochs_that_the_module_ends_early_are_counted(ranks: Any) -> None:
    """Lightning expects 16 epochs of 64 steps, and there are 16 of 4; the first count comes in the
    fourth of them.
    """
    assert chosen_for(64) == chosen_for(70) != chosen_for(16 * 64)
    for seen in ranks(2).run(counted_settings, Skips(), {"max_epochs": 16}):
        assert seen[0] == chosen_for(16 * 64)
        assert len(seen) == 64
        assert set(seen[16:]) == {chosen_for(64)}


def test_an_accumulation_that_changes_is_known(ranks: Any) -> None:
    """64 batches at once, and 64 in eights: 72 steps, and not 128."""
    scheduled = {"max_epochs": 2, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 8})]}
    assert chosen_for(72) != chosen_for(128)
    for seen in ranks(2).run(counted_settings, Module(), scheduled):
        assert set(seen) == {chosen_for(72)}


def settings_of_the_second_fit() -> list[tuple[int, float]]:
    with patch.object(law, "steps_needed", needed):
        module = Module()
        seen = Watch(look=settings_in)
        trainer = trainer_for(DCTStrategy(), callbacks=[seen])
        trainer.fit(module, loader(24, 40, 8))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(24, 40, 8))
        return seen.seen[24:]


def test_a_second_fit_is_as_long_as_what_is_left_of_the_run(ranks: Any) -> None:
    """Of 96 steps 24 are made; after 8 more, which are counted, the same 72 are expected."""
    assert len({chosen_for(steps) for steps in (24, 72, 96)}) == 3
    for seen in ranks(2).run(settings_of_the_second_fit):
        assert seen == [chosen_for(72)] * 72


def search_in_mid_run(folder: Path, searches: bool) -> tuple[list[tuple[int, float]], list[str]]:
    finder = SearchLater(
        num_training_steps=20, max_lr=0.1, early_stop_threshold=None, update_attr=False
    )
    with patch.object(law, "steps_needed", needed):
        watch = Watch(look=settings_in)
        callbacks = [finder] * searches
        settings = {"callbacks": callbacks, "max_epochs": 3, "default_root_dir": folder}
        fit(DCTStrategy(), Module(), loader(24, 40, 8), watch=watch, **settings)
        return watch.seen, watch.hashes


def test_a_search_in_mid_run_has_a_length_of_its_own(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the run without a search, bitwise; that makes 72 steps and the search 20 after 24."""
    assert chosen_for(72) != chosen_for(44)
    runs = ranks(2).run(search_in_mid_run, tmp_path, True)
    assert runs == ranks(2).run(search_in_mid_run, tmp_path, False)
    assert set(runs[0][0]) == {chosen_for(72)}


def lines_at_start(trainer: dict[str, Any]) -> str:
    told: list[str] = []
    with patch.object(run_advice, "rank_zero_info", told.append):
        fit(DCTStrategy(), Module(), loader(2, 40, 8), **trainer)
    return "\n".join(told)


class Stop(Callback):
    def __init__(self, after: int = 1) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.after


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"max_epochs": 900, "callbacks": [Stop(), EarlyStopping("x", strict=False)]},
            " (`EarlyStopping` may end it",
        ),
        (
            {"max_epochs": 900, "max_time": {"hours": 1}, "callbacks": [Stop()]},
            " (`Timer` may end it",
        ),
        ({"max_epochs": None, "callbacks": [Stop()]}, " (max_epochs=1000 is what Lightning takes"),
        # It goes on where steps are counted, of which no share is done.
        ({"max_epochs": -1, "callbacks": [Stop(run_advice.FIRST_COUNTED + 1)]}, ": DCT takes"),
    ],
)
def test_a_run_that_may_end_early_is_of_unknown_length(
    ranks: Any, settings: dict[str, Any], why: str
) -> None:
    told, _ = ranks(2).run(lines_at_start, settings)
    assert f"The length of this run is not known{why}" in told


def two_nets(save: Path | None, load: Path | None) -> Any:
    """64 batches, of which settings are chosen anew after 16, saved after 24."""
    callbacks = [] if save is None else [SaveAndStop(save, 24)]
    with patch.object(law, "steps_needed", needed):
        data = DataLoader(ConcatDataset([Noise(8, 40, 8, rank=rank())] * 8), batch_size=None)
        run = fit(
            DCTStrategy(warmup_steps=3), TwoNets(), data, max_steps=64, callbacks=callbacks,
            ckpt_path=None if load is None else str(load),
        )  # fmt: skip
    assert save is not None or run.state["exchange_clocks"]["counted steps"] == 32
    return run.hashes, without_times(run.state)


def expected_after_a_reset(path: Path, saved_with: dict[str, Any]) -> tuple[float, float, float]:
    """Steps that a run of 64 expects at its start and end, from a checkpoint after 24 without
    clocks of optimizers.
    """
    trainer_for(DCTStrategy(**saved_with), callbacks=[SaveAndStop(path, 24)]).fit(
        Module(), loader(64, 40, 8)
    )
    resumed = DCTStrategy(missing_state="reset")
    seen = Watch(look=lambda trainer: trainer.strategy.updates.run_settings.steps)
    run = fit(
        resumed,
        Module(),
        loader(40, 40, 8),
        ckpt_path=str(path),
        max_steps=64,
        max_epochs=-1,
        watch=seen,
    )
    return run.seen[0], run.seen[-1], run.synchronisations


@pytest.mark.parametrize(
    "density", [0.5, 1.0]
)  # which is refused without a reset, and which has held nothing back
def test_a_run_without_clocks_expects_what_is_left_of_it(
    ranks: Any, tmp_path: Path, density: float
) -> None:
    """By hand: 40 of 64 steps, which the optimizers' clocks count from 0 on; and so when steps are
    counted after 32.
    """
    saved_with = {"compress": "gradients", "density": density}
    assert (
        ranks(2).run(expected_after_a_reset, tmp_path / "x.ckpt", saved_with) == [(40, 40, 64)] * 2
    )
