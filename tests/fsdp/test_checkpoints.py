"""Checkpoints: a resumed run goes on bit for bit on the same mesh; on another, the mean of the weights is conserved."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

from distributed.resuming import AtStart, twice_ten_batches, without_times
from distributed.training import assert_weights_close, assert_weights_equal
from fsdp.training import Plain, fsdp, train
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint.reading import put_together
from lightning_dct.checksums import CheckpointError
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.sync.setup import parameter_names

UPDATES = {"local_steps": 4, "density": 0.1, "warmup_steps": 0}


class Saving(Plain):
    """Saves after ten batches and ends the run there; in a hook of the module."""

    path: Path | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.path is not None and self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 10:
            self.trainer.save_checkpoint(self.path)
            self.trainer.should_stop = True


def run(
    strategy: dict[str, Any], trainer: dict[str, Any], save: Path | None = None, load: Path | None = None
) -> dict[str, Any]:
    module = Saving(torch.optim.AdamW, lr=0.01)
    module.path = save
    return train(fsdp(**strategy), module, twice_ten_batches(), ckpt_path=load, **trainer)


def train_resumable(save: Path | None, load: Path | None, strategy: dict[str, Any], trainer: dict[str, Any]) -> Any:
    """With accumulation the run is saved in the middle of a step."""
    if load is not None:
        # A save that was killed leaves this beside the checkpoint.
        (load.parent / ".half.ckpt.part").mkdir(exist_ok=True)
    found = run(strategy, trainer, save, load)
    return found["losses"], [found["weights"], without_times(found["state"]), found["totals"].bytes_sent]


def saved_folder(path: Path) -> None:
    run(UPDATES, {}, path)


def load_damaged(path: Path) -> str:
    with pytest.raises((CheckpointError, FileNotFoundError)) as raised:
        run(UPDATES, {"limit_train_batches": 1}, None, path)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_damaged_piece_of_a_folder_is_named_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    """One bit of one rank's tensors, of the list of pieces, of the checksums; and a piece that is missing."""
    path = tmp_path / "half.ckpt"
    ranks(4).run(saved_folder, path)
    pieces = sorted(file.name for file in path.iterdir() if file.suffix == ".distcp")
    assert len(pieces) == 2
    for name in (*pieces, ".metadata", "checksums.json"):
        whole = (path / name).read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 1
        (path / name).write_bytes(damaged)
        for said in ranks(4).run(load_damaged, path):
            assert said.startswith("CheckpointError: ")
            assert f"'{path}'" in said
            assert f"file '{name}' does not match its checksum" in said
        (path / name).write_bytes(whole)
    (path / pieces[1]).unlink()
    for said in ranks(4).run(load_damaged, path):
        assert said.startswith("FileNotFoundError: ")
        assert pieces[1] in said


def held(trainer: Trainer) -> dict[str, Any]:
    """What a rank starts from: its own weights, and what else it holds back."""
    synchronizer = getattr(trainer.strategy, "synchronizer", None)
    names = {name: parameter for parameter, name in parameter_names(trainer.lightning_module).items()}
    shapes = {name: list(local_of(parameter).shape) for name, parameter in names.items()}
    weights = {name: local_of(parameter).clone() for name, parameter in names.items()}
    residuals = {} if synchronizer is None else dict(synchronizer.feedback.residuals.state_dict())
    return {"weights": weights, "residuals": residuals, "owned": {}, "shards": shapes}


def start(kind: str, replicas: int, path: Path) -> dict[str, Any]:
    plain: dict[str, Strategy] = {"ddp": DDPStrategy(), "dct": DCTStrategy(lifelines=False)}
    strategy = plain[kind] if kind in plain else fsdp(replicas=replicas)
    settings = {"callbacks": [begun := AtStart(held)], "ckpt_path": path, "max_steps": 11, "limit_val_batches": 0}
    train(strategy, Plain(torch.optim.AdamW, lr=0.01), **settings)
    return begun.seen


def mean_of(states: list[dict[str, Any]], shards: int, part: str) -> dict[str, torch.Tensor]:
    """The mean over replicas of what whole replicas hold."""
    replicas = [put_together(states[first : first + shards]) for first in range(0, len(states), shards)]
    names = {name: state[part][name] for state in replicas for name in state[part]}
    return {
        name: sum(state[part][name].double() for state in replicas if name in state[part]) / len(replicas)
        for name in names
    }


@pytest.mark.parametrize(
    ("kind", "world_size", "replicas"), [("fsdp", 4, 4), ("fsdp", 2, 1), ("dct", 2, 2), ("ddp", 2, 2)]
)
def test_another_mesh_starts_with_the_mean_of_what_was_held_back(
    ranks: Any, tmp_path_factory: Any, kind: str, world_size: int, replicas: int
) -> None:
    """Oracle: the files of the four ranks that saved, put together and averaged here."""
    path = saved(ranks, tmp_path_factory)
    files = sorted((path.parent / f"{path.name}.dct").iterdir())
    states = [torch.load(file, weights_only=True) for file in files]
    started = ranks(world_size).run(start, kind, replicas, path)
    if kind == "ddp":
        shared = torch.load(path, weights_only=True)["state_dict"]
        assert_weights_equal(started[0]["weights"], {name: shared[name] for name in started[0]["weights"]})
        return
    expected = mean_of(states, 2, "weights")
    expected = {name: tensor for name, tensor in expected.items() if name in states[0]["shards"]}
    assert any(float(tensor.abs().max()) > 0 for tensor in expected.values())
    assert_weights_close(expected, mean_of(started, world_size // replicas, "weights"))


SAVED: list[Path] = []


def saved(ranks: Any, folders: Any) -> Path:
    """A checkpoint of two replicas of two ranks, in one file."""
    if not SAVED:
        SAVED.append(folders.mktemp("saved") / "x.ckpt")
        ranks(4).run(run, {**UPDATES, "save_distributed_checkpoint": False}, {}, SAVED[0])
    copy = folders.mktemp("copy") / "x.ckpt"
    shutil.copy(SAVED[0], copy)
    shutil.copytree(f"{SAVED[0]}.dct", f"{copy}.dct")
    return copy
