"""Every way to a checkpoint, and what happens when something of it is missing."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.optim import ZeroRedundancyOptimizer

from distributed.harness import RankFailure
from distributed.resuming import AtStart, state_of
from distributed.training import (
    Module,
    Run,
    Watch,
    assert_replicas_equal,
    assert_weights_equal,
    fit,
    loader,
    message_of,
    rank,
    summary,
    trainer_for,
)
from embedding.hybrid import Hybrid, batches, load, together, whole
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint.files import AtomicCheckpointIO
from lightning_dct.checkpoint.format import state_path
from reliability.killed_training import BATCHES, Resumable
from sync.test_run_length import TwoNets

SETTINGS: dict[str, Any] = {"density": 0.05, "refresh_every": 4}


class Observing(AtomicCheckpointIO):
    """Looks, whenever one of Lightning's files is about to be written or removed, what those that
    are there point at.

    ``missing`` are files of ranks that some of the checkpoints that were ``seen`` pointed at.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.seen = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if str(path).endswith(".ckpt"):
            self.look(Path(path).parent)
            self.check(path, checkpoint["lightning_dct"])
        super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        if not str(path).endswith(".ckpt"):
            self.look(Path(path).parent.parent)
        # The last moment that a kill may have left behind: something newer is there.
        elif not list(Path(path).parent.glob("*.ckpt")):
            self.missing.append(f"any checkpoint after {path} was removed")

    def look(self, folder: Path) -> None:
        for path in folder.glob("*.ckpt"):
            self.check(path, torch.load(path, weights_only=True)["lightning_dct"])

    def check(self, path: Any, manifest: dict[str, Any]) -> None:
        self.seen += 1
        files = [state_path(str(path), manifest, of) for of in range(manifest["world_size"])]
        self.missing += [file for file in files if not os.path.exists(file)]


def save_in_background(folder: Path, settings: dict[str, Any]) -> tuple[list[str], int]:
    inner = Observing()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **settings)
    fit(
        DCTStrategy(compress="gradients", **SETTINGS),
        Module(),
        12,
        enable_checkpointing=True,
        callbacks=[saver],
        plugins=[AsyncCheckpointIO(inner)],
    )
    if rank() == 0:  # who writes and removes
        inner.look(folder)
    return inner.missing, inner.seen


@pytest.mark.parametrize("settings", [{}, {"save_top_k": 0, "save_last": True}])
def test_what_a_checkpoint_points_at_is_there_first_and_goes_last(
    ranks: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Oracle: the files of both ranks, looked for before each write and after each removal of a
    background thread.
    """
    (missing, seen), _ = ranks(2).run(save_in_background, tmp_path, settings)
    assert missing == []
    assert seen >= 24
    name = "last.ckpt" if settings else "step=12.ckpt"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [name, f"{name}.dct"]
    assert len(list((tmp_path / f"{name}.dct").iterdir())) == 2


class FullDisk(AtomicCheckpointIO):
    """Has room for the first save only."""

    saved = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if "identity" in checkpoint:  # a rank's own file
            self.saved += 1
            if self.saved > 1:
                raise OSError("No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def fail_to_save(folder: Path) -> None:
    saver = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=0, save_last=True)
    settings: dict[str, Any] = {
        "enable_checkpointing": True,
        "callbacks": [saver],
        "plugins": [FullDisk()],
    }
    with pytest.raises(OSError, match="No space left"):
        fit(DCTStrategy(**SETTINGS), Module(), 12, **settings)


def resume_after_failure(path: Path) -> int:
    return fit(DCTStrategy(**SETTINGS), Module(), 12, ckpt_path=path).synchronisations


def test_a_save_that_fails_leaves_the_checkpoint_before_it_whole(
    ranks: Any, tmp_path: Path
) -> None:
    """As when a rank dies during a save: what the others then tidy up must not be files of the old
    checkpoint.
    """
    ranks(2).run(fail_to_save, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt"] == ["last.ckpt"]
    for steps in ranks(2).run(resume_after_failure, tmp_path / "last.ckpt"):
        assert steps > 4


def save_under_two_names(folder: Path) -> None:
    trainer = trainer_for(DCTStrategy(compress="gradients", **SETTINGS))
    trainer.fit(Module(), loader(3, 40, 8))
    trainer.save_checkpoint(folder / f"{rank()}.ckpt")


def test_rank_zero_names_the_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """Oracle: one checkpoint with the files of both ranks, as under SLURM, where ranks choose
    names.
    """
    ranks(2).run(save_under_two_names, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0.ckpt", "0.ckpt.dct"]
    assert len(list((tmp_path / "0.ckpt.dct").iterdir())) == 2


class NamedByRank(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("own", float(self.global_rank + 1))


def choose_the_best(folder: Path) -> str:
    saver = ModelCheckpoint(folder, "{own:.0f}", monitor="own")
    trainer = trainer_for(DCTStrategy(**SETTINGS), callbacks=[saver], enable_checkpointing=True)
    module = NamedByRank()
    trainer.fit(module, loader(3, 40, 8), loader(1, 40, 8))
    return message_of(trainer.validate, module, loader(1, 40, 8), ckpt_path="best")


def test_ranks_that_choose_checkpoints_of_different_names(ranks: Any, tmp_path: Path) -> None:
    """Oracle: both names, which came from a metric that each rank has logged for itself, and what
    to do.
    """
    for message in ranks(2).run(choose_the_best, tmp_path):
        assert (
            f"rank 0 {str(tmp_path / 'own=1.ckpt')!r}, rank 1 {str(tmp_path / 'own=2.ckpt')!r}"
            in message
        )
        assert "`sync_dist=True`" in message
        assert "all machines" not in message


def save_over_a_link(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save rows, train on, and save where a link to the first checkpoint lies."""
    module = Hybrid({"density": 0.2})
    trainer = trainer_for(
        DCTStrategy(compress="gradients", density=0.5, min_tensor_size=1), max_epochs=1
    )
    trainer.fit(module, batches(3))
    trainer.save_checkpoint(folder / "first.ckpt")
    before = whole(module)
    if rank() == 0:
        (folder / "last.ckpt").symlink_to("first.ckpt")
    trainer.strategy.barrier()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(3))
    trainer.save_checkpoint(folder / "last.ckpt")
    return before, whole(module)


def test_a_link_that_is_saved_over_becomes_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the rows at either save; the checkpoint behind the link keeps its own."""
    saved = ranks(2).run(save_over_a_link, tmp_path)
    assert not (tmp_path / "last.ckpt").is_symlink()
    for name, expected in zip(("first", "last"), zip(*saved, strict=True), strict=True):
        loaded = together(ranks(2).run(load, str(tmp_path / f"{name}.ckpt")))
        assert_weights_equal(loaded, together(list(expected)))


class Fails(Callback):
    """Raises on every rank when so many batches are done."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.after:
            raise KeyError("a bug of the user's")


def train(folder: Path, fail_after: int | None, saver: Any, accumulate: int) -> Run:
    callbacks: list[Callback] = [saver]
    if fail_after is not None:
        callbacks.append(Fails(fail_after))
    watch = Watch()
    module = Module(None, torch.optim.Adam, lr=0.01) if accumulate else TwoNets(1, 3)
    strategy = DCTStrategy(compress="gradients", **SETTINGS)
    trainer = trainer_for(
        strategy,
        callbacks=[watch, *callbacks],
        enable_checkpointing=True,
        default_root_dir=folder,
        accumulate_grad_batches=accumulate or 1,
    )
    data = Resumable(loader(BATCHES, 40, 8).dataset.__getitem__)
    if fail_after is None:
        trainer.fit(module, data, ckpt_path="last")
    else:
        with pytest.raises(KeyError):
            trainer.fit(module, data, ckpt_path="last")
    return summary(strategy, module, watch)


def on_exception(folder: Path) -> Callback:
    return OnExceptionCheckpoint(folder)


def with_link(folder: Path) -> Callback:
    return ModelCheckpoint(
        folder, "{step}", save_last="link", save_on_exception=True, every_n_train_steps=100
    )


def fail_and_go_on(folder: Path, make: str, accumulate: int, fail_after: int) -> tuple[Run, Run]:
    whole_run = train(
        folder, None, ModelCheckpoint(folder / "unused", every_n_train_steps=100), accumulate
    )
    train(folder, fail_after, globals()[make](folder / make), accumulate)
    return whole_run, train(folder, None, globals()[make](folder / make), accumulate)


@pytest.mark.parametrize(
    ("make", "accumulate", "fail_after"),
    [("on_exception", 3, 7), ("on_exception", 0, 7), ("with_link", 1, 5)],
)
def test_saved_on_an_exception(
    ranks: Any, tmp_path: Path, make: str, accumulate: int, fail_after: int
) -> None:
    """Oracle: the run without an exception, to the last bit, also in the middle of accumulated
    gradients.
    """
    for whole_run, resumed in ranks(2).run(fail_and_go_on, tmp_path, make, accumulate, fail_after):
        assert resumed.hashes == whole_run.hashes[fail_after:]
        assert_weights_equal(resumed.residuals, whole_run.residuals)
        assert any(float(residual.norm()) for residual in resumed.residuals.values())


def save(folder: Path) -> None:
    trainer = trainer_for(DCTStrategy(compress="gradients", **SETTINGS))
    trainer.fit(Module(), loader(10, 40, 8))
    trainer.save_checkpoint(folder / "a.ckpt")


def resume(path: Path, settings: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    start = AtStart(state_of)
    strategy = DCTStrategy(compress="gradients", **SETTINGS, **settings)
    return fit(
        strategy, Module(), 10, ckpt_path=str(path), max_epochs=2, callbacks=[start]
    ), start.seen


@pytest.mark.parametrize("world_size", [3])
def test_a_missing_file_of_one_rank(ranks: Any, tmp_path: Path, world_size: int) -> None:
    """Oracle: an error with the file's name on every rank, or with ``reset`` a run that goes on
    from zero residuals.
    """
    ranks(2).run(save, tmp_path)
    (gone,) = tmp_path.glob("a.ckpt.dct/*-rank-1-of-2.pt")
    gone.unlink()
    for message in ranks(world_size).run(message_of, resume, tmp_path / "a.ckpt", {}):
        assert repr(str(gone)) in message
        assert "missing_state='reset'" in message
    results = ranks(world_size).run(resume, tmp_path / "a.ckpt", {"missing_state": "reset"})
    assert_replicas_equal([run for run, _ in results])
    for run, start in results:
        assert start["synchronisations"] == 10
        assert run.synchronisations == 20
        assert start["residuals"] == {}
        assert start["thresholds"] == {"values": {}, "targets": {}}
        assert any(float(residual.norm()) for residual in run.residuals.values())


def save_tables(folder: Path) -> None:
    trainer = trainer_for(DCTStrategy(compress="gradients", density=0.5, min_tensor_size=1))
    trainer.fit(Hybrid({"density": 0.1}), batches(5))
    trainer.save_checkpoint(folder / "a.ckpt")


def resume_tables(path: Path) -> dict[str, Any]:
    module = Hybrid({"density": 0.1})
    strategy = DCTStrategy(
        compress="gradients", density=0.5, min_tensor_size=1, missing_state="reset"
    )
    trainer_for(strategy, max_epochs=2).fit(module, batches(5), ckpt_path=str(path))
    return {name: value for name, value in whole(module).items() if not name[0].isdigit()}


def test_tables_go_on_without_what_was_held_back_but_not_without_rows(
    ranks: Any, tmp_path: Path
) -> None:
    """Oracle: both ends of every pair start alike, or decoding fails; missing rows are an error."""
    ranks(2).run(save_tables, tmp_path)
    for file in tmp_path.glob("a.ckpt.dct/*.pt"):
        file.unlink()
    first, second = ranks(2).run(resume_tables, tmp_path / "a.ckpt")
    assert_weights_equal(first, second)
    shutil.rmtree(tmp_path / "a.ckpt.dct")
    with pytest.raises(RankFailure, match="embedding rows should be in"):
        ranks(2).run(resume_tables, tmp_path / "a.ckpt")


class OnNodesOfTheirOwn(DCTStrategy):
    """Each rank takes itself for the only one of its node."""

    local_rank = 0

    @property
    def node_rank(self) -> int:
        return self.global_rank


class SavesOften(Callback):
    """Saves one checkpoint again and again, and another once, which it removes."""

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.save_checkpoint("last.ckpt")
        if batch_idx == 2:
            trainer.save_checkpoint("old.ckpt")
        if batch_idx == 3:
            trainer.strategy.remove_checkpoint("old.ckpt")


class LooksForTheNewest(AtomicCheckpointIO):
    """As a script would that resumes: what has changed last, before Lightning's file is written and
    after the save.
    """

    def __init__(self) -> None:
        self.newest: list[str] = []

    def look(self, folder: Path) -> None:
        times = {path.name: path.stat().st_mtime for path in folder.glob("*ckpt*")}
        self.newest.append(max(times, key=lambda name: times[name]))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        folder = Path(path).parent
        if "identity" not in checkpoint and list(folder.glob("*.ckpt")):
            self.look(folder)
        super().save_checkpoint(checkpoint, path, storage_options)


class SavesTwo(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name in ("last.ckpt", f"{batch_idx}.ckpt"):
            trainer.save_checkpoint(self.folder / name)
            if trainer.is_global_zero:
                trainer.strategy.checkpoint_io.look(self.folder)  # type: ignore[attr-defined]


def newest_of_all_times(folder: Path) -> list[str]:
    io = LooksForTheNewest()
    trainer_for(DCTStrategy(**SETTINGS), callbacks=[SavesTwo(folder)], plugins=[io]).fit(
        Module(), loader(3, 40, 8)
    )
    return io.newest


def test_what_has_changed_last_is_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """Oracle: never a folder, also in the middle of a save, where a kill may leave it."""
    newest, _ = ranks(2).run(newest_of_all_times, tmp_path)
    assert [name for name in newest if name.endswith(".dct")] == []
    assert newest[0] == "last.ckpt"
    assert newest[-1] == "2.ckpt"
    assert len(newest) == 11


def save_often(folder: Path, has_own_disk: bool) -> list[str]:
    disk = folder / str(rank() if has_own_disk else 0)
    before = os.getcwd()
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    try:
        kind = OnNodesOfTheirOwn(density=0.2, local_steps=2)
        trainer_for(kind, callbacks=[SavesOften()]).fit(Module(), loader(6, 40, 8))
    finally:
        os.chdir(before)
    return sorted(str(file.relative_to(disk)) for file in disk.rglob("*") if file.is_file())


@pytest.mark.parametrize("has_own_disk", [True, False])
def test_no_node_keeps_what_is_outdated(ranks: Any, tmp_path: Path, has_own_disk: bool) -> None:
    """The file of a rank of another node goes one save later, because there is no other moment that
    it knows of.
    """
    first, second = ranks(2).run(save_often, tmp_path, has_own_disk)
    saved = [Path(file).name for file in second if "rank-1-of-2" in file]
    assert "last.ckpt" in first
    assert not any(file.startswith("old.ckpt") for file in first + second)
    assert sorted({name.partition("-")[0] for name in saved}) == [
        f"{step:012d}" for step in ([5, 6] if has_own_disk else [6])
    ]
    assert len(first) == (2 if has_own_disk else 3)


def save_with_spread_optimizer(path: Path) -> list[str]:
    module: Any = Module(
        None, lambda parameters, lr: ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)
    )
    module._ddp_params_and_buffers_to_ignore = ["model.gain"]
    # Where each rank trains weights of its own, such an optimizer is refused.
    trainer = trainer_for(DCTStrategy(**SETTINGS, compress="gradients"))
    trainer.fit(module, loader(3, 40, 8))
    trainer.save_checkpoint(path)
    return list(module._ddp_params_and_buffers_to_ignore)


def test_an_optimizer_that_only_rank_0_hands_over(ranks: Any, tmp_path: Path) -> None:
    """Oracle: Adam's state of every parameter; and what the user keeps from DistributedDataParallel
    stays kept.
    """
    ignored = ranks(2).run(save_with_spread_optimizer, tmp_path / "a.ckpt")
    (optimizer,) = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]
    assert len(optimizer["state"]) == 5
    assert ignored == [["model.gain"]] * 2
