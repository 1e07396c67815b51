"""Checkpoints: a resumed run goes on as if nothing had happened, also with another number of
ranks.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from distributed.resuming import AtStart, state_of, twice_ten_batches
from distributed.training import (
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_replicas_equal,
    assert_weights_equal,
    fit,
    fit_recorded,
    held_back,
    perceptron,
    trainer_for,
)
from lightning_dct import DCTStrategy

SETTINGS: dict[str, Any] = {"density": 0.05, "refresh_every": 4}


def saver(folder: Path, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, "{step}", **{"save_top_k": -1, "every_n_train_steps": 10, **settings}
    )


def rotate(folder: Path, settings: dict[str, Any]) -> tuple[str, str]:
    checkpoint = saver(folder, every_n_train_steps=5, **settings)
    fit(
        DCTStrategy(compress="gradients", **SETTINGS),
        Module(),
        20,
        enable_checkpointing=True,
        callbacks=[checkpoint],
    )
    return checkpoint.best_model_path, checkpoint.last_model_path


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that has saved after steps 5, 10, 15 and 20."""
    folder = tmp_path_factory.mktemp("trained")
    ranks(2).run(rotate, folder, {})
    return folder


@pytest.fixture
def path(trained: Path, tmp_path: Path) -> Path:
    """The last checkpoint of that run, for one test."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "step=20.ckpt"


def names_in(folder: Path) -> dict[str, list[str]]:
    """What is in a folder of checkpoints, less what tells one save from the other."""
    return {
        entry.name: [re.sub("-[0-9a-f]{8}-", "-", name) for name in sorted(os.listdir(entry))]
        if entry.is_dir()
        else []
        for entry in sorted(folder.iterdir())
    }


def files_of(step: int) -> list[str]:
    return [f"{step:012d}-rank-{rank}-of-2.pt" for rank in range(2)]


def test_every_checkpoint_has_one_file_a_rank_beside_it(
    ranks: Any, trained: Path, tmp_path: Path
) -> None:
    """Oracle: the names that checkpoint.py documents; they are there for each checkpoint and go
    with it.
    """
    expected = {f"step={step}.ckpt.dct": files_of(step) for step in (5, 10, 15, 20)}
    assert names_in(trained) == dict(
        sorted({**expected, **{name[:-4]: [] for name in expected}}.items())
    )
    ranks(2).run(rotate, tmp_path / "last", {"save_top_k": 1, "save_last": True})
    last = {
        "last.ckpt": [],
        "last.ckpt.dct": files_of(20),
        "step=20.ckpt": [],
        "step=20.ckpt.dct": files_of(20),
    }
    assert names_in(tmp_path / "last") == last
    ranks(2).run(rotate, tmp_path / "weights", {"save_weights_only": True, "save_top_k": 1})
    assert names_in(tmp_path / "weights") == {"step=20.ckpt": []}


def resume(path: Path, with_dct: bool, batches: int) -> Run:
    strategy = DCTStrategy(compress="gradients", **SETTINGS) if with_dct else DDPStrategy()
    return fit(strategy, Module(), batches, ckpt_path=str(path), max_epochs=2)


def rotate_ddp(folder: Path) -> Run:
    return fit(DDPStrategy(), Module(), 20, enable_checkpointing=True, callbacks=[saver(folder)])


def test_checkpoints_cross_between_ddp_and_dct(ranks: Any, trained: Path, tmp_path: Path) -> None:
    """Oracle: both directions continue with step 21 from the weights that were saved."""
    saved = ranks(2).run(rotate_ddp, tmp_path / "ddp")
    ours = ranks(2).run(resume, tmp_path / "ddp" / "step=20.ckpt", True, 4)
    assert [len(run.hashes) for run in ours] == [4, 4]
    assert ours[0].synchronisations == 4
    assert_replicas_equal(ours)
    theirs = ranks(2).run(resume, trained / "step=20.ckpt", False, 4)
    assert [len(run.hashes) for run in theirs] == [4, 4]
    assert_replicas_equal(theirs)
    checkpoint = torch.load(tmp_path / "ddp" / "step=20.ckpt", weights_only=True)
    assert_weights_equal(checkpoint["state_dict"], saved[0].weights)


def test_files_load_with_weights_only(trained: Path) -> None:
    """Oracle: torch's restricted unpickler takes Lightning's file and every rank's."""
    checkpoint = torch.load(trained / "step=20.ckpt", weights_only=True)
    note = checkpoint["lightning_dct"]
    expected = {"format_version": 4, "world_size": 2, "synchronisations": 20, "stages": 1}
    expected |= {"has_state": 1, "has_rows": 0}
    assert {**note, **expected} == note
    assert note.keys() - expected.keys() == {"save", "fingerprints", "checksum"}
    for state in states_in(trained / "step=20.ckpt.dct", 2):
        assert state["synchronisations"] == 20
        assert set(state["residuals"]) == {
            f"model.{parameter}" for parameter, _ in perceptron().named_parameters()
        }


class NumpyRate(Module):
    """Its learning rate is a scalar of numpy, which is neither a tensor nor plain data."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: np.float64(0.5**epoch)
        )
        return [optimizer], [schedule]


def train_by_numpy(folder: Path, epochs: int, loading: dict[str, Any]) -> list[str]:
    watch = Watch()
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    strategy = DCTStrategy(density=0.2, local_steps=3, warmup_steps=0)
    trainer = trainer_for(
        strategy, callbacks=[watch, saving], max_epochs=epochs, enable_checkpointing=True
    )
    trainer.fit(NumpyRate(), twice_ten_batches(), **loading)
    return watch.hashes[-20:]


def test_other_objects_load_if_the_user_says_so(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the run without a stop, bitwise.

    Plain DDP takes ``weights_only=False`` for such a checkpoint, too.
    """
    whole = ranks(2).run(train_by_numpy, tmp_path / "whole", 2, {})
    ranks(2).run(train_by_numpy, tmp_path / "half", 1, {})
    loading = {"ckpt_path": tmp_path / "half" / "epoch=0.ckpt", "weights_only": False}
    assert ranks(2).run(train_by_numpy, tmp_path / "half", 2, loading) == whole


def states_in(folder: Path, world_size: int) -> list[dict[str, Any]]:
    files = sorted(folder.iterdir())
    assert len(files) == world_size
    return [torch.load(file, weights_only=True) for file in files]


def residuals_in(folder: Path, world_size: int) -> list[dict[str, torch.Tensor]]:
    return [state["residuals"] for state in states_in(folder, world_size)]


def train_sharded(folder: Path, resumed: Path | None, epochs: int) -> tuple[dict[str, Any], Run]:
    """Ten steps an epoch, each of which ends in a checkpoint."""
    start = AtStart(state_of)
    run = fit(
        DCTStrategy(compress="gradients", density=0.2, exchange="two_phase", bucket_cap_mb=0.0005),
        Module(),
        10,
        ckpt_path=None if resumed is None else str(resumed),
        enable_checkpointing=True,
        callbacks=[saver(folder), start],
        max_epochs=epochs,
    )
    return start.seen, run


def test_what_owners_hold_back_survives_other_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the mean, over the ranks that saved, of all that their files say is held back; 2, 4,
    3 and 1 ranks.
    """
    path = None
    for epochs, world_size in enumerate((2, 4, 3, 1), start=1):
        results = ranks(world_size).run(train_sharded, tmp_path / str(world_size), path, epochs)
        assert_replicas_equal([run for _, run in results])
        if path is not None:
            states = [
                torch.load(file, weights_only=True)
                for file in sorted(Path(f"{path}.dct").iterdir())
            ]
            owned = [
                piece
                for state in states
                for pieces in state["owned"].values()
                for piece in pieces.values()
            ]
            assert any(float(piece.norm()) > 0 for piece in owned)
            zeros = {
                name: torch.zeros(entries.numel()).double()
                for name, entries in states[0]["residuals"].items()
            }
            assert "model.first.weight" in zeros
            saved = [held_back(state, zeros) for state in states]
            for start, _ in results:
                for name, held in held_back(start, zeros).items():
                    mean = torch.stack([some[name] for some in saved]).mean(dim=0)
                    torch.testing.assert_close(held, mean, rtol=1e-6, atol=1e-8)
        path = tmp_path / str(world_size) / f"step={10 * epochs}.ckpt"
    (_, alone) = results[0]
    assert alone.synchronisations >= 40
    # With nobody to exchange with, everything that was held back has gone out.
    assert not any(residual.any() for residual in alone.residuals.values())


def resume_densely(path: Path) -> Any:
    strategy = DCTStrategy(compress="gradients", density=1.0)
    return fit_recorded(
        strategy, Module(None, torch.optim.SGD, lr=0.01), 1, ckpt_path=str(path), max_epochs=2
    )[1]


def test_residuals_go_out_when_resumed_at_density_one(ranks: Any, trained: Path) -> None:
    """Oracle: what was saved plus the new gradients is what the optimizer gets; nothing is left."""
    before = residuals_in(trained / "step=20.ckpt.dct", 2)
    assert float(before[0]["model.first.weight"].norm()) > 0
    results = ranks(2).run(resume_densely, trained / "step=20.ckpt")
    with_saved = [
        ({name: gradient + saved[name].double() for name, gradient in given.items()}, applied, held)
        for (given, applied, held), saved in zip(results, before, strict=True)
    ]
    assert_conserved(with_saved)
    assert not any(residual.any() for _, _, held in results for residual in held.values())


class Alternating(Module):
    """Uses its second layer in the first four of every five batches; what it then holds back must
    wait for the next.
    """

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, _ = batch
        hidden = torch.tanh(self.model.first(inputs))
        return (self.model.second(hidden) if batch_idx % 5 < 4 else hidden).square().mean()


def save_alternating(folder: Path) -> None:
    strategy = DCTStrategy(compress="gradients", **SETTINGS, find_unused_parameters=True)
    fit(
        strategy,
        Alternating(),
        5,
        enable_checkpointing=True,
        callbacks=[saver(folder, every_n_train_steps=5)],
    )


def resume_alternating(path: Path) -> dict[str, torch.Tensor]:
    strategy = DCTStrategy(compress="gradients", density=1.0, find_unused_parameters=True)

    class Unused(Alternating):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, 4)

    return fit(strategy, Unused(), 1, ckpt_path=str(path), max_epochs=2).residuals


def test_residual_of_an_unused_tensor_survives_a_resume(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the saved residual, bitwise: DDP throws away what is sent for a tensor that no rank
    has used.
    """
    ranks(2).run(save_alternating, tmp_path)
    saved = residuals_in(tmp_path / "step=5.ckpt.dct", 2)
    assert float(saved[0]["model.second.weight"].norm()) > 0
    for expected, held in zip(
        saved, ranks(2).run(resume_alternating, tmp_path / "step=5.ckpt"), strict=True
    ):
        assert torch.equal(expected["model.second.weight"], held["model.second.weight"])
