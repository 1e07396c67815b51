"""How far an exchange moves weights: as far as DistributedDataParallel, whatever the optimizer; on
real ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer

from distributed.training import (
    Module,
    Run,
    assert_replicas_equal,
    fit,
    message_of,
    rank,
    trainer_for,
)
from lightning_dct import DCTStrategy
from sync.optimizers import Averages, Lookahead, MastersInState, Sign

CURVED = 64
FLAT = 10_000


class Valley(LightningModule):
    """Some entries on a parabola, with the same gradient on all ranks, beside many with nothing but
    noise.
    """

    def __init__(
        self,
        optimizer: Callable[..., optim.Optimizer],
        curvature: float = 1.0,
        together: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.curvature = curvature
        self.together = together
        self.curved = nn.Parameter(torch.ones(CURVED))
        self.flat = nn.Parameter(torch.ones(FLAT))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        numbers = torch.Generator().manual_seed(1000 * rank() + batch_idx)
        noise = torch.randn(FLAT, generator=numbers)
        if self.together:  # in one tensor: the first entries have no gradient
            noise[:CURVED] = 0.0
        return self.curvature / 2 * self.curved.square().sum() + (noise * self.flat).sum()

    def configure_optimizers(self) -> optim.Optimizer:
        return self.optimizer(self.parameters())


def train(strategy: str | dict[str, Any], module: Callable[[], LightningModule], steps: int) -> Run:
    chosen = DDPStrategy() if strategy == "ddp" else DCTStrategy(**strategy)  # type: ignore[arg-type]
    return fit(chosen, module(), torch.utils.data.DataLoader(torch.zeros(steps), batch_size=None))


def test_sgd_converges_where_ddp_does(ranks: Any) -> None:
    """Oracle: DDP ends at zero. A mean that is a little longer does not: the curvature is 1."""
    module = partial(Valley, partial(optim.SGD, lr=1.7))
    theirs = ranks(2).run(train, "ddp", module, 150)
    assert theirs[0].weights["curved"].abs().max() < 1e-6
    for settings in (
        {"local_steps": 1},
        {"local_steps": 1, "exchange": "two_phase"},
        {"local_steps": 4},
    ):
        ours = ranks(2).run(train, {"warmup_steps": 0, **settings}, module, 150)
        assert ours[0].weights["curved"].abs().max() < 1e-3, settings
        assert_replicas_equal(ours)


@pytest.mark.parametrize(
    ("settings", "together"),
    [({"local_steps": 1, "density": 0.3}, True), ({"local_steps": 4, "density": 0.1}, False)],
)
def test_weights_without_gradients_decay_as_fast_as_under_ddp(
    ranks: Any, settings: dict[str, Any], together: bool
) -> None:
    """Oracle: by hand, (1 - lr * weight_decay) for each step; in a tensor of their own, and in one
    with noise.
    """
    module = partial(
        Valley, partial(optim.AdamW, lr=0.001, weight_decay=0.3), curvature=0.0, together=together
    )
    runs = ranks(2).run(train, settings, module, 100)
    still = runs[0].weights["flat"][:CURVED] if together else runs[0].weights["curved"]
    expected = (1 - 0.001 * 0.3) ** 100
    assert torch.allclose(1 - still, torch.full_like(still, 1 - expected), rtol=0.01)
    assert_replicas_equal(runs)


def stepped_by_one_rank() -> Run:
    """A layer that only the first rank uses."""

    class Used(Valley):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if rank() == 0 else loss - self.curvature / 2 * self.curved.square().sum()

        def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
            if rank():
                self.curved.grad = None

    return train(
        {"local_steps": 1}, lambda: Used(partial(optim.AdamW, lr=0.001, weight_decay=0.3), 1e-9), 64
    )


def test_what_a_rank_steps_without_a_gradient_does_not_decay_by_itself(ranks: Any) -> None:
    """Oracle: shared weights stay equal, and every rank knows the same parameter."""
    runs = ranks(2).run(stepped_by_one_rank)
    assert_replicas_equal(runs)
    assert [run.state["exchange_clocks"].get("undecayed in 0 curved") for run in runs] == [1, 1]
    assert all("undecayed in 0 flat" not in run.state["exchange_clocks"] for run in runs)


def test_what_all_ranks_move_alike_goes_no_further(ranks: Any) -> None:
    """Oracle: one step of a sign times its learning rate, in a tensor beside noise, which alone is
    lengthened.
    """
    module = partial(Valley, partial(Sign, lr=0.001))
    # Entries that wait lose little of what they have moved.
    runs = ranks(2).run(
        train, {"local_steps": 1, "density": 0.5, "residual_decay": 0.95}, module, 60
    )
    assert torch.allclose(1 - runs[0].weights["curved"], torch.tensor(0.06), rtol=0.05)


def lookahead(params: Any) -> optim.Optimizer:
    return Lookahead(Sign(params, lr=0.001))


def test_lookahead_pulls_back_as_far(ranks: Any) -> None:
    """Oracle: what DDP makes of the same optimizer, of weights that all ranks move alike."""
    module = partial(Valley, lookahead)
    theirs = ranks(2).run(train, "ddp", module, 50)
    ours = ranks(2).run(train, {"local_steps": 1}, module, 50)
    assert torch.allclose(ours[0].weights["curved"], theirs[0].weights["curved"], atol=0.01)


def refused(make: Callable[..., optim.Optimizer]) -> str:
    return message_of(fit, DCTStrategy(), Module(None, make), 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(MastersInState, lr=0.01), "steps copies of the weights"),
        (partial(Averages, lr=0.01), "calls the collective `allreduce_`"),
        (partial(optim.LBFGS, lr=0.01), "`LBFGS` compares"),
        (
            partial(ZeroRedundancyOptimizer, optimizer_class=optim.SGD, lr=0.1),
            "`ZeroRedundancyOptimizer` needs",
        ),
    ],
)
def test_optimizers_that_undo_exchanges_are_refused(ranks: Any, make: Any, words: str) -> None:
    assert all(words in message for message in ranks(2).run(refused, make))


def refused_in_mid_run(make: Callable[..., optim.Optimizer]) -> str:
    def swap(trainer: Any, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.strategy.optimizers = [make(module.parameters())]

    return message_of(
        fit, DCTStrategy(), Module(), 8, callbacks=[LambdaCallback(on_train_batch_start=swap)]
    )


@pytest.mark.parametrize("make", [partial(optim.LBFGS, lr=0.01), partial(MastersInState, lr=0.01)])
def test_an_optimizer_that_comes_later_is_judged_too(ranks: Any, make: Any) -> None:
    assert all(
        "Use `compress='gradients" in message for message in ranks(2).run(refused_in_mid_run, make)
    )


def at_least_zero(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(min=0.0)


class Roots(Valley):
    """Takes roots of weights, which are drawn below zero."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.curved.sqrt().sum() * 0.1

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("roots", self.flat.sqrt().mean() + self.curved.sqrt().mean())


def lowest_weights(compress: str, project: Any) -> tuple[float, bool]:
    """The lowest weight that training and validation have seen, and whether all numbers are
    finite.
    """
    lowest = [0.0]
    settings = {"compress": compress, "density": 0.1, "project": project}

    def look(trainer: Any, module: LightningModule, *_: Any) -> None:
        lowest.extend(float(weights.detach().min()) for weights in module.parameters())

    if compress == "updates":
        settings["local_steps"] = 2
    strategy = DCTStrategy(**settings)
    module = Roots(partial(optim.SGD, lr=0.05))
    with torch.no_grad():
        module.flat.fill_(0.1)
    batches = torch.utils.data.DataLoader(torch.zeros(40), batch_size=None)
    looking = LambdaCallback(on_before_zero_grad=look, on_validation_epoch_end=look)
    trainer = trainer_for(strategy, callbacks=[looking], val_check_interval=5, limit_val_batches=1)
    trainer.fit(module, batches, batches)
    finite = bool(trainer.callback_metrics["roots"].isfinite())
    return min(lowest), finite and all(
        bool(weights.isfinite().all()) for weights in module.parameters()
    )


@pytest.mark.parametrize("compress", ["updates", "gradients"])
def test_projected_weights_stay_within_bounds(ranks: Any, compress: str) -> None:
    """Oracle: a root of a negative weight is NaN, and without the projection there are some."""
    assert ranks(2).run(lowest_weights, compress, at_least_zero) == [(0.0, True)] * 2
    assert any(not finite for _, finite in ranks(2).run(lowest_weights, compress, None))
