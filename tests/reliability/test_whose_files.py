"""A file that is another rank's, another save's or of another step is refused on every rank, before it does harm."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.optim import ZeroRedundancyOptimizer

from distributed.training import Module, fit, loader, rank, trainer_for
from lightning_dct import CheckpointError, DCTStrategy
from lightning_dct.checkpoint.format import state_path

SETTINGS: dict[str, Any] = {"density": 0.05, "refresh_every": 4}


def save(folder: Path) -> None:
    """Save after 5 steps and after 10."""
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=5)
    fit(DCTStrategy(**SETTINGS), Module(), 10, enable_checkpointing=True, callbacks=[saver])


@pytest.fixture(scope="module")
def whole(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ranks(2).run(save, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of two checkpoints, to be harmed."""
    return Path(shutil.copytree(whole, tmp_path, dirs_exist_ok=True))


def files_of(path: Path) -> list[Path]:
    note = torch.load(path, weights_only=True)["lightning_dct"]
    return [Path(state_path(str(path), note, of)) for of in range(2)]


def refusal(paths: list[Path]) -> str:
    with pytest.raises(CheckpointError) as caught:
        fit(DCTStrategy(**SETTINGS), Module(), 5, ckpt_path=str(paths[rank()]), max_epochs=2)
    return str(caught.value)


def test_files_of_two_ranks_in_each_others_place(ranks: Any, folder: Path) -> None:
    """Oracle: both files hold residuals of every shape that is wanted; each rank names the first that is wrong."""
    first, second = files_of(folder / "step=10.ckpt")
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    for message, file, said in zip(
        ranks(2).run(refusal, [folder / "step=10.ckpt"] * 2), (first, second), (1, 0), strict=True
    ):
        assert f"The file {str(file)!r} is another rank's" in message
        assert f"its field 'rank' is {said}, and the checkpoint says {1 - said}" in message


def test_an_older_steps_file_on_one_rank(ranks: Any, folder: Path) -> None:
    """Oracle: an error on the rank with the right file too; taken, the file would be lost with the next save."""
    older, (_, file) = files_of(folder / "step=5.ckpt")[1], files_of(folder / "step=10.ckpt")
    shutil.copy(older, file)
    for message in ranks(2).run(refusal, [folder / "step=10.ckpt"] * 2):
        assert (
            f"The file {str(file)!r} is another rank's or another save's: its field 'synchronisations' is 5" in message
        )


def test_another_checkpoint_on_one_rank(ranks: Any, folder: Path) -> None:
    """Oracle: both checkpoints are whole, as on hosts of which one has a stale disk."""
    for message in ranks(2).run(refusal, [folder / "step=5.ckpt", folder / "step=10.ckpt"]):
        assert "they disagree on its field lightning_dct['synchronisations'] (rank 0: 5, rank 1: 10)" in message


def test_a_note_that_points_elsewhere(ranks: Any, folder: Path) -> None:
    """Oracle: an error that names the field, on the rank whose note is right too."""
    checkpoint = torch.load(folder / "step=10.ckpt", weights_only=True)
    checkpoint["lightning_dct"]["save"] = "../../x"
    torch.save(checkpoint, folder / "changed.ckpt")
    for message in ranks(2).run(refusal, [folder / "step=10.ckpt", folder / "changed.ckpt"]):
        assert "its field lightning_dct['save'] is not a name" in message


def save_with_spread_optimizer(path: Path) -> list[str]:
    module: Any = Module(None, lambda parameters, lr: ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr))
    module._ddp_params_and_buffers_to_ignore = ["model.gain"]
    # Where each rank trains weights of its own, such an optimizer is refused.
    trainer = trainer_for(DCTStrategy(**SETTINGS, compress="gradients"))
    trainer.fit(module, loader(3, 40, 8))
    trainer.save_checkpoint(path)
    return list(module._ddp_params_and_buffers_to_ignore)


def test_an_optimizer_that_only_rank_0_hands_over(ranks: Any, tmp_path: Path) -> None:
    """Oracle: Adam's state of every parameter; and what the user keeps from DistributedDataParallel stays kept."""
    ignored = ranks(2).run(save_with_spread_optimizer, tmp_path / "a.ckpt")
    (optimizer,) = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]
    assert len(optimizer["state"]) == 5
    assert ignored == [["model.gain"]] * 2
