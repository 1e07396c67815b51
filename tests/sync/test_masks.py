"""Masks that each rank makes from its own gradients are told soon after the first steps, and what
to do instead.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from distributed.training import Module, loader, perceptron, rank, trainer_for, warnings_of
from lightning_dct import DCTStrategy, Updates

STEPS = 40
SETTINGS: dict[str, Any] = {"density": 0.3, "local_steps": 1}


def by_size(gradient: Tensor) -> Tensor:
    """True for the larger half."""
    return gradient.abs() > gradient.abs().median()


class DynamicSparsity(Callback):
    """After each batch, keeps the weights with the largest gradients of the first one (as RigL
    does).
    """

    def __init__(self, is_alike: bool) -> None:
        self.is_alike = is_alike
        self.mask = None

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        weight: Any = module.model.second.weight
        if self.mask is None:
            gradient = (
                trainer.strategy.reduce(weight.grad.clone()) if self.is_alike else weight.grad
            )
            self.mask = by_size(gradient)
        weight.data.mul_(self.mask)


class Ticket(Module):
    """Multiplies weights by a mask that it keeps as an attribute."""

    def __init__(self, is_alike: bool) -> None:
        super().__init__(perceptron(), torch.optim.SGD, lr=0.05)
        self.is_alike = is_alike
        self.model.second.register_forward_pre_hook(lambda second, _: self.apply_mask(second))
        self.mask: Tensor | None = None

    def apply_mask(self, second: nn.Module) -> None:
        if self.mask is not None:
            second.weight.data.mul_(self.mask)

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.mask is None:
            gradient = self.model.second.weight.grad
            self.mask = by_size(
                self.trainer.strategy.reduce(gradient.clone()) if self.is_alike else gradient
            ).float()


def train(case: str, is_alike: bool) -> tuple[int, list[str]]:
    """Train with a mask; the steps made, and what was said of it."""
    module: Any = Module(perceptron(), torch.optim.SGD, lr=0.05)
    callbacks: list[Callback] = []
    if case == "written into the shared weights":
        callbacks = [DynamicSparsity(is_alike)]
    else:
        module = Ticket(is_alike)
    trainer = trainer_for(DCTStrategy(**SETTINGS), callbacks=callbacks, limit_val_batches=0)
    said = []

    def fit() -> None:
        try:
            trainer.fit(module, loader(STEPS, 40, 8))
        except RuntimeError as error:
            said.append(str(error))

    said += [
        one for one in warnings_of(fit) if "rank" in one and ("mask" in one or "stay zero" in one)
    ]
    return trainer.global_step, said


@pytest.mark.parametrize("case", ["written into the shared weights", "an attribute"])
def test_a_mask_of_a_ranks_own_gradients_is_told_soon(ranks: Any, case: str) -> None:
    """Oracle: what is said after which step, and that the code that does as advised is told
    nothing.
    """
    found = ranks(2).run(train, case, False)
    for steps, said in found:
        if case == "an attribute":
            continue
        assert steps <= 10
        assert "The shared weights of 'model.second.weight' on ranks 0 and 1 differ" in said[0]
        assert "a mask made from its own gradients" in said[0]
        assert "by the mean gradient, `strategy.reduce(parameter.grad.clone())`" in said[0]
    if case == "an attribute":
        assert found[0][1][0].startswith("The mask 'mask' is another one on rank 0 than on rank 1")
        assert "`strategy.reduce(parameter.grad.clone())`" in found[0][1][0]
    assert ranks(2).run(train, case, True) == [(STEPS, [])] * 2


def mask_in_a_loop(way: str, clamps: bool) -> list[tuple[int, str]]:
    """Mask weights after each step of a plain loop, or gradients before it; the warnings, with the
    step before which each was given.
    """
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    project = (
        (lambda module: [one.data.clamp_(min=0.0) for one in module.parameters()])
        if clamps
        else None
    )
    updates = Updates(model, optimizer, project=project, **SETTINGS)
    kept = torch.arange(model.second.weight.numel()).view_as(model.second.weight) % 3 != (
        rank() if way in ("own", "of gradients") else 0
    )
    if way == "of gradients":
        model.second.weight.kept = kept  # type: ignore[attr-defined]
    said: list[tuple[int, str]] = []
    for step in range(STEPS):
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(2 * step + rank()))

        def work(inputs: Tensor = inputs) -> None:
            model(inputs).square().mean().backward()
            if way == "of gradients":
                model.second.weight.grad *= kept
            optimizer.step()
            optimizer.zero_grad()
            if way in ("own", "alike"):
                model.second.weight.data.mul_(kept)

        said += [(step, one) for one in warnings_of(work) if "rank 0" in one]
    updates.close()
    return said


def test_weights_that_stay_zero_on_one_rank_are_told(ranks: Any) -> None:
    """Oracle: the parameter, within 10 steps; nothing where all ranks have one mask, none, or
    bounds.
    """
    found = ranks(2).run(mask_in_a_loop, "own", False)
    step, said = found[0][0]
    assert step <= 10
    assert said.startswith("Other entries of 'second.weight' stay zero on rank 0 than on rank 1")
    assert "For bounds of weights, use `project=`." in said
    ((step, said), *_) = ranks(2).run(mask_in_a_loop, "of gradients", False)[0]
    assert step <= 10
    assert said.startswith("The mask 'second.weight.kept' is another one on rank 0 than on rank 1")
    for way, clamps in (("alike", False), ("none", False), ("none", True)):
        assert ranks(2).run(mask_in_a_loop, way, clamps) == [[], []]
