"""A density that is set in mid-run: sent from the next exchange on, kept by checkpoints, and the
same on all ranks.
"""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.nn.parallel import DistributedDataParallel

from distributed.resuming import SaveAndStop, twice_ten_batches
from distributed.training import (
    Module,
    Run,
    Watch,
    assert_weights_equal,
    fit,
    launched,
    loader,
    message_of,
    perceptron,
    rank,
    trainer_for,
)
from lightning_dct import DCTElasticStrategy, DCTStrategy, Gradients
from lightning_dct.fabric import DCTStrategy as FabricStrategy

SETTINGS: dict[str, dict[str, Any]] = {
    "updates": {"warmup_steps": 0, "local_steps": 1},
    "gradients": {"compress": "gradients", "density": 0.5},
    "by length": {"warmup_steps": 0},
}
LATER = 0.05


class Sets(Callback):
    """Sets a density before some batches."""

    def __init__(self, at: dict[int, Any]) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        density = self.at.get(trainer.fit_loop.total_batch_idx + 1)
        if density is not None:
            trainer.strategy.set_density(density)


def train(
    kind: str, at: dict[int, float], load: Path | None = None, save: Path | None = None
) -> Run:
    strategy = DCTStrategy(**SETTINGS[kind])
    module = Module(None, torch.optim.Adam, lr=0.01)

    def look(trainer: Trainer) -> tuple[float, float, float]:
        totals = trainer.strategy.traffic.totals
        return trainer.strategy.config.density, totals.bytes_sent, totals.entries_sent

    callbacks = [Sets(at), *([] if save is None else [SaveAndStop(save, 10)])]
    path = None if load is None else str(load)
    return fit(
        strategy,
        module,
        twice_ten_batches(),
        ckpt_path=path,
        callbacks=callbacks,
        watch=Watch(look=look),
    )


@pytest.mark.parametrize("kind", SETTINGS)
def test_from_the_next_exchange_on_and_after_a_resume(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    """Oracles: what a run sends that has had that density throughout; the run without a break, to
    the last bit.

    After the resume nobody sets it again, and the length of the run does not choose it, either.
    """
    path = tmp_path / "x.ckpt"
    whole = ranks(2).run(train, kind, {6: LATER})
    begun = ranks(2).run(train, kind, {6: LATER}, None, path)
    resumed = ranks(2).run(train, kind, {}, path)
    always = ranks(2).run(train, kind, {1: LATER})
    for expected, first, run, steady in zip(whole, begun, resumed, always, strict=True):
        assert {density for density, *_ in expected.seen[5:]} == {LATER}
        assert all(density > LATER for density, *_ in expected.seen[:5])
        sent, as_always = (
            [after - before for (_, before, _), (_, after, _) in pairwise(one.seen)]
            for one in (expected, steady)
        )
        assert sent[5:] == as_always[5:]
        entries = [after - before for (*_, before), (*_, after) in pairwise(expected.seen)]
        assert min(entries[:4]) > 2 * entries[5]
        assert first.hashes + run.hashes == expected.hashes
        assert_weights_equal(expected.weights, run.weights)
        assert {density for density, *_ in run.seen} == {LATER}


def differ() -> str:
    densities = {3: 0.1 + 0.1 * rank()}
    return message_of(fit, DCTStrategy(lifelines=False), Module(), 5, callbacks=[Sets(densities)])


def test_ranks_that_differ_are_named(ranks: Any) -> None:
    for said in ranks(2).run(differ):
        assert "`set_density(density)` (rank 0: 0.1, rank 1: 0.2)" in said


@pytest.mark.parametrize(
    ("density", "error"), [(0.0, ValueError), (1.5, ValueError), ("0.1", TypeError)]
)
def test_shares_are_checked(density: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"`set_density\(density\)`"):
        DCTStrategy().set_density(density)


def test_it_belongs_to_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RuntimeError, match=r"call it from `on_train_start` on.*give `density=0.1` to the strategy"
    ):
        DCTStrategy().set_density(0.1)
    monkeypatch.setattr("lightning_dct.elastic.elastic_strategy.import_torchft", lambda: None)
    with pytest.raises(ValueError, match=r"`strategy='dct_elastic'` cannot set density=0.1"):
        DCTElasticStrategy().set_density(0.1)


def fit_twice() -> list[float]:
    strategy = DCTStrategy(density=0.4)
    module = Module()
    sets = Sets({2: LATER})
    watch = Watch(look=lambda trainer: trainer.strategy.config.density)
    trainer = trainer_for(strategy, callbacks=[sets, watch])
    found = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, twice_ten_batches())
        found.append(watch.seen[-1])
    return found


def test_the_next_fit_begins_with_what_was_given(ranks: Any) -> None:
    assert ranks(2).run(fit_twice) == [[LATER, 0.4]] * 2


def with_fabric() -> list[float]:
    strategy = FabricStrategy(local_steps=1, warmup_steps=0)
    fabric = launched(strategy)
    with pytest.raises(RuntimeError, match=r"Call it after `fabric.setup`, or give `density=0.1`"):
        strategy.set_density(0.1)
    model = perceptron()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sent = []
    for step in range(6):
        if step == 3:
            strategy.set_density(LATER)
        before = strategy.traffic.totals.entries_sent
        fabric.backward(model(torch.randn(4, 40)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        sent.append(strategy.traffic.totals.entries_sent - before)
    return sent


def go_back(path: Path, settings: dict[str, Any]) -> tuple[float, bool]:
    """Save at a step, set a density later, load, and go on: the density then, and whether the
    weights are the same.
    """
    strategy = FabricStrategy(refresh_every=10, **settings)
    fabric = launched(strategy)
    model = perceptron()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = list(loader(24, 40, 8))

    def steps(first: int, last: int) -> dict[str, Any]:
        for inputs, outputs in batches[first:last]:
            fabric.backward((model(inputs) - outputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {name: weights.detach().clone() for name, weights in model.named_parameters()}

    steps(0, 5)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    expected = steps(5, 24)
    strategy.set_density(LATER)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    weights = steps(5, 24)
    return strategy.synchronizers[0].config.density, all(
        torch.equal(weights[name], expected[name]) for name in weights
    )


BEFORE: list[dict[str, Any]] = [
    {"local_steps": 8, "density": 0.3, "warmup_steps": 0},
    {"density": 0.3, "warmup_steps": 0},
    {"compress": "gradients", "density": 0.3},
]


@pytest.mark.parametrize("settings", BEFORE)
def test_a_checkpoint_from_before_brings_its_density_back(
    ranks: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """At step 24 a refresh of thresholds is requested for an exchange that the loaded state does
    not make.
    """
    assert ranks(2).run(go_back, tmp_path / "x.ckpt", settings) == [(0.3, True)] * 2


def go_back_with_gradients() -> list[float]:
    """The density of a plain loop: after one was set, and after states of before and of after that
    are loaded.
    """
    wrapped = DistributedDataParallel(perceptron())
    gradients = Gradients(wrapped, density=0.3)
    found = []
    wrapped(torch.randn(4, 40)).square().mean().backward()
    before = copy.deepcopy(gradients.state_dict())
    gradients.synchronizer.set_density(LATER)
    after = copy.deepcopy(gradients.state_dict())
    for state in (before, after, before):
        found.append(gradients.synchronizer.config.density)
        gradients.load_state_dict(state)
    return [*found, gradients.synchronizer.config.density]


def test_a_state_from_before_brings_the_density_of_gradients_back(ranks: Any) -> None:
    assert ranks(2).run(go_back_with_gradients) == [[LATER, 0.3, LATER, 0.3]] * 2


def test_fabric(ranks: Any) -> None:
    for sent in ranks(2).run(with_fabric):
        assert min(sent[:3]) > 1.5 * max(sent[3:])
