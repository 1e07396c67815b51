"""Loops and models that are allowed and rare: all ranks end with the same weights, or are told why
they cannot.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed.harness import RankFailure
from distributed.training import (
    Manual,
    Module,
    Watch,
    fit,
    loader,
    rank,
    trainer_for,
    warnings_of,
)
from lightning_dct import DCTStrategy

SETTINGS = {"density": 0.3, "local_steps": 2, "warmup_steps": 0}
EVERY_STEP = {"density": 0.3, "local_steps": 1, "warmup_steps": 0}


def train(module: Module, batches: Any = 12, **trainer: Any) -> list[str]:
    """Train, and return the names of tensors in which this rank differs from the mean of all
    ranks.
    """
    strategy = DCTStrategy(**trainer.pop("settings", SETTINGS))
    trainer_for(strategy, **trainer).fit(
        module, loader(batches, 40, 8) if isinstance(batches, int) else batches
    )
    return apart(module)


def apart(module: nn.Module) -> list[str]:
    found = []
    for name, tensor in module.state_dict().items():
        total = tensor.double().clone()
        dist.all_reduce(total)
        if not torch.equal(total / dist.get_world_size(), tensor.double()):
            found.append(name)
    return found


class Stream(IterableDataset):
    """Batches without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([loader(6, 40, 8).dataset[index] for index in range(6)])


@pytest.mark.parametrize("settings", [{}, {"local_steps": 2}, {"compress": "gradients"}])
def test_data_without_a_length(ranks: Any, settings: dict[str, Any]) -> None:
    assert ranks(2).run(stream, settings) == [[], []]


def stream(settings: dict[str, Any]) -> list[str]:
    return train(Module(), DataLoader(Stream(), batch_size=None), settings=settings, max_epochs=2)


class Unfreezing(Module):
    """A layer becomes trainable within a training step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.model.first.requires_grad_(False)
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.model.first.requires_grad_(batch_idx >= 7)  # the cosine of steps is measured in step 8
        return super().training_step(batch, batch_idx)


class Initialising(Module):
    """The first forward sets weights by its data, which differ between ranks."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.model.gain.data.fill_(1.0 + rank())
        return super().training_step(batch, batch_idx)


class Constants(Module):
    """Buffers that no rank changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "mask", torch.full((3,), torch.finfo(torch.float16).min, dtype=torch.float16)
        )
        self.register_buffer("ones", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("frequencies", 10_000 ** -torch.linspace(0, 1, 32))


class Normalised(Manual):
    """Running statistics, and a first optimizer that has nothing to train."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8)))
        self.model[0].requires_grad_(False)
        self.apart: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if any("running_mean" in name for name in apart(self.model)):
            self.apart.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in self.model]


KINDS = {
    "unfreezing": Unfreezing,
    "initialising": Initialising,
    "constants": Constants,
    "normalised": Normalised,
}


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        ("unfreezing", {}),
        ("unfreezing", {"settings": EVERY_STEP}),
        ("initialising", {}),
        ("initialising", {"accumulate_grad_batches": 2}),
    ],
)
def test_ranks_end_alike(ranks: Any, kind: str, trainer: dict[str, Any]) -> None:
    assert ranks(2).run(learn, kind, trainer) == [[], []]


def learn(kind: str, trainer: dict[str, Any]) -> list[str]:
    return train(KINDS[kind](), **trainer)


def test_constants_stay_as_they_are(ranks: Any) -> None:
    """Oracle: every bit, of numbers that a mean of three in fp32 would round otherwise."""
    assert ranks(3).run(keep_constants) == [[True] * 3] * 3


def keep_constants() -> list[bool]:
    module = Constants()
    train(module)
    return [
        torch.equal(kept, begun)
        for kept, begun in zip(module.buffers(), Constants().buffers(), strict=True)
    ]


def test_running_statistics_are_averaged_if_the_first_optimizer_has_nothing_to_train(
    ranks: Any,
) -> None:
    """Oracle: ranks exchange after every second step, so they are alike at the start of every
    second batch.
    """
    assert ranks(2).run(normalise) == [[1, 3, 5, 7, 9, 11]] * 2


def normalise() -> list[int]:
    module = Normalised()
    train(module)
    return module.apart


class Remembering(Module):
    """Puts a part of its weights into the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["gain"] = self.model.gain.detach().clone()


def test_a_checkpoint_hook_sees_the_weights_of_the_checkpoint(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(remember, str(tmp_path))
    for step in (3, 6, 9):
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False)
        assert torch.equal(checkpoint["gain"], checkpoint["state_dict"]["model.gain"])


def remember(folder: str) -> None:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    settings = {"density": 0.3, "local_steps": 4, "warmup_steps": 0}
    train(Remembering(), settings=settings, callbacks=[saving], enable_checkpointing=True)


class TwoPhases(Manual):
    """SGD first, and then Adam with the same parameters."""

    def stepped(self, batch_idx: int) -> list[Any]:
        return [super().stepped(batch_idx)[batch_idx >= 4]]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.Adam(self.parameters(), 0.01)]


def train_in_two_phases(**settings: Any) -> tuple[list[int], list[str]]:
    strategy = DCTStrategy(**{"local_steps": 1, "density": 1.0, "value_format": "fp32", **settings})
    watch = Watch(look=lambda trainer: trainer.strategy.traffic.totals.bytes_sent)
    fit(strategy, TwoPhases(), 8, watch=watch)
    return watch.seen, watch.hashes


def test_a_second_optimizer_of_the_same_parameters_exchanges_them(ranks: Any) -> None:
    for sent, _ in (runs := ranks(2).run(train_in_two_phases)):
        assert all(later > earlier for earlier, later in pairwise(sent))
    assert runs[0][1] == runs[1][1]
    with pytest.raises(
        RankFailure, match=r"Two optimizers step 'model\.first\.bias'.*Use `overlap_steps=0`"
    ):
        ranks(2).run(train_in_two_phases_with_a_delay)


def train_in_two_phases_with_a_delay() -> None:
    train_in_two_phases(local_steps=2, overlap_steps=2)


class Copies(Module):
    """Its optimizer steps copies of the weights, as some optimizers of half-precision weights
    do.
    """

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([weights.detach().clone() for weights in self.parameters()], 0.1)


def train_copies() -> list[str]:
    return warnings_of(fit, DCTStrategy(), Copies(), 3)


def test_an_optimizer_of_copies_is_told_that_nothing_is_exchanged(ranks: Any) -> None:
    """Oracle: rank 0 warns once, and says what to use instead."""
    told = [
        message
        for message in ranks(2).run(train_copies)[0]
        if "steps no parameter of the model" in message
    ]
    assert len(told) == 1
    assert "compress='gradients'" in told[0]
