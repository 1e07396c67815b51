"""Ranks compare their parameters, and say which one is not alike on all of them."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

import lightning_dct.fabric
from distributed.training import (
    Module,
    fit,
    launched,
    loader,
    message_of,
    perceptron,
    rank,
    train_in_fabric,
    trainer_for,
    warnings_of,
)
from lightning_dct import DCTStrategy
from lightning_dct.checksums import checksums_of


class ScheduleFree(torch.optim.SGD):
    """Evaluates an average of its own steps, as Defazio et al., The Road Less Scheduled (2024)."""

    def step(self, closure: Any = None) -> Any:
        output = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["z"] = state.get("z", parameter.detach().clone()).lerp(parameter.detach(), 0.5)
        return output

    def eval(self) -> None:
        for parameter, state in self.state.items():
            parameter.data.lerp_(state["z"], 0.1)

    def train(self) -> None:
        for parameter, state in self.state.items():
            parameter.data.lerp_(state["z"], 1.0 - 1.0 / 0.9)


class Validated(Module):
    def __init__(self, *hooks: str) -> None:
        super().__init__(None, ScheduleFree, lr=0.1)
        for hook, act in zip(hooks, ("eval", "train"), strict=bool(hooks)):
            setattr(self, hook, lambda act=act: getattr(self.trainer.optimizers[0], act)())


def write(trainer: Trainer, module: LightningModule, *_: Any) -> None:
    """As an initialisation from the rank's own data."""
    module.model.second.bias.data.fill_(float(rank()))


SCHEDULE_FREE = {
    "schedule-free, validated": ("on_validation_epoch_start", "on_validation_epoch_end"),
    "schedule-free, at the end": ("on_train_epoch_end", "on_train_epoch_start"),
}


def train_apart(way: str, folder: Path) -> str:
    """What is said of a run on whose ranks something differs."""
    hooks = SCHEDULE_FREE.get(way, ())
    module = Validated(*hooks)
    data = loader(12, 40, 8)
    callbacks = (
        [Saves(folder)] if way == "save" else [] if hooks else [LambdaCallback(**{way: write})]
    )
    is_validated = way not in ("save", "on_train_end", "schedule-free, at the end")
    settings: dict[str, Any] = (
        {"val_check_interval": 4} if is_validated else {"limit_val_batches": 0}
    )
    trainer = trainer_for(DCTStrategy(local_steps=2, density=0.3), callbacks=callbacks, **settings)
    with pytest.raises(RuntimeError, match="shared weights of") as caught:
        trainer.fit(module, data, loader(2, 40, 8))
    return f"{trainer.global_step} steps: {caught.value}"


class Saves(Callback):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "saved.ckpt"

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, *arguments: Any
    ) -> None:
        if arguments[-1] == 3:
            write(trainer, module)
        if arguments[-1] == 5:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("way", "world_size", "steps"),
    [
        ("on_fit_start", 2, 0),
        ("on_fit_start", 4, 0),
        ("on_train_start", 2, 0),
        ("on_sanity_check_end", 2, 0),
        ("on_validation_start", 2, 0),
        ("on_train_epoch_end", 4, 12),
        ("save", 2, 6),
        ("on_train_end", 2, 12),
        ("schedule-free, validated", 2, 4),
        ("schedule-free, at the end", 2, 12),
    ],
)
def test_an_error_names_shared_weights_that_differ(
    ranks: Any, way: str, world_size: int, steps: int, tmp_path: Path
) -> None:
    """Oracle: the same sentence on all ranks, after the step that is due."""
    said = ranks(world_size).run(train_apart, way, tmp_path)
    name = "'model.gain'" if "schedule" in way else "'model.second.bias'"
    assert len(set(said)) == 1
    assert said[0].startswith(
        f"{steps} steps: The shared weights of {name} on ranks 0 and 1 differ"
    )
    assert not (tmp_path / "saved.ckpt").exists()


def train_frozen() -> tuple[list[str], bool]:
    module = Module(copy.deepcopy(perceptron()))
    module.model.second.weight.requires_grad_(False)

    def write_frozen(trainer: Trainer, module: LightningModule) -> None:
        if rank() == 1:
            module.model.second.weight[0, 0] = 5.0

    before = module.model.gain.detach().clone()
    said = warnings_of(
        fit, DCTStrategy(), module, 6, callbacks=[LambdaCallback(on_fit_start=write_frozen)]
    )
    trained = not torch.equal(before, module.model.gain)
    return [one for one in said if "which no optimizer trains" in one], trained


def test_a_warning_names_a_frozen_parameter_that_differs(ranks: Any) -> None:
    (said, trained), (_, others) = ranks(2).run(train_frozen)
    assert "'model.second.weight'" in said[0]
    assert trained
    assert others


def apart_in_fabric(path: Path) -> list[str]:
    strategy = lightning_dct.fabric.DCTStrategy(density=0.3)
    fabric = launched(strategy)
    model = perceptron()
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_in_fabric(fabric, module, optimizer, 3)
    with strategy.shared_weights(), torch.no_grad():
        model.second.bias.fill_(float(rank()))
    evaluation = strategy.shared_weights()
    return [message_of(evaluation.__enter__), message_of(fabric.save, path, {"module": module})]


def test_fabric_names_shared_weights_that_differ(ranks: Any, tmp_path: Path) -> None:
    one, other = ranks(2).run(apart_in_fabric, tmp_path / "saved.ckpt")
    assert one == other
    assert all(
        said.startswith("The shared weights of 'second.bias' on ranks 0 and 1 differ")
        for said in one
    )


def tensors(size: int) -> Iterable[torch.Tensor]:
    bits = torch.arange(size, dtype=torch.int32) * 7919
    yield bits
    yield bits.view(torch.float32)
    yield bits.to(torch.uint8)[1:]  # where no word begins
    yield bits.view(-1, 2)[:, 0]  # not contiguous


@pytest.mark.parametrize("size", [2, 1000, 100_000])
def test_checksums_tell_what_differs(size: int) -> None:
    """Oracle: other bits and another order give another checksum, a copy elsewhere in memory gives
    the same.
    """
    for one in tensors(size):
        (known,) = checksums_of({"": one}).values()
        elsewhere = torch.empty(3 + one.numel(), dtype=one.dtype)[3:].copy_(one.reshape(-1))
        assert checksums_of({"": elsewhere})[""] == known
        for place in (0, one.numel() // 3, -1):
            other = elsewhere.clone()
            as_bytes = other.view(torch.uint8)
            as_bytes[place] ^= 64
            assert checksums_of({"": other})[""] != known
        if size > 2:
            assert checksums_of({"": elsewhere.flip(0)})[""] != known
            assert checksums_of({"": elsewhere.roll(37)})[""] != known
