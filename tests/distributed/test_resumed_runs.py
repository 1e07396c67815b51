"""A resumed run equals the uninterrupted one to the last bit, whatever trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import test_accordion as accordion
from differences import assert_same
from distributed import test_loss_scaling as loss_scaling
from distributed.resuming import fit_half
from distributed.training import Module, rank
from embedding import test_growing as growing
from embedding import test_hybrid as hybrid
from embedding import test_pruning as pruning
from experiments import test_error_averaging as error_averaging
from fsdp import test_checkpoints as fsdp
from lightning_dct import DCTStrategy
from one_card import DEVICE
from pipeline import test_checkpoints as pipeline
from sync import test_buffers as buffers
from sync import test_entrance as entrance
from sync import test_plain_loop as plain_loop
from sync import test_resume_updates as updates
from sync import test_run_length as run_length

slow = pytest.mark.slow
# torch's SGD adds a sparse momentum in no fixed order on a GPU.
not_on_gpu = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the order of sums differs from run to run"
)


def train(
    save: Path | None, load: Path | None, strategy: dict[str, Any], trainer: dict[str, Any]
) -> Any:
    return fit_half(save, load, DCTStrategy(**strategy), **trainer)


def gradients(trainer: dict[str, Any] | None = None, **strategy: Any) -> tuple[Any, ...]:
    return (
        2,
        train,
        {"compress": "gradients", "density": 0.05, "refresh_every": 4, **strategy},
        trainer or {},
    )


def of_updates(trainer: dict[str, Any] | None = None, **strategy: Any) -> tuple[Any, ...]:
    """They are saved in the middle of a round."""
    return 2, train, {**updates.SETTINGS, **strategy}, trainer or {}


def train_clipped(save: Path | None, load: Path | None) -> Any:
    """Of SGD coherence is measured for clipping alone: also in the first step after the resume."""
    module = Module(None, torch.optim.SGD, lr=0.1)
    return fit_half(
        save, load, DCTStrategy(local_steps=1, warmup_steps=0), module, gradient_clip_val=0.01
    )


class Opposed(Module):
    """Ranks pull in opposite directions, so what they have not sent is held back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        towards = 3.0 if rank() else -3.0
        pull = sum(((weight - towards) ** 2).mean() for weight in self.parameters())
        return super().training_step(batch, batch_idx) + pull


def train_opposed(save: Path | None, load: Path | None) -> Any:
    strategy = DCTStrategy(local_steps=1, warmup_steps=6, density=0.2)
    result = fit_half(save, load, strategy, Opposed(None, torch.optim.Adam, lr=0.01))
    assert strategy.updates.weights.held
    return result


# The number of ranks, what they train, and its arguments after the two files.
CASES: dict[str, tuple[Any, ...]] = {
    "1bit": gradients(value_format="1bit"),
    "accumulation": gradients(
        {"accumulate_grad_batches": 2}, value_format="bf16", bucket_cap_mb=0.0005
    ),
    "bf16-true": gradients({"precision": "bf16-true"}, value_format="2bit"),
    "owners": gradients(exchange="two_phase", density=0.2, bucket_cap_mb=0.0005),
    "updates on their way": of_updates(overlap_steps=4, exchange="two_phase", local_steps=5),
    "updates, accumulation": of_updates({"accumulate_grad_batches": 3}, value_format="2bit"),
    "updates, bf16-true": of_updates({"precision": "bf16-true"}, local_steps=64),
    "updates, 64-true": of_updates({"precision": "64-true"}),
    "updates, clipped by the norm of their mean": (2, train_clipped),
    "updates, ranks that pull in opposite directions": (2, train_opposed),
    "buffers of all kinds": (2, buffers.train_with_buffers),
    "updates, loss scales of their own": (2, loss_scaling.train_updates),
    "a validation": (2, updates.train_normalised),
    "a layer that is frozen by then": (2, updates.train_freezing),
    "a run of unknown length": (2, run_length.train_counting),
    "optimizers that are stepped by hand": (2, run_length.two_nets),
    "bare optimizers": (2, entrance.train_bare),
    "an optimizer inside another": (2, entrance.train_sharp),
    "Accordion, updates": (2, accordion.train_resumable, "updates"),
    "Accordion, gradients": (2, accordion.train_resumable, "gradients"),
    "error averaging": (2, error_averaging.train_resumable),
    **{
        f"a loop, {settings}": (2, plain_loop.train_a_loop, settings)
        for settings in plain_loop.SETTINGS
    },
    # The first step after the save refreshes the thresholds of both.
    "a loop of two optimizers": (
        2,
        plain_loop.train_a_loop,
        {"local_steps": 1, "refresh_every": 22},
        2,
    ),
    "a loop of unknown length": (2, plain_loop.train_a_loop_of_unknown_length),
    "tables": (2, hybrid.train_resumable, "adagrad", hybrid.SMALL_CACHE),
    "tables, 3 ranks": (3, hybrid.train_resumable, "sgd", hybrid.FEW),
    "tables, momentum": (2, hybrid.train_resumable, "momentum", hybrid.FEW),
    "growing tables": (2, growing.train_resumable, "adagrad", growing.TIGHT),
    "growing tables, 3 ranks": (
        3,
        growing.train_resumable,
        "row-wise adagrad",
        {**growing.TIGHT, "admit_after": 2},
    ),
    "growing tables, alone": (1, growing.train_resumable, "adagrad", growing.TIGHT),
    "pruned tables": (2, pruning.train_resumable, "adagrad", 4),
    "tables before they are pruned": (2, pruning.train_resumable, "row-wise adagrad", 8),
    "pruned tables, 3 ranks": (3, pruning.train_resumable, "sgd", 4),
    "a pipeline": (2, pipeline.train_resumable, 2, "interleaved_1f1b", 4, pipeline.SUBSPACE),
    "pipelines, 4 ranks": (4, pipeline.train_resumable, 2, "1f1b", 2, pipeline.SPLIT),
    "shards, 4 ranks": (
        *(
            4,
            fsdp.train_resumable,
            {**fsdp.UPDATES, "overlap_steps": 2, "save_distributed_checkpoint": False},
        ),
        {"accumulate_grad_batches": 4},
    ),
    "shards with owners, 4 ranks": (
        *(4, fsdp.train_resumable, {**fsdp.UPDATES, "exchange": "two_phase", "refresh_every": 4}),
        {},
    ),
    "shards, a layer without gradients so far": (
        2,
        fsdp.train_resumable,
        {**fsdp.UPDATES, "unit": 300},
        {},
        fsdp.Late,
    ),
}
# One of each kind.
QUICK = {
    "1bit",
    "owners",
    "updates on their way",
    "updates, loss scales of their own",
    "a validation",
    "tables",
}
QUICK |= {
    "a run of unknown length",
    "Accordion, updates",
    "growing tables",
    "pruned tables",
    "a pipeline",
}
QUICK |= {"updates, 64-true", "buffers of all kinds", "an optimizer inside another"}
QUICK |= {
    f"a loop, {plain_loop.SETTINGS[-1]}",
    "a loop of unknown length",
    "a loop of two optimizers",
}
MARKS = {name: [slow] for name in CASES.keys() - QUICK}
MARKS["tables, momentum"].append(not_on_gpu)


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], id=name, marks=MARKS.get(name, ())) for name in CASES]
)
def test_resumed_run_equals_the_uninterrupted_one(
    ranks: Any, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    """Oracle: the run without a break: what each batch has shown, and all that each rank holds in
    the end.
    """
    world_size, function, *arguments = case

    def run(save: Path | None, load: Path | None) -> Any:
        return ranks(world_size).run(function, save, load, *arguments)

    path = tmp_path / "half.ckpt"
    whole = run(None, None)
    begun = run(path, None)
    resumed = run(None, path)
    for (shown, held), (first, _), (rest, found) in zip(whole, begun, resumed, strict=True):
        assert first + rest == shown
        assert_same(held, found)
    if world_size > 1:
        with pytest.raises(AssertionError):  # there is something to lose: each rank holds its own
            assert_same(resumed[0][1], resumed[1][1])
