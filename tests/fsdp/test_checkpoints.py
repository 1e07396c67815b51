"""Checkpoints: a resumed run goes on bit for bit on the same mesh; on another, the mean of the
weights is conserved.
"""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from distributed.resuming import AtStart, twice_ten_batches, without_times
from distributed.training import assert_weights_close, assert_weights_equal, loader, trainer_for
from fsdp.training import Plain, fsdp, train, whole
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint import files
from lightning_dct.checkpoint.reading import put_together
from lightning_dct.checksums import CheckpointError
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.fsdp import mesh_strategy
from lightning_dct.sync.setup import parameter_names

UPDATES = {"local_steps": 4, "density": 0.1, "warmup_steps": 0}


class Saving(Plain):
    """Saves after ten batches and ends the run there; in a hook of the module."""

    path: Path | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if (
            self.path is not None
            and self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 10
        ):
            self.trainer.save_checkpoint(self.path)
            self.trainer.should_stop = True


class Late(Saving):
    """A layer has its first gradient after the save: until then the optimizer has no state of
    it.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.late = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return self.late(outputs) if self.trainer.global_step >= 12 else outputs


def run(
    strategy: dict[str, Any],
    trainer: dict[str, Any],
    save: Path | None = None,
    load: Path | None = None,
    kind: type[Saving] = Saving,
) -> dict[str, Any]:
    module = kind(torch.optim.AdamW, lr=0.01)
    module.path = save
    return train(fsdp(**strategy), module, twice_ten_batches(), ckpt_path=load, **trainer)


def train_resumable(
    save: Path | None,
    load: Path | None,
    strategy: dict[str, Any],
    trainer: dict[str, Any],
    kind: type[Saving] = Saving,
) -> Any:
    """With accumulation the run is saved in the middle of a step."""
    if load is not None:
        # A save that was killed leaves this beside the checkpoint.
        (load.parent / ".half.ckpt.part").mkdir(exist_ok=True)
    found = run(strategy, trainer, save, load, kind)
    return found["losses"], [
        found["weights"],
        without_times(found["state"]),
        found["totals"].bytes_sent,
    ]


def saved_folder(path: Path) -> None:
    run(UPDATES, {}, path)


def killed_save(path: Path) -> Any:
    """The checkpoint from which SLURM would have Lightning resume, after a save that has not come
    to its last step.
    """
    with patch.object(mesh_strategy, "replace"):
        saved_folder(path)
    return Trainer(
        accelerator="cpu", default_root_dir=path.parent, logger=False
    )._checkpoint_connector._hpc_resume_path


def test_lightning_does_not_resume_from_what_a_killed_save_leaves(
    ranks: Any, tmp_path: Path
) -> None:
    assert ranks(4).run(killed_save, tmp_path / "hpc_ckpt_1.ckpt") == [None] * 4
    assert any(name.suffix == ".part" for name in tmp_path.iterdir())


def load_damaged(path: Path) -> str:
    with pytest.raises((CheckpointError, FileNotFoundError)) as raised:
        run(UPDATES, {"limit_train_batches": 1}, None, path)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("is_file", [True, False])
def test_a_save_after_one_that_was_killed_at_its_end(tmp_path: Path, is_file: bool) -> None:
    new = tmp_path / "new"
    path = tmp_path / "x.ckpt"
    old = tmp_path / ".x.old"
    with patch.object(files, "beside", lambda *_: str(old)):
        for one in (new, path):
            one.mkdir()
        old.write_text("left") if is_file else old.mkdir()
        (new / "piece").write_text("of now")
        files.replace(new, path)
    assert [one.name for one in tmp_path.iterdir()] == ["x.ckpt"]
    assert (path / "piece").read_text() == "of now"


def test_a_file_takes_the_place_of_a_checkpoint_and_of_no_other_folder(tmp_path: Path) -> None:
    new = tmp_path / "new"
    checkpoint = tmp_path / "x.ckpt"
    other = tmp_path / "results"
    for folder, name in ((checkpoint, "meta.pt"), (other, "precious")):
        folder.mkdir()
        (folder / name).write_text("of before")
    new.write_text("of now")
    with pytest.raises(IsADirectoryError):
        files.replace(new, other)
    files.replace(new, checkpoint)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["results", "x.ckpt"]
    assert checkpoint.read_text() == "of now"


def test_a_run_saves_in_one_file_where_a_folder_was(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    ranks(4).run(saved_folder, path)
    assert path.is_dir()
    ranks(4).run(run, {**UPDATES, "save_distributed_checkpoint": False}, {}, path)
    assert sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith(".")) == [
        "x.ckpt",
        "x.ckpt.dct",
    ]
    assert "state_dict" in torch.load(path, weights_only=False)


def test_a_damaged_piece_of_a_folder_is_named_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    """One bit of one rank's tensors, of the list of pieces, of the checksums; and a piece that is
    missing.
    """
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
    names = {
        name: parameter for parameter, name in parameter_names(trainer.lightning_module).items()
    }
    shapes = {name: list(local_of(parameter).shape) for name, parameter in names.items()}
    weights = {name: local_of(parameter).clone() for name, parameter in names.items()}
    residuals = {} if synchronizer is None else dict(synchronizer.feedback.residuals.state_dict())
    return {"weights": weights, "residuals": residuals, "owned": {}, "shards": shapes}


def start(kind: str, replicas: int, path: Path) -> dict[str, Any]:
    plain: dict[str, Strategy] = {"ddp": DDPStrategy(), "dct": DCTStrategy(lifelines=False)}
    strategy = plain[kind] if kind in plain else fsdp(replicas=replicas)
    settings = {
        "callbacks": [begun := AtStart(held)],
        "ckpt_path": path,
        "max_steps": 11,
        "limit_val_batches": 0,
    }
    train(strategy, Plain(torch.optim.AdamW, lr=0.01), **settings)
    return begun.seen


def mean_of(states: list[dict[str, Any]], shards: int, part: str) -> dict[str, torch.Tensor]:
    """The mean over replicas of what whole replicas hold."""
    replicas = [
        put_together(states[first : first + shards]) for first in range(0, len(states), shards)
    ]
    names = {name: state[part][name] for state in replicas for name in state[part]}
    return {
        name: sum(state[part][name].double() for state in replicas if name in state[part])
        / len(replicas)
        for name in names
    }


@pytest.mark.parametrize(
    ("kind", "world_size", "replicas"),
    [("fsdp", 4, 4), ("fsdp", 2, 1), ("dct", 2, 2), ("ddp", 2, 2)],
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
        assert_weights_equal(
            started[0]["weights"], {name: shared[name] for name in started[0]["weights"]}
        )
        return
    expected = mean_of(states, 2, "weights")
    expected = {name: tensor for name, tensor in expected.items() if name in states[0]["shards"]}
    assert any(float(tensor.abs().max()) > 0 for tensor in expected.values())
    assert_weights_close(expected, mean_of(started, world_size // replicas, "weights"))


class Backwards(Saving):
    """Its optimizer has its parameters in another order than the model, without the first layer's,
    which is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(self.model[2:].parameters())[::-1], lr=0.01)


class Known(Callback):
    """Remembers what the optimizer knows of each parameter when training starts and when it
    ends.
    """

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        states = trainer.optimizers[0].state
        names = dict(pl_module.named_parameters())
        known = {name: states[one] for name, one in names.items() if states.get(one)}
        self.at_end = {
            f"{name} {key}": whole(one) for name in known for key, one in known[name].items()
        }
        self.at_start = getattr(self, "at_start", self.at_end)

    on_train_end = on_train_start


def known_of(kind: str, save: Path | None, load: Path | None) -> dict[str, Tensor]:
    strategy = (
        DDPStrategy() if kind == "ddp" else fsdp(replicas=1, save_distributed_checkpoint=False)
    )
    module = Backwards()
    known = Known()
    module.path = save
    train(strategy, module, twice_ten_batches(), callbacks=[known], ckpt_path=load)
    return known.at_end if load is None else known.at_start


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_an_optimizer_in_a_file_knows_the_same_parameters(
    ranks: Any, tmp_path: Path, first: str, then: str
) -> None:
    path = tmp_path / "half.ckpt"
    saved = ranks(2).run(known_of, first, path, None)[0]
    assert len(saved) > 20
    for loaded in ranks(2).run(known_of, then, None, path):
        assert_weights_equal(saved, loaded)


def weights_alone(path: Path, in_one_file: bool) -> tuple[float, float, str]:
    strategy = fsdp(replicas=1, save_distributed_checkpoint=not in_one_file)
    module = Plain(torch.optim.Adam, lr=0.01)
    trainer = trainer_for(strategy)
    data = loader(2, 40, 8)
    trainer.fit(module, loader(6, 40, 8))
    trainer.save_checkpoint(path, weights_only=True)
    scores = []
    for ckpt_path in (None, path):
        scores.append(
            trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)[0]["val_loss"]
        )
        for parameter in module.parameters():
            torch.nn.init.zeros_(local_of(parameter.detach()))
    with pytest.raises(KeyError) as raised:
        trainer_for(fsdp(replicas=1)).fit(
            Plain(torch.optim.Adam, lr=0.01), loader(6, 40, 8), ckpt_path=path
        )
    return scores[0], scores[1], str(raised.value)


@pytest.mark.parametrize("in_one_file", [False, True])
def test_weights_alone_are_evaluated_and_not_trained_on(
    ranks: Any, tmp_path: Path, in_one_file: bool
) -> None:
    for before, loaded, said in ranks(2).run(weights_alone, tmp_path / "x.ckpt", in_one_file):
        assert before == loaded
        assert "save_weights_only" in said


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
