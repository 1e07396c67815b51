"""Buffers are as under DDP, but running statistics are averaged, and what all ranks have alike is
not sent.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from differences import assert_same
from distributed.resuming import fit_half
from distributed.training import Module, Noise, Run, fit, loader, perceptron, rank, trainer_for
from lightning_dct import DCTStrategy
from lightning_dct.callbacks.compression_monitor import summary_rows
from lightning_dct.sync.buffers import PresentBuffers

SETTINGS: dict[str, Any] = {"density": 0.3, "local_steps": 1}


class Counting(nn.Module):
    """Buffers of all kinds, which each rank's forward changes in its own way, beside some that
    stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(perceptron(out_features=8), nn.BatchNorm1d(8))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("of_first", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("of_last", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(7, dtype=torch.bool), persistent=False)
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(inputs.mean().expand(3), 0.1)
            self.seen += 1 + rank()
            self.flags[rank()] = True
            self.waves += complex(rank(), 1)
            (self.of_first if rank() == 0 else self.of_last).add_(0.25)
        return self.layers(inputs)


def train_counting(name: str, batches: int) -> tuple[dict[str, Tensor], Any]:
    strategy = DDPStrategy() if name == "ddp" else DCTStrategy(**SETTINGS)
    run = fit(strategy, Module(Counting(), torch.optim.SGD, lr=0.0), batches)
    buffers = {key: one for key, one in run.weights.items() if "layers" not in key}
    return buffers, run


def test_buffers_are_those_of_the_first_rank(ranks: Any) -> None:
    """Oracle: DDP, which gives all ranks those of the first before each forward; after the last
    each has its own.
    """
    expected, _ = ranks(2).run(train_counting, "ddp", 12)
    for found, _ in ranks(2).run(train_counting, "dct", 12):
        assert_same(found, expected[0])


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs.unsqueeze(1)).squeeze(1)


def normalised() -> nn.Module:
    return nn.Sequential(perceptron(out_features=8), nn.BatchNorm1d(8), Instances())


def exchange_statistics() -> dict[str, Tensor]:
    strategy = DCTStrategy(density=0.3, local_steps=5, warmup_steps=0)
    return fit(strategy, Module(normalised(), torch.optim.SGD, lr=0.0), 10).weights


def test_running_statistics_are_averaged(ranks: Any) -> None:
    """Oracle: models in one process whose statistics are averaged after five forwards and after
    ten.
    """
    models = [normalised() for _ in range(2)]
    for some in (range(5), range(5, 10)):
        for place, model in enumerate(models):
            for batch in some:
                model(Noise(10, 40, 8, rank=place)[batch][0])
        states = [model.state_dict() for model in models]
        mean = {
            name: torch.stack([state[name].double() for state in states]).mean(0)
            for name in states[0]
        }
        for model in models:
            model.load_state_dict(mean)
    for found in ranks(2).run(exchange_statistics):
        expected = {f"model.{name}": one.to(found[f"model.{name}"]) for name, one in mean.items()}
        torch.testing.assert_close(found, expected)


class Tables(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 640), nn.Linear(640, 600), nn.Linear(600, 8))
        for number in range(tables):
            self.register_buffer(f"mask{number}", torch.ones(512, 512).tril() * (number + 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def train_with_tables(tables: int) -> Run:
    return fit(
        DCTStrategy(density=0.1, local_steps=1),
        Module(Tables(tables), torch.optim.AdamW, lr=1e-3),
        6,
    )


def test_constant_tables_cost_nothing(ranks: Any) -> None:
    """Oracle: the ratio without them."""
    plain, with_tables = (ranks(2).run(train_with_tables, tables)[0].totals for tables in (0, 4))
    assert plain.bytes_of_buffers == 0 < with_tables.bytes_of_buffers < with_tables.bytes_sent / 100
    assert with_tables.compression_ratio == pytest.approx(plain.compression_ratio, rel=0.01)
    assert "of them buffers" in dict(summary_rows(with_tables))
    assert "of them buffers" not in dict(summary_rows(plain))


class Growing(Counting):
    """A buffer whose size differs by rank, from the beginning or later."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.steps = 0
        self.register_buffer("bank", torch.zeros(4 + rank() if way == "at once" else 4))

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 4 and self.way == "later":
            self.bank = torch.zeros(4 + rank())
        if self.steps == 4 and self.way == "more" and rank() == 1:
            self.register_buffer("another", torch.ones(3))
        if self.steps == 4 and self.way == "on all":
            self.bank = torch.full((9,), float(rank() + 1))
        return super().forward(inputs)


def train_growing(way: str, settings: dict[str, Any]) -> str:
    try:
        run = fit(
            DCTStrategy(**SETTINGS, **settings), Module(Growing(way), torch.optim.SGD, lr=0.0), 8
        )
    except ValueError as error:
        return str(error)
    return str(run.weights["model.bank"].tolist())


@pytest.mark.parametrize(
    ("way", "settings", "said"),
    [
        (
            "at once",
            {},
            "'model.bank' is [4] torch.float32 on the first rank and [5] torch.float32 on rank 1",
        ),
        (
            "later",
            {},
            "'model.bank' is [4] torch.float32 on the first rank and [5] torch.float32 on rank 1",
        ),
        ("later", {"lifelines": False}, "'model.bank' is [4] torch.float32 on the first rank"),
        (
            "more",
            {"lifelines": False},
            "'model.another' is missing on the first rank and [3] torch.float32 on rank 1",
        ),
        ("on all", {}, str([1.0] * 9)),
    ],
)
def test_buffers_of_different_sizes_are_named(
    ranks: Any, way: str, settings: dict[str, Any], said: str
) -> None:
    for found in ranks(2).run(train_growing, way, settings):
        assert said in found


def test_every_rank_keeps_its_own_without_broadcast_buffers(ranks: Any) -> None:
    found = ranks(2).run(train_growing, "at once", {"broadcast_buffers": False})
    assert found == [str([0.0] * 4), str([0.0] * 5)]


def train_with_buffers(save: Path | None, load: Path | None) -> Any:
    """Saved between two exchanges."""
    module = Module(Counting(), torch.optim.SGD, lr=0.1)
    shown, state = fit_half(
        save, load, DCTStrategy(density=0.3, local_steps=3, warmup_steps=0), module
    )
    return shown, {**state, "buffers": dict(module.named_buffers())}


def write_in_evaluation(taken_back: bool) -> dict[str, Tensor]:
    model = Counting()
    kept: list[Tensor] = []

    def write(*_: Any) -> None:
        kept.append(model.average.clone())
        model.average.fill_(7.0)

    def take_back(*_: Any) -> None:
        if kept and taken_back:
            model.average.copy_(kept.pop())

    hooks = LambdaCallback(on_validation_start=write, on_train_epoch_start=take_back)
    strategy = DCTStrategy(density=0.3, local_steps=4, warmup_steps=0)
    module = Module(model, torch.optim.SGD, lr=0.1)
    own: list[Tensor] = []
    look = LambdaCallback(on_before_zero_grad=lambda *_: own.append(model.average.clone()))
    trainer = trainer_for(strategy, callbacks=[hooks, look] if taken_back else [look], max_epochs=2)
    trainer.fit(module, loader(6, 40, 8), loader(1, 40, 8))
    return {str(number): one for number, one in enumerate(own)}


def test_buffers_that_a_validation_writes_and_takes_back_change_nothing(ranks: Any) -> None:
    for one, other in zip(
        *(ranks(2).run(write_in_evaluation, taken) for taken in (True, False)), strict=True
    ):
        assert_same(one, other)


def test_present_ranks_send_what_has_changed_on_one_of_them() -> None:
    """Oracles: the mean of statistics and the first sender's others, of 70 buffers, which share
    bits.
    """
    models = [
        {str(number): torch.full((3,), float(number)) for number in range(70)} for _ in range(2)
    ]
    buffers = [PresentBuffers(lambda own=own: own, lambda: {"1"}) for own in models]
    everything = buffers[0].changed() | buffers[1].changed()
    for one in buffers:
        one.take(torch.stack([other.to_bytes(everything) for other in buffers]), everything)
    assert [one.changed() for one in buffers] == [0, 0]
    models[0]["1"].fill_(3.0)
    models[1]["1"].fill_(4.0)
    models[1]["2"].fill_(8.0)
    changed = buffers[0].changed() | buffers[1].changed()
    assert changed == 0b110
    assert buffers[0].to_bytes(changed).numel() == 12 * 4  # 63 and 64 have the same bits
    rows = torch.stack([other.to_bytes(changed) for other in buffers])
    for one, own in zip(buffers, models, strict=True):
        assert one.take(torch.cat([rows, rows.new_zeros(2, 5)], dim=1), changed).shape == (2, 5)
        assert own["1"].tolist() == [3.5] * 3
        assert own["2"].tolist() == [2.0] * 3
        assert not one.changed()
