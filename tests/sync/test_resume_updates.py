"""Checkpoints hold the shared weights for everybody, and each rank's own for a run that goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from distributed.resuming import AtStart, SaveAndStop, fit_half, state_of, twice_ten_batches
from distributed.training import (
    Module,
    State,
    Watch,
    assert_weights_close,
    assert_weights_equal,
    fit,
    loader,
    perceptron,
    trainer_for,
    weights_of,
)
from lightning_dct import DCTStrategy

SETTINGS: dict[str, Any] = {
    "compress": "updates",
    "density": 0.2,
    "local_steps": 4,
    "warmup_steps": 3,
    "refresh_every": 6,
}


def module() -> Module:
    return Module(None, torch.optim.Adam, lr=0.01)


class Normalised(Module):
    """With running statistics, which each rank has of its own data until they are averaged."""

    def val_dataloader(self) -> Any:
        return loader(2, 40, 8)


def train_normalised(save: Path | None, load: Path | None) -> Any:
    """Validate after ten steps, in the middle of a round, which the resumed run does not repeat."""
    layers = perceptron(out_features=16), torch.nn.BatchNorm1d(16), perceptron(in_features=16)
    model = Normalised(torch.nn.Sequential(*layers), torch.optim.Adam, lr=0.01)
    strategy = DCTStrategy(**{**SETTINGS, "local_steps": 8})
    hashes, state = fit_half(save, load, strategy, model, val_check_interval=10)
    # And not the bytes, because what a validation sends is not sent again.
    return hashes, state["weights"]


def own_and_shared(trainer: Trainer) -> tuple[dict[str, Any], State]:
    state = state_of(trainer)
    return state, {
        name: trainer.strategy.updates.weights.shared(name).clone() for name in state["weights"]
    }


def weights_in(trainer: Trainer) -> State:
    return weights_of(trainer.lightning_module)


def held_back(state: dict[str, Any], shared: State, name: str) -> torch.Tensor:
    """What a rank adds to the mean that the ranks are on their way to: of its own, and of sums that
    it owns.
    """
    held = (
        (state["weights"][name] - shared[name]).double().flatten()
        if name in state["weights"]
        else 0.0
    )
    held = torch.zeros(shared[name].numel(), dtype=torch.float64) + held
    for start, piece in state["owned"].get(name, {}).items():
        held[start : start + piece.numel()] += piece
    return held


def save_after_ten(path: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], State]:
    strategy = DCTStrategy(**SETTINGS, **settings)

    def look(trainer: Trainer) -> tuple[dict[str, Any], State]:
        # Not the final weights, which have what is still in flight in the checkpoint.
        updates = trainer.strategy.updates
        return updates.state_dict(), {
            name: updates.weights.shared(name).clone() for name in updates.weights.parameters
        }

    watch = Watch(look=look)
    trainer = trainer_for(strategy, callbacks=[watch, SaveAndStop(path, 10)])
    trainer.fit(module(), twice_ten_batches())
    return watch.seen[-1]


def resume(path: Path, look: Any) -> Any:
    """What ``look`` sees when a run begins from a checkpoint."""
    start = AtStart(look)
    fit(
        DCTStrategy(**SETTINGS),
        module(),
        twice_ten_batches(),
        ckpt_path=str(path),
        callbacks=[start],
    )
    return start.seen


@pytest.mark.parametrize(
    ("saved", "resumed", "settings"),
    [(2, 4, {"overlap_steps": 3}), (3, 2, {"exchange": "two_phase"})],
)
def test_another_number_of_ranks_keeps_the_mean(
    ranks: Any, tmp_path: Path, saved: int, resumed: int, settings: dict[str, Any]
) -> None:
    """Oracle: the mean over the ranks of what they hold back, before and after."""
    before = ranks(saved).run(save_after_ten, tmp_path / "x.ckpt", settings)
    after = ranks(resumed).run(resume, tmp_path / "x.ckpt", own_and_shared)
    for name, weights in before[0][1].items():
        torch.testing.assert_close(after[0][1][name], weights, rtol=0, atol=0)
        expected = sum(held_back(state, shared, name) for state, shared in before) / saved
        found = sum(held_back(state, shared, name) for state, shared in after) / resumed
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        if weights.numel() >= 128:
            assert float(expected.norm()) > 0


def load_under_ddp(path: Path) -> State:
    trainer = trainer_for(DDPStrategy(), callbacks=[start := AtStart(weights_in)])
    trainer.fit(module(), loader(12, 40, 8), ckpt_path=str(path))
    return start.seen


def test_ddp_goes_on_from_the_shared_weights(ranks: Any, tmp_path: Path) -> None:
    saved = ranks(2).run(save_after_ten, tmp_path / "x.ckpt", {})
    for weights in ranks(2).run(load_under_ddp, tmp_path / "x.ckpt"):
        assert_weights_equal(saved[0][1], weights)
    with pytest.raises(AssertionError):
        assert_weights_close(
            saved[0][1], {name: saved[0][0]["weights"][name] for name in saved[0][1]}, 1e-6, 1e-7
        )


def test_one_rank_goes_on_from_the_mean(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the shared weights and the mean of what ranks and owners hold back."""
    before = ranks(3).run(save_after_ten, tmp_path / "x.ckpt", {"exchange": "two_phase"})
    (alone,) = ranks(1).run(resume, tmp_path / "x.ckpt", weights_in)
    for name, shared in before[0][1].items():
        held = sum(held_back(state, weights, name) for state, weights in before) / 3
        torch.testing.assert_close(
            alone[name].double(), shared + held.view(shared.shape), rtol=1e-4, atol=1e-7
        )


class Freezes(Callback):
    """Has a layer trained in the first five batches only."""

    def __init__(self, is_frozen: bool) -> None:
        self.is_frozen = is_frozen

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.model.first.requires_grad_(not self.is_frozen)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready > 5:
            pl_module.model.first.requires_grad_(False)


class OfAll(Module):
    """Its optimizer has frozen parameters, too."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train_freezing(save: Path | None, load: Path | None) -> Any:
    """What a rank has not sent of a layer that is frozen by then goes out all the same."""
    return fit_half(
        save, load, DCTStrategy(**SETTINGS), OfAll(), callbacks=(Freezes(load is not None),)
    )
