"""AccordionSchedule: what it decides, on real ranks, against the gradients that have reached the
optimizer.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision

from distributed.resuming import fit_half
from distributed.test_loss_scaling import Overflowing
from distributed.training import (
    Applied,
    Module,
    Run,
    Watch,
    assert_replicas_equal,
    fit,
    loader,
    trainer_for,
)
from lightning_dct import AccordionSchedule, DCTPipelineStrategy, DCTStrategy

LOW = 0.05
HIGH = 0.5
THRESHOLD = 0.3


def densities(trainer: Trainer) -> float:
    return trainer.strategy.synchronizer.config.density


def train(interval: int, settings: dict[str, Any]) -> tuple[Run, list[float]]:
    applied = Applied()
    norms = []

    def look(trainer: Trainer) -> tuple[int, float, float]:
        synchronisations = trainer.strategy.synchronizer.synchronisations
        if synchronisations == interval * (len(norms) + 1):
            norms.append(
                sum(float(entries.square().sum()) for entries in applied.sums.values()) ** 0.5
            )
            applied.sums = {}
        return synchronisations, densities(trainer), trainer.strategy.traffic.totals.bytes_sent

    plugins = []
    if "scaled" in settings:
        plugins = [
            MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
        ]
    module = Overflowing(bool(plugins))
    module.optimizer_settings = {"lr": 0.2}
    callbacks = [
        applied,
        AccordionSchedule(LOW, HIGH, settings.get("threshold", THRESHOLD), every_n_steps=interval),
    ]
    strategy = DCTStrategy(
        compress="gradients",
        density=0.7,
        value_format="bf16",
        exchange=settings.get("exchange", "auto"),
    )
    accumulate = settings.get("accumulate", 1)
    run = fit(
        strategy,
        module,
        40 * accumulate,
        watch=Watch(look=look),
        callbacks=callbacks,
        plugins=plugins,
        accumulate_grad_batches=accumulate,
    )
    return run, norms


@pytest.mark.parametrize(
    "settings", [{"accumulate": 2}, {"scaled": True, "exchange": "two_phase", "threshold": 0.2}]
)
def test_switches_by_the_norm_of_the_accumulated_gradients(
    ranks: Any, settings: dict[str, Any]
) -> None:
    """Oracle: algorithm 1 on the sums of the gradients that reached the optimizer."""
    results = ranks(2).run(train, 5, settings)
    assert_replicas_equal([run for run, _ in results])
    for run, norms in results:
        expected = [HIGH, HIGH]
        for previous, norm in pairwise(norms):
            expected.append(
                HIGH
                if abs(previous - norm) / previous >= settings.get("threshold", THRESHOLD)
                else LOW
            )
        assert len(set(expected[2:])) == 2, norms
        sent: dict[float, set[int]] = {}
        before = 0, 0
        for synchronisations, density, num_bytes in run.seen:
            if synchronisations > before[0]:
                assert density == expected[(synchronisations - 1) // 5]
                sent.setdefault(density, set()).add(num_bytes - before[1])
            before = synchronisations, num_bytes
        assert max(sent[LOW]) < min(sent[HIGH]) / 4


class Dropping(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.5)
        return [optimizer], [milestones]


def train_epochs() -> list[float]:
    run = fit(
        DCTStrategy(compress="gradients"),
        Dropping(),
        4,
        max_epochs=7,
        watch=Watch(look=densities),
        callbacks=[AccordionSchedule(0.9, 1.0)],
    )
    return run.seen[::4]


def test_a_drop_of_the_learning_rate_is_critical(ranks: Any) -> None:
    """Oracle: all but equal gradients in every epoch, sent whole; the epochs whose learning rate
    has just halved.
    """
    assert ranks(2).run(train_epochs)[0] == [1.0, 1.0, 0.9, 1.0, 0.9, 1.0, 0.9]


def train_updates(interval: int) -> tuple[list[tuple[int, float]], list[float]]:
    """The density after each batch, and the norm of what the shared weights have moved by in each
    interval.
    """
    norms = []
    before = []

    def look(trainer: Trainer) -> tuple[int, float]:
        strategy: Any = trainer.strategy
        weights = strategy.updates.weights
        now = torch.cat([weights.shared(name).flatten().double() for name in weights.parameters])
        steps = strategy.synchronizer.synchronisations
        if steps % interval == 0:
            norms.append(float((now - before[-1]).norm()))
            before.append(now)
        return steps, densities(trainer)

    def begin(trainer: Trainer, module: Module) -> None:
        before.append(torch.cat([one.detach().flatten().double() for one in module.parameters()]))

    watch = Watch(look=look)
    module = Module(None, torch.optim.SGD, lr=0.2)
    watch.on_train_start = begin  # type: ignore[method-assign]
    schedule = AccordionSchedule(LOW, HIGH, 0.1, every_n_steps=interval)
    run = fit(
        DCTStrategy(local_steps=1, warmup_steps=0), module, 40, watch=watch, callbacks=[schedule]
    )
    return run.seen, norms


def test_with_updates_it_switches_by_what_the_shared_weights_have_moved_by(ranks: Any) -> None:
    """Oracle: algorithm 1 on the weights that all ranks share; alike on both ranks."""
    results = ranks(2).run(train_updates, 5)
    assert results[0] == results[1]
    seen, norms = results[0]
    expected = [HIGH, HIGH]
    for previous, norm in pairwise(norms):
        expected.append(HIGH if abs(previous - norm) / previous >= 0.1 else LOW)
    assert len(set(expected[2:-1])) == 2, norms
    assert all(density == expected[(steps - 1) // 5] for steps, density in seen)


class Constant(Module):
    """The same gradients in every step."""

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def fit_twice(compress: Any) -> list[float]:
    module = Constant(None, torch.optim.SGD, lr=0.01)
    watch = Watch(look=densities)
    callbacks = [watch, AccordionSchedule(0.9, 1.0, THRESHOLD, every_n_steps=5)]
    trainer = trainer_for(DCTStrategy(compress=compress), callbacks=callbacks)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader(14, 40, 8))
    return watch.seen


@pytest.mark.parametrize("compress", ["updates", "gradients"])
def test_a_second_fit_begins_an_interval(ranks: Any, compress: str) -> None:
    """The interval that the first fit has cut short after four of five steps does not count: all
    are alike.
    """
    assert ranks(2).run(fit_twice, compress)[0] == [1.0] * 10 + [0.9] * 18


def train_resumable(save: Path | None, load: Path | None, compress: Any) -> Any:
    """The save lies in the middle of an interval."""
    strategy = DCTStrategy(compress=compress, density=0.1, refresh_every=7)
    schedule = AccordionSchedule(LOW, HIGH, THRESHOLD, every_n_steps=4)
    module = Module(None, torch.optim.SGD, lr=0.2)
    shown, state = fit_half(save, load, strategy, module, look=densities, callbacks=(schedule,))
    assert shown[0 if load else -1 if save else 10][1] == LOW
    assert load or {density for _, density in shown} == {LOW, HIGH}
    return shown, state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.1, 0.01), "`low` must not be above `high`"),
        ((0.0, 0.01), r"`AccordionSchedule\(low\)` is the share of entries"),
        ((0.01, 0.1, 1.0), r"`AccordionSchedule\(threshold\)` must be in \(0, 1\)"),
        ((0.01, 0.1, 0.5, 0), r"`AccordionSchedule\(every_n_steps\)` must be at least 1"),
    ],
)
def test_settings_are_checked(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AccordionSchedule(*arguments)


def test_pipelines_are_refused() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DCTPipelineStrategy(compress="gradients"),
        logger=False,
    )
    with pytest.raises(
        MisconfigurationException, match="`AccordionSchedule` decides by the whole model"
    ):
        AccordionSchedule(0.01, 0.1).setup(trainer, Module(), "fit")
