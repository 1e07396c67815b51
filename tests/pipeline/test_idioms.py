"""Ordinary Lightning code under a pipeline: samplers, batch norm, dropout, half precision, a second
fit.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from distributed.harness import RankFailure
from distributed.resuming import SaveAndStop
from distributed.training import Watch, trainer_for
from distributed.training import rank as rank_of_process
from lightning_dct import SplitPoint, SplitSequential
from pipeline.split_models import (
    MICRO_BATCHES,
    SplitModule,
    batches,
    strategy_for,
    train,
    train_alone,
    worst,
)


def rows() -> DataLoader:
    """Sixteen rows, numbered in their first column, shuffled."""
    inputs = torch.zeros(16, 40)
    inputs[:, 0] = torch.arange(16)
    return DataLoader(TensorDataset(inputs, torch.zeros(16, 8)), batch_size=4, shuffle=True)


class Reads(SplitModule):
    """Notes which rows it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read += batch[0][:, 0].int().tolist()


def read_rows() -> list[int]:
    module = Reads()
    trainer_for(strategy_for(2), use_distributed_sampler=True).fit(module, rows())
    return module.read


def test_lightnings_sampler_gives_a_pipeline_one_share(ranks: Any) -> None:
    """Oracle: all rows once over the pipelines, and the same ones on both ranks of each."""
    told = ranks(4).run(read_rows)
    assert all(len(read) == 8 for read in told)
    assert told[0] == told[1] != told[2] == told[3]
    assert sorted(row for read in told[::2] for row in read) == list(range(16))


class Drawing(SplitModule):
    """Changes its batch in place and adds noise, before it calls the network."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, ...]] = []

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        inputs += 1.0
        noise = torch.randn_like(inputs)
        self.drawn.append(
            (float(inputs.sum()), float(noise.sum()), random.random(), float(np.random.rand()))
        )
        return (self.network(inputs + noise) - targets).square().mean()


def draw() -> tuple[list[tuple[float, ...]], list[float]]:
    module = Drawing()
    losses = Watch()
    torch.manual_seed(rank_of_process() // 2)
    trainer = trainer_for(strategy_for(2), callbacks=[losses], max_epochs=2, limit_val_batches=1)
    trainer.fit(module, batches(3, 2), batches(1, 2))
    return module.drawn, [float(torch.rand(())), random.random()]


def test_a_step_draws_the_same_wherever_it_runs(ranks: Any) -> None:
    """Oracle: what the first stage sees and draws, twice on the last: for the network's input, and
    for the loss.
    """
    told = ranks(4).run(draw)
    for (first, after_first), (last, after_last) in (told[:2], told[2:]):
        assert sorted(first * 2) == sorted(last)
        assert len(set(first)) == len(first) >= 2 * 3 * 2
        assert after_first == after_last  # other random numbers are as without
    assert set(told[0][0]).isdisjoint(told[2][0])


class Drop(nn.Module):
    """Dropout that notes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[float]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        kept = functional.dropout(torch.ones_like(inputs), training=self.training)
        if self.training and type(inputs) is Tensor:  # not where shapes are found
            self.masks.append(kept.flatten().tolist())
        return inputs * kept


class Drops(Reads):
    """Draws twice as often in the first stage as in the second."""

    def __init__(self) -> None:
        super().__init__()
        first, tanh, split, last = self.network
        self.drops = Drop(), Drop(), Drop()
        self.network = SplitSequential(first, *self.drops[:2], tanh, split, self.drops[2], last)


class DrawsOnOneRank(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            torch.rand(())


def drop(draws_on_one_rank: bool) -> tuple[list[int], list[list[list[float]]]]:
    torch.manual_seed(0)
    module = Drops()
    callbacks = [DrawsOnOneRank()] if draws_on_one_rank else []
    trainer = trainer_for(
        strategy_for(2), callbacks=callbacks, use_distributed_sampler=False, max_epochs=3
    )
    trainer.fit(module, rows())
    return module.read, [one.masks for one in module.drops if one.masks]


def test_stages_drop_other_entries_and_go_on_with_the_same_batches(ranks: Any) -> None:
    """Oracle: all rows in each epoch, in another order; two masks agree in half of their
    entries.
    """
    (read, first), (others_read, second) = ranks(2).run(drop, False)
    epochs = {tuple(read[start : start + 16]) for start in (0, 16, 32)}
    assert read == others_read
    assert len(epochs) == 3
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    masks = torch.tensor(first + second)
    assert masks.shape[:2] == (3, 3 * 4 * MICRO_BATCHES)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < (masks[one] == masks[other]).float().mean() < 0.6
    assert 0.4 < (masks[0, 1:] == masks[0, :-1]).float().mean() < 0.6


def test_ranks_that_come_to_read_different_batches_are_refused(ranks: Any) -> None:
    with pytest.raises(
        RankFailure,
        match=r"read different batches for `training_step`.*draw no random numbers on some",
    ):
        ranks(2).run(drop, True)


class Various(SplitModule):
    """Batch norm, dropout, a parameter that is never used, frozen ones, a nested batch, and a
    network in a wrapper.
    """

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(24, 8)
        last.unused = nn.Parameter(torch.ones(3))
        first = nn.Linear(40, 24)
        first.bias.requires_grad_(False)
        self.network = Wrapper(
            nn.Sequential(
                Add(first),
                nn.BatchNorm1d(24),
                nn.Dropout(0.1),
                SplitPoint(density=0.5),
                nn.BatchNorm1d(24),
                last,
            )
        )

    def loss(self, batch: Any) -> Tensor:
        return (
            (self.network({"parts": [batch[0], batch[0]], "scale": 0.5}) - batch[1]).square().mean()
        )


class Wrapper(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Any) -> Tensor:
        return self.layers(inputs) * 1.0


class Add(nn.Module):
    """The first module of a network may take any nesting of tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        return self.layer(sum(inputs["parts"]) * inputs["scale"])


def fit_various() -> tuple[list[float], dict[str, Any], float]:
    torch.manual_seed(5)
    module = Various()
    watch = Watch()
    trainer = trainer_for(strategy_for(2, density=0.5), callbacks=[watch], max_epochs=4)
    trainer.fit(module, batches(8, 2), batches(2, 2, 7, 50))
    return watch.losses, module.state_dict(), float(trainer.callback_metrics["val/mean"])


def test_a_network_of_many_kinds_of_modules_learns(ranks: Any) -> None:
    """Oracle: a falling loss, buffers of batch norm that have counted every micro-batch, and equal
    replicas.
    """
    told = ranks(4).run(fit_various)
    for losses, state, validated in told:
        assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
        assert int(state["network.layers.1.num_batches_tracked"]) == 4 * 8 * 4
        assert int(state["network.layers.4.num_batches_tracked"]) == 4 * 8 * 4
        assert validated == told[0][2]
        for name, value in state.items():
            if isinstance(value, Tensor) and not name.startswith("network.layers.3."):
                assert torch.equal(value, told[0][1][name]), name
        assert torch.equal(state["network.layers.5.unused"], torch.ones(3))


class Unfreezes(Callback):
    """Has the biases of all stages trained from the fourth batch on."""

    def on_train_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3:
            module.network.requires_grad_(True)


def train_unfreezing(settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Any]:
    module = SplitModule()
    watch = Watch()
    module.example_input_array = torch.zeros(1, 40)
    for name, parameter in module.network.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    trainer = trainer_for(
        strategy_for(2, **settings), callbacks=[Unfreezes(), watch], enable_model_summary=True
    )
    trainer.fit(module, batches(6, 2))
    return watch.losses, dict(module.network.named_parameters()), module.example_input_array


@pytest.mark.parametrize("compress", ["updates", "gradients"])
def test_parameters_may_be_unfrozen(ranks: Any, compress: str) -> None:
    """Oracle: biases that move, and the same losses for both ways of exchange; an example input
    does no harm.
    """
    told = ranks(2).run(train_unfreezing, {"compress": compress})
    before = dict(SplitModule().network.named_parameters())
    for losses, weights, example in told:
        assert losses == told[0][0]
        assert example.shape == (1, 40)
        for name, weight in weights.items():
            assert not torch.equal(weight, before[name]), name


def fit_twice() -> tuple[list[float], dict[str, Tensor]]:
    """Three batches, then three more with the same module, strategy and trainer."""
    module = SplitModule()
    watch = Watch()
    strategy = strategy_for(2)
    trainer = trainer_for(strategy, callbacks=[watch])
    trainer.fit(module, batches(3, 2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(3, 2))
    return watch.losses, dict(module.named_parameters())


def test_a_second_fit_goes_on(ranks: Any) -> None:
    """Oracle: plain SGD over the same three batches twice, which has no state but the weights."""
    (losses, weights), (other, _) = ranks(2).run(fit_twice)
    first, _ = train_alone(2, count=3)
    assert losses == other
    assert losses[:3] == pytest.approx(first[0], abs=1e-6)
    assert len(losses) == 6
    assert sum(losses[3:]) < sum(losses[:3])
    assert not any(weight.is_meta for weight in weights.values())


VARIANTS: dict[str, dict[str, Any]] = {
    "copied gradients": {
        "strategy": {"density": 1.0, "gradient_as_bucket_view": False, "bucket_cap_mb": 0.001},
        "accumulate_grad_batches": 2,
    },
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


def train_variants() -> dict[str, Any]:
    return {
        name: train(2, "1f1b", 2, {"density": 0.3}, count=4, **settings)
        for name, settings in VARIANTS.items()
    }


def test_variants_of_ddp_and_precision(ranks: Any) -> None:
    """Oracle: one process that accumulates two batches; half precision within its rounding."""
    told = ranks(4).run(train_variants)
    losses, weights = train_alone(2, {"density": 0.3}, width=2, count=4, accumulate=2)
    for rank, runs in enumerate(told):
        # Lightning hands callbacks the loss as it is accumulated.
        assert [2 * loss for loss in runs["copied gradients"].losses] == pytest.approx(
            losses[rank // 2], abs=1e-6
        )
        assert worst(runs["copied gradients"].weights, weights) < 1e-6
    plain, _ = train_alone(2, {"density": 0.3}, width=2, count=4)
    for rank, runs in enumerate(told):
        assert runs["bf16-true"].losses == pytest.approx(plain[rank // 2], rel=0.1)
        assert runs["bf16-true"].weights["network.0.weight"].dtype == torch.bfloat16
        mixed = runs["bf16-mixed"]
        assert mixed.losses == pytest.approx(plain[rank // 2], rel=0.05)
        assert mixed.losses != pytest.approx(plain[rank // 2], rel=1e-5)
        assert mixed.weights["network.0.weight"].dtype == torch.float32


def train_with_adagrad(path: Path) -> tuple[list[float], list[int]]:
    """Adagrad makes the state of all parameters in advance."""
    settings = {"optimizer": torch.optim.Adagrad, "optimizer_settings": {"lr": 0.05}}
    module = SplitModule(2, None, torch.optim.Adagrad, lr=0.05)
    watch = Watch()
    trainer = trainer_for(strategy_for(2), callbacks=[watch])
    trainer.fit(module, batches(6, 2))
    losses, _ = train_alone(2, **settings)
    assert watch.losses == pytest.approx(losses[0], abs=1e-6)
    return watch.losses, sorted(len(state) for state in trainer.optimizers[0].state.values())


def test_optimizers_that_make_state_in_advance(ranks: Any, tmp_path: Path) -> None:
    """Oracle: one process with Adagrad; state of the two parameters on each rank."""
    (losses, states), (other, others) = ranks(2).run(train_with_adagrad, tmp_path)
    assert losses == other
    assert states == others == [2, 2]


class Tied(SplitModule):
    """Two modules of its last piece share a weight."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.network = nn.Sequential(
            *self.network[:3], nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), self.network[3]
        )
        self.network[5].weight = self.network[3].weight


def train_tied() -> list[float]:
    torch.manual_seed(6)
    return train(2, "1f1b", 2, make=Tied).losses


def test_modules_of_one_piece_may_share_weights(ranks: Any) -> None:
    """Oracle: one process."""
    told = ranks(2).run(train_tied)
    torch.manual_seed(6)
    losses, _ = train_alone(2, make=Tied)
    assert told[0] == told[1] == pytest.approx(losses[0], abs=1e-6)


class Named(SplitModule):
    """Its layers are attributes, too, and a buffer outside the network counts micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(self.network)
        del self.network
        self.first = layers[0]
        self.last = layers[3]
        self.network = SplitSequential(*layers)
        self.register_buffer("seen", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen += 1
        return loss


def train_named(path: Path) -> tuple[list[float], dict[str, Any]]:
    module = Named()
    watch = Watch()
    trainer_for(strategy_for(2), callbacks=[watch, SaveAndStop(path, 3, stop=False)]).fit(
        module, batches(4, 2)
    )
    return watch.losses, module.state_dict()


def test_layers_may_be_attributes_and_the_module_have_buffers(ranks: Any, tmp_path: Path) -> None:
    """Oracle: one process, whose checkpoint has a layer under both names, and counts every
    micro-batch.
    """
    told = ranks(2).run(train_named, tmp_path / "named.ckpt")
    losses, _ = train_alone(2, count=4)
    saved = torch.load(tmp_path / "named.ckpt", weights_only=True)["state_dict"]
    for (seen, state), batches_seen in ((told[0], 4), (told[1], 4), ((told[0][0], saved), 3)):
        assert seen == pytest.approx(losses[0], abs=1e-6)
        assert int(state["seen"]) == batches_seen * MICRO_BATCHES
        for one, other in (("first", "network.0"), ("last", "network.3")):
            assert torch.equal(state[f"{one}.weight"], state[f"{other}.weight"])
            assert not state[f"{one}.weight"].is_meta


class Compiled(SplitModule):
    """Its pieces are compiled, as torch.compile(backend="eager") does without a compiler at
    hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network[0] = torch.compile(self.network[0], backend="eager")


def train_compiled() -> list[float]:
    watch = Watch()
    trainer_for(strategy_for(2), callbacks=[watch]).fit(Compiled(), batches(6, 2))
    return watch.losses


def test_modules_in_pieces_may_be_compiled(ranks: Any) -> None:
    """Oracle: the same without compilation."""
    losses, _ = train_alone(2)
    for told in ranks(2).run(train_compiled):
        assert told == pytest.approx(losses[0], abs=1e-6)
