"""Whoever makes an optimizer's step, it is exchanged once: in the Trainer, in Fabric and in plain
loops.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn, optim

from differences import assert_same
from distributed.resuming import fit_half
from distributed.training import (
    Manual,
    Module,
    Noise,
    Run,
    fit,
    launched,
    loader,
    perceptron,
    rank,
    weights_of,
)
from lightning_dct import DCTStrategy, Updates
from lightning_dct.fabric import DCTStrategy as FabricStrategy
from lightning_dct.sync.optimizer_clock import KnownOptimizers
from sync.optimizers import Lookahead, parameters_of

SETTINGS: dict[str, Any] = {"density": 0.3, "local_steps": 2, "warmup_steps": 0}
# All entries of each step, so that the shared weights are the mean of the ranks' own.
WHOLE: dict[str, Any] = {"density": 1.0, "local_steps": 1, "value_format": "fp32"}
STEPS = 12


class SAM(optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), as users copy it: another optimizer makes
    the step.
    """

    def __init__(self, params: Any, base: Any = optim.SGD, radius: float = 0.05, **settings: Any):
        super().__init__(params, {"radius": radius, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [one.grad for one in parameters_of(self) if one.grad is not None]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        for parameter in parameters_of(self):
            self.state[parameter]["before"] = parameter.detach().clone()
            if parameter.grad is not None:
                parameter.add_(parameter.grad * (self.defaults["radius"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in parameters_of(self):
            parameter.data = self.state[parameter].pop("before")
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups
        self.base.state = self.state


class Raw(Manual):
    """Steps the bare optimizer, as Lightning allows."""

    def stepped(self, batch_idx: int) -> list[Any]:
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        return optimizers if isinstance(optimizers, list) else [optimizers]


class Adversarial(Manual):
    """Two optimizers, of which the second makes two steps."""

    def configure_optimizers(self) -> Any:
        return [
            optim.AdamW(part.parameters(), 0.01) for part in (self.model.first, self.model.second)
        ]

    def stepped(self, batch_idx: int) -> list[Any]:
        one, other = super().stepped(batch_idx)
        return [one, other, other]


class RawAdversarial(Adversarial, Raw):
    """The same with bare optimizers."""


class Inner(Module):
    """Steps what is inside Lightning's wrapper."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class InnerWithClosure(Module):
    """The same with the closure."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.optimizer.step(optimizer_closure)


class Ahead(Inner):
    """Steps by a wrapper that Lightning does not know."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx == 0:
            self.ahead = Lookahead(optimizer.optimizer)
        optimizer_closure()
        self.ahead.step()


class AheadOfLightning(Module):
    """The wrapper is what Lightning knows."""

    def configure_optimizers(self) -> Any:
        return Lookahead(super().configure_optimizers())


MODULES: dict[str, tuple[type[Module], type[Module]]] = {
    "bare": (Raw, Manual),
    "two bare ones": (RawAdversarial, Adversarial),
    "inside Lightning's wrapper": (Inner, Module),
    "with a closure": (InnerWithClosure, Module),
    "by a wrapper": (Ahead, AheadOfLightning),
}


def train(kind: str, expected: bool, settings: dict[str, Any]) -> Run:
    module = MODULES[kind][expected](None, optim.AdamW, lr=0.01)
    return fit(DCTStrategy(**settings), module, STEPS)


@pytest.mark.parametrize("settings", [SETTINGS, {**SETTINGS, "overlap_steps": 1}])
@pytest.mark.parametrize("kind", MODULES)
def test_steps_past_lightning_are_those_that_pass_it(
    ranks: Any, kind: str, settings: dict[str, Any]
) -> None:
    """Oracle: the same training by Lightning's own optimizers, bit for bit and byte for byte."""
    runs = ranks(2).run(train, kind, False, settings)
    for run, expected in zip(runs, ranks(2).run(train, kind, True, settings), strict=True):
        assert run.losses == expected.losses
        assert run.totals.bytes_sent == expected.totals.bytes_sent > 0
        assert run.synchronisations == expected.synchronisations
        assert_same(run.weights, expected.weights)
    assert_same(runs[0].weights, runs[1].weights)


class OwnOptimizer(Module):
    """Keeps an optimizer of one parameter to itself, which steps within a training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            own = optim.SGD([self.model.gain], 0.25)
            self.model.gain.grad = torch.full((), 1.0 + 2.0 * rank())
            own.step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD([*self.model.first.parameters(), *self.model.second.parameters()], 0.1)


def keep_an_optimizer() -> dict[str, Tensor]:
    module = OwnOptimizer()
    fit(DCTStrategy(**WHOLE), module, 6)
    return weights_of(module)


def test_an_optimizer_that_lightning_does_not_know_is_exchanged(ranks: Any) -> None:
    """Oracle: the mean of the ranks' two steps, of 0.25 and 0.75."""
    one, other = ranks(2).run(keep_an_optimizer)
    assert_same(one, other)
    assert float(one["model.gain"]) == pytest.approx(0.5)


class Sharp(Module):
    """Minimises sharpness by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.first_step()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.second_step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}


def sharp_in_the_trainer() -> tuple[int, dict[str, Tensor]]:
    module = Sharp(None, SAM, lr=0.1)
    run = fit(DCTStrategy(**WHOLE), module, STEPS)
    return run.synchronisations, weights_of(module.model)


def minimise(model: nn.Module, optimizer: Any, backward: Any, of_rank: int) -> None:
    for number, (inputs, outputs) in enumerate(Noise(STEPS, 40, 8, rank=of_rank)):

        def closure(inputs: Tensor = inputs, outputs: Tensor = outputs) -> None:
            backward((model(inputs) - outputs).square().mean())

        closure()
        if number % 2:
            optimizer.step(closure)
        else:
            optimizer.first_step()
            closure()
            optimizer.second_step()
        optimizer.zero_grad()


def sharp_in_a_loop() -> tuple[int, dict[str, Tensor]]:
    model = perceptron()
    optimizer = SAM(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, **WHOLE)
    minimise(model, optimizer, Tensor.backward, rank())
    updates.close()
    return updates.traffic.totals.steps, weights_of(model)


def sharp_in_fabric() -> tuple[int, dict[str, Tensor]]:
    strategy = FabricStrategy(**WHOLE)
    fabric = launched(strategy)
    bare = perceptron()
    model, optimizer = fabric.setup(bare, SAM(bare.parameters(), lr=0.1))
    minimise(model, optimizer, fabric.backward, rank())
    with strategy.shared_weights():
        return strategy.traffic.totals.steps, weights_of(bare)


def sharp_in_one_process(ranks: int) -> dict[str, Tensor]:
    """The mean of all ranks' steps, each from the weights that they share."""
    batches = [Noise(STEPS, 40, 8, rank=one) for one in range(ranks)]
    shared = weights_of(perceptron())
    for step in range(STEPS):
        found = []
        for of_rank in batches:
            model = perceptron()
            model.load_state_dict(shared)
            optimizer = SAM(model.parameters(), lr=0.1)
            inputs, outputs = of_rank[step]
            (model(inputs) - outputs).square().mean().backward()
            optimizer.first_step()
            (model(inputs) - outputs).square().mean().backward()
            optimizer.second_step()
            found.append(weights_of(model))
        shared = {name: torch.stack([one[name] for one in found]).mean(0) for name in shared}
    return shared


@pytest.mark.parametrize("train", [sharp_in_the_trainer, sharp_in_a_loop, sharp_in_fabric])
def test_an_optimizer_inside_another_is_exchanged(ranks: Any, train: Any) -> None:
    """Oracle: the mean of the ranks' steps, made in one process."""
    expected = sharp_in_one_process(2)
    results = ranks(2).run(train)
    for steps, weights in results:
        assert steps == STEPS
        assert_same(weights, results[0][1])
        for name, one in expected.items():
            torch.testing.assert_close(weights[name], one, rtol=1e-4, atol=1e-6)


def train_sharp(save: Path | None, load: Path | None) -> Any:
    """To resume in the middle of a round."""
    strategy = DCTStrategy(density=0.1, local_steps=4, warmup_steps=3)
    return fit_half(save, load, strategy, Sharp(None, SAM, lr=0.1, momentum=0.5, dampening=0.5))


def train_bare(save: Path | None, load: Path | None) -> Any:
    strategy = DCTStrategy(density=0.1, local_steps=4, warmup_steps=3)
    return fit_half(save, load, strategy, RawAdversarial())


def step_in_fabric(way: str) -> dict[str, Tensor]:
    strategy = FabricStrategy(**SETTINGS)
    fabric = launched(strategy)
    bare = perceptron()
    optimizer = wrapped = optim.AdamW(bare.parameters(), lr=0.01)
    if way == "never set up":
        model = fabric.setup(bare)
    else:
        model, wrapped = fabric.setup(bare, optimizer)
    for inputs, outputs in loader(STEPS, 40, 8):
        fabric.backward((model(inputs) - outputs).square().mean())
        (wrapped if way == "wrapped" else optimizer).step()
        optimizer.zero_grad()
    with strategy.shared_weights():
        return weights_of(bare)


@pytest.mark.parametrize("way", ["bare", "never set up"])
def test_bare_steps_in_fabric(ranks: Any, way: str) -> None:
    """Oracle: those by Fabric's own optimizer."""
    for found, expected in zip(
        ranks(2).run(step_in_fabric, way), ranks(2).run(step_in_fabric, "wrapped"), strict=True
    ):
        assert_same(found, expected)


class Shrinking(optim.SGD):
    """Goes on after the step of its base, which has hooks of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in parameters_of(self):
            parameter.mul_(0.5)
        return loss


def shrink() -> list[float]:
    """How far this rank's own weights are from the shared ones after each step."""
    optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # torch gives the base's step its hooks
    model = perceptron()
    optimizer = Shrinking(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, **WHOLE)
    found = []
    for inputs, outputs in loader(3, 40, 8):
        (model(inputs) - outputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        own = weights_of(model)
        with updates.shared_weights():
            found.append(
                max(float((own[name] - one).abs().max()) for name, one in weights_of(model).items())
            )
    updates.close()
    return [*found, updates.traffic.totals.steps]


def test_a_step_ends_with_the_outermost_call(ranks: Any) -> None:
    """Oracle: all entries are sent, so that nothing is left of what comes after the base's step."""
    for *left, steps in ranks(2).run(shrink):
        assert left == pytest.approx([0.0] * 3, abs=1e-6)
        assert steps == 3


RATE = 0.125
DECAY = 0.25


def decay_in_fabric(scaler: torch.amp.GradScaler, fused: bool) -> tuple[int, float]:
    """The first step is skipped on rank 1; what is left of most weights after three."""
    strategy = FabricStrategy(local_steps=1, density=0.1, warmup_steps=0)
    devices = int(os.environ["WORLD_SIZE"])
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins)
    fabric.launch()
    bare = perceptron()
    before = bare.first.weight.detach().clone()
    model, optimizer = fabric.setup(
        bare, optim.AdamW(bare.parameters(), RATE, weight_decay=DECAY, fused=fused)
    )
    for step, (inputs, outputs) in enumerate(loader(3, 40, 8)):
        loss = (model(inputs) - outputs).square().mean()
        fabric.backward(loss * float("inf") if (step, rank()) == (0, 1) else loss)
        optimizer.step()
        optimizer.zero_grad()
    with strategy.shared_weights():
        return strategy.traffic.totals.steps, float((bare.first.weight / before).median())


def decay_in_a_loop(scaler: torch.amp.GradScaler, fused: bool) -> tuple[int, float]:
    model = perceptron()
    before = model.first.weight.detach().clone()
    optimizer = optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=fused)
    updates = Updates(model, optimizer, local_steps=1, density=0.1, warmup_steps=0)
    for step, (inputs, outputs) in enumerate(loader(3, 40, 8)):
        loss = (model(inputs) - outputs).square().mean()
        scaler.scale(loss * float("inf") if (step, rank()) == (0, 1) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    updates.close()
    return updates.traffic.totals.steps, float((model.first.weight / before).median())


def decay(loop: bool, fused: bool) -> tuple[int, float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    return (decay_in_a_loop if loop else decay_in_fabric)(scaler, fused)


# In a loop a scaler makes no call for a step that it skips, unless the optimizer is fused.
@pytest.mark.parametrize(("loop", "fused"), [(False, False), (False, True), (True, True)])
def test_a_step_that_a_scaler_skips_counts_and_does_not_decay(
    ranks: Any, loop: bool, fused: bool
) -> None:
    """Oracle: the mean of what the ranks have decayed by; most entries move by nothing else."""
    one = 1 - RATE * DECAY
    for steps, left in ranks(2).run(decay, loop, fused):
        assert steps == 3
        assert left == pytest.approx((one + 1) / 2 * one**2, rel=1e-6)


def step_in_an_evaluation() -> tuple[int, bool]:
    """Steps that a program takes back, as those that adapt a model to what it is tested on."""
    model = perceptron()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, **SETTINGS)
    for inputs, outputs in loader(8, 40, 8):
        (model(inputs) - outputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own = weights_of(model)
    with updates.shared_weights():
        before = weights_of(model)
        model(torch.full((4, 40), 1.0 + rank())).sum().backward()
        optimizer.step()
        model.load_state_dict(before)
    kept = all(torch.equal(one, own[name]) for name, one in weights_of(model).items())
    updates.close()
    return updates.traffic.totals.steps, kept


def test_a_step_in_an_evaluation_is_none_of_the_training(ranks: Any) -> None:
    assert ranks(2).run(step_in_an_evaluation) == [(8, True)] * 2


def test_a_wrapper_and_what_it_wraps_have_one_number() -> None:
    """Also after a state is loaded, which replaces the groups that they share."""
    weights = [nn.Parameter(torch.ones(3))]
    wrapped = optim.SGD(weights, lr=0.1)
    others = [optim.SGD(weights, lr=0.1), Lookahead(wrapped)]
    known = KnownOptimizers(lambda: [wrapped])
    assert [known.number_of(one) for one in others] == [None, 0]
    wrapped.load_state_dict(wrapped.state_dict())
    assert [known.number_of(one) for one in others] == [None, 0]
    known.add(others[0])
    assert [known.number_of(one) for one in (wrapped, *others)] == [0, 1, 0]
