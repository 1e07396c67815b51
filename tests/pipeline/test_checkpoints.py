"""One ordinary checkpoint of the whole model, whatever the number of stages, and runs that go on
from it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.resuming import AtStart, SaveAndStop
from distributed.training import Watch, trainer_for
from lightning_dct import DCTStrategy
from lightning_dct.checkpoint.reading import merge_states
from pipeline.split_models import (
    BATCH_SIZE,
    Outcome,
    SplitModule,
    batches,
    outcome,
    strategy_for,
    train,
    worst,
)

SPLIT = {"density": 0.2, "forward_format": "int8", "refresh_every": 3}
SUBSPACE = {"kind": "subspace", "rank": 7, "num_tokens": 2}
COMPRESSED = {"compress": "gradients", "density": 0.2, "min_tensor_size": 1, "refresh_every": 4}
ADAM: dict[str, Any] = {"optimizer": torch.optim.Adam, "optimizer_settings": {"lr": 0.01}}


def run(
    stages: int,
    schedule: str,
    pieces: int,
    stop: Path | None = None,
    resume: Path | None = None,
    split: dict[str, Any] = SPLIT,
) -> Outcome:
    """Two epochs of four batches, or the first of them, or the second."""
    return train(
        stages,
        schedule,
        pieces,
        split,
        count=4,
        strategy=COMPRESSED,
        max_epochs=2,
        callbacks=() if stop is None else (SaveAndStop(stop, 4),),
        ckpt_path=None if resume is None else str(resume),
        **ADAM,
    )


def train_resumable(save: Path | None, load: Path | None, *settings: Any) -> Any:
    found = run(*settings[:3], save, load, settings[3])
    sent = found.traffic.bytes_sent, found.traffic.refreshes
    return found.hashes, [found.thresholds, found.residuals, None if save else sent]


def fit_alone(path: Path, save: Path) -> tuple[list[Any], int]:
    """Plain Lightning, one process: load, train the second epoch, save."""
    module = SplitModule(2, SPLIT, torch.optim.Adam, lr=0.01)
    trainer = trainer_for("auto", devices=1, max_epochs=2, callbacks=[SaveAndStop(save, 8)])
    trainer.fit(module, batches(4, 1), ckpt_path=str(path))
    return list(trainer.optimizers[0].state.values()), trainer.global_step


def test_checkpoint_goes_to_one_process_and_back(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: names and values of the model that was trained; every parameter's Adam state; runs
    that go on.
    """
    monkeypatch.setenv("RANK", "0")  # whose data the single process reads
    begun = ranks(2).run(run, 2, "1f1b", 2, tmp_path / "pipeline.ckpt")
    saved = torch.load(tmp_path / "pipeline.ckpt", weights_only=True)
    plain = SplitModule(2, SPLIT)
    plain.load_state_dict(saved["state_dict"])
    assert worst(dict(plain.named_parameters()), begun[1].weights) == 0.0
    assert list(saved["state_dict"]) == list(SplitModule(2, SPLIT).state_dict())
    assert plain.network[2].thresholds_in_use() == begun[0].thresholds["network.2"]
    assert sorted(saved["optimizer_states"][0]["state"]) == [0, 1, 2, 3]
    states, steps = fit_alone(tmp_path / "pipeline.ckpt", tmp_path / "alone.ckpt")
    assert len(states) == 4
    assert {int(state["step"]) for state in states} == {steps} == {8}
    onward = ranks(2).run(go_on, tmp_path / "alone.ckpt")
    assert onward[0].losses == onward[1].losses != []
    assert worst(onward[0].weights, onward[1].weights) == 0.0


def go_on(path: Path) -> Outcome:
    return train(2, "1f1b", 2, SPLIT, count=4, max_epochs=3, ckpt_path=str(path), **ADAM)


def leg(
    stages: int, resume: Path | None, save: Path, until: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train up to so many batches and save; what a rank holds back when it begins, and all weights
    in the end.
    """
    strategy = (
        DCTStrategy(**COMPRESSED) if stages == 1 else strategy_for(stages, "1f1b", **COMPRESSED)
    )
    start = AtStart(lambda trainer: trainer.strategy.synchronizer.residuals.state_dict())
    module = SplitModule(2, SPLIT, torch.optim.Adam, lr=0.01)
    trainer = trainer_for(strategy, callbacks=[start, SaveAndStop(save, until)], max_epochs=100)
    trainer.fit(
        module, batches(8, stages, BATCH_SIZE), ckpt_path=None if resume is None else str(resume)
    )
    assert trainer.fit_loop.total_batch_idx + 1 == until
    return start.seen, {name: weight.detach().clone() for name, weight in module.named_parameters()}


def test_chain_of_layouts(ranks: Any, tmp_path: Path) -> None:
    """Oracle: for each change of layout, 2 -> 4 -> 3 -> 1 ranks, the mean of what the ranks before
    it held back.
    """
    resume: Path | None = None
    held_back = []
    for number, (world, stages) in enumerate([(2, 2), (4, 2), (3, 1), (1, 1)], start=1):
        save = tmp_path / f"{number}.ckpt"
        together = ranks(world).run(leg, stages, resume, save, 3 * number)
        if resume is not None:
            before: dict[str, list[Tensor]] = {}
            for file in sorted(Path(f"{resume}.dct").iterdir()):
                for name, residual in torch.load(file, weights_only=True)["residuals"].items():
                    before.setdefault(name, []).append(residual.double())
            after: dict[str, list[Tensor]] = {}
            for begun, _ in together:
                for name, residual in begun.items():
                    after.setdefault(name, []).append(residual.double())
            assert set(before) <= set(after)
            held_back.append(
                sum(float(residual.norm()) for held in before.values() for residual in held)
            )
            for name, held in before.items():
                torch.testing.assert_close(
                    sum(after[name]) / len(after[name]), sum(held) / len(held), rtol=1e-6, atol=1e-9
                )
        assert all(worst(weights, together[0][1]) == 0.0 for _, weights in together)
        resume = save
    # A pipeline that is alone holds nothing back.
    assert held_back[0] == 0.0
    assert min(held_back[1:]) > 0.0


def test_what_every_stage_has_counts_once() -> None:
    """Oracle: the mean over two pipelines of what their last stages have, of a number and of a
    count.
    """
    thresholds: dict[str, Any] = {"values": {}, "targets": {}}
    states = [
        {
            "residuals": {},
            "owned": {},
            "thresholds": thresholds,
            "weights": {"a": torch.tensor(one), "b": count},
        }
        for one, count in (
            (1.0, torch.tensor(0)),
            (2.0, torch.tensor(6)),
            (9.0, torch.tensor(0)),
            (4.0, torch.tensor(6)),
        )
    ]
    assert merge_states(states, stages=2)["weights"] == {
        "a": torch.tensor(3.0),
        "b": torch.tensor(6),
    }


def fit_then_save(path: Path) -> Outcome:
    module = SplitModule(2, SPLIT, torch.optim.Adam, lr=0.01)
    watch = Watch()
    trainer = trainer_for(strategy_for(2), callbacks=[watch])
    trainer.fit(module, batches(2, 2))
    trainer.save_checkpoint(path)
    return outcome(trainer, module, watch)


def test_after_fit_every_rank_has_the_whole_model(ranks: Any, tmp_path: Path) -> None:
    """Oracle: equal weights and thresholds on all ranks, and in a checkpoint, which has Adam's
    state of all stages.
    """
    first, last = ranks(2).run(fit_then_save, tmp_path / "after.ckpt")
    assert worst(first.weights, last.weights) == 0.0
    assert first.thresholds == last.thresholds
    assert first.thresholds["network.2"][0] > 0
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert all(
        torch.equal(saved["state_dict"][name], weight) for name, weight in last.weights.items()
    )
    assert [int(state["step"]) for state in saved["optimizer_states"][0]["state"].values()] == [
        2,
        2,
        2,
        2,
    ]
