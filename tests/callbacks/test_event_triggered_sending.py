"""EventTriggeredSending on real ranks: against the plain reference, conserved, after a restart, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from distributed import reference
from distributed.test_resume import SaveAndStop, twice_ten_batches
from distributed.training import (
    Applied,
    Module,
    Run,
    Watch,
    assert_conserved,
    assert_replicas_equal,
    assert_weights_close,
    assert_weights_equal,
    fit,
    held_back,
    local_gradients,
    noise_loss,
    on_two_nodes,
    perceptron,
    trainer_for,
)
from lightning_dct import DCTStrategy, EventTriggeredSending, ShardedEmbeddingBags
from lightning_dct.traffic import all_reduce_bytes

STEPS = 16


def look(trainer: Trainer) -> tuple[int, int, int]:
    totals = trainer.strategy.traffic.totals
    return trainer.strategy.synchronizer.synchronisations, totals.bytes_sent, totals.bytes_dense


def train(exchange: str, accumulate: int, momentum: str) -> Run:
    strategy = DCTStrategy(
        density=0.2, exchange=exchange, value_format="bf16", refresh_every=1, guard=False, momentum=momentum
    )
    settings: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": accumulate}
    settings |= {"callbacks": [EventTriggeredSending(2.0, at_most=3)], "watch": Watch(accumulate, look)}
    module = Module(None, torch.optim.SGD, lr=0.05, momentum=0.9 if momentum == "correct" else 0.0)
    if exchange != "by_node":
        return fit(strategy, module, STEPS * accumulate, **settings)
    with on_two_nodes():
        return fit(strategy, module, STEPS * accumulate, num_nodes=2, devices=2, **settings)


@pytest.mark.parametrize(
    ("world_size", "exchange", "accumulate", "momentum"),
    [
        (2, "all_gather", 2, "keep"),
        (3, "all_gather", 1, "correct"),
        (3, "sharded", 1, "keep"),
        (4, "by_node", 1, "keep"),
    ],
)
def test_matches_the_plain_reference(
    ranks: Any, world_size: int, exchange: str, accumulate: int, momentum: str
) -> None:
    """Oracle: reference.py, which simulates the ranks in one process with numpy."""
    runs = ranks(world_size).run(train, exchange, accumulate, momentum)
    model = perceptron().double()
    reference.train(
        model,
        noise_loss(world_size, STEPS, accumulate),
        workers=world_size,
        steps=STEPS,
        value_format="bf16",
        density=0.2,
        min_tensor_size=128,
        lr=0.05,
        momentum=0.9 if momentum == "correct" else 0.0,
        exchange=exchange,
        workers_per_node=2,
        correct=momentum == "correct",
        bound=2.0,
        at_most=3,
    )
    expected = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    for run in runs:
        assert_weights_close(expected, run.weights, rtol=1e-11, atol=1e-12)
        # Some steps have sent and some have not; those cost the 16 bytes of the decision, which all-reduces them.
        assert 3 < run.synchronisations < STEPS
        assert len(set(run.hashes)) == run.synchronisations
        assert run.totals.steps == STEPS
        dense = [after[2] - before[2] for before, after in zip(run.seen[:-1], run.seen[1:], strict=True)]
        assert len(set(dense)) == accumulate  # with micro-batches every other has none
        if accumulate == 1 and exchange != "by_node":  # which counts bytes between nodes apart
            sent = [after[1] - before[1] for before, after in zip(run.seen[:-1], run.seen[1:], strict=True)]
            assert min(sent) == all_reduce_bytes(16, world_size)


def train_conserving(settings: dict[str, Any]) -> Any:
    applied = Applied()
    callbacks = [applied, EventTriggeredSending(2.0)]
    with local_gradients() as given:
        run = fit(DCTStrategy(density=0.1, **settings), Module(), STEPS, callbacks=callbacks)
    return run, (given, applied.sums, held_back(run.state, given))


@pytest.mark.parametrize("settings", [{"value_format": "1bit"}, {"find_unused_parameters": True}, {"warmup_steps": 9}])
def test_nothing_is_lost(ranks: Any, settings: dict[str, Any]) -> None:
    """Oracle: the sum of all gradients, those of steps that have sent nothing among them."""
    results = ranks(2).run(train_conserving, settings)
    assert_replicas_equal([run for run, _ in results])
    assert_conserved([sums for _, sums in results])
    assert results[0][0].synchronisations < STEPS


def train_resumable(path: Path, what: str) -> Run:
    strategy, callback = DCTStrategy(density=0.1), EventTriggeredSending(2.0)
    if what == "half":
        watch = Watch()
        trainer_for(strategy, callbacks=[watch, callback, SaveAndStop(path, 10)]).fit(Module(), twice_ten_batches())
        return Run({}, [], watch.hashes)
    ckpt_path = str(path) if what == "resumed" else None
    return fit(strategy, Module(), twice_ten_batches(), ckpt_path=ckpt_path, callbacks=[callback])


def test_resumed_run_equals_the_uninterrupted_one(ranks: Any, tmp_path: Path) -> None:
    """Oracle: 20 batches without a break."""
    whole, half, resumed = (
        ranks(2).run(train_resumable, tmp_path / "half.ckpt", what) for what in ("whole", "half", "resumed")
    )
    assert_replicas_equal(whole)
    for expected, first, run in zip(whole, half, resumed, strict=True):
        assert first.hashes + run.hashes == expected.hashes
        assert len(set(expected.hashes)) < 20
        assert_weights_equal(expected.residuals, run.residuals)


class Broken(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("nan") if batch_idx == 3 else 1.0)


def refused(what: str) -> str:
    callback = EventTriggeredSending(1000.0)
    settings: dict[str, Any] = {"callbacks": [callback]}
    if what == "scaler":
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    module = Broken() if what == "nan" else Module()
    if what == "tables":
        module.tables = ShardedEmbeddingBags([10], 4)
    if what == "sparse":
        module.sparse = nn.Embedding(4, 4, sparse=True)
        module.loss = lambda batch: module.sparse(torch.tensor(1)).sum()
    with pytest.raises(Exception) as caught:
        fit(DCTStrategy(), module, 6, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("scaler", "Use `precision='bf16-mixed'`"),
        ("tables", "does not work with `ShardedEmbeddingBags`"),
        ("sparse", "does not work with sparse gradients"),
        ("nan", "A gradient is infinite or NaN"),
    ],
)
def test_refusals(ranks: Any, what: str, message: str) -> None:
    """Oracle: the message, on every rank."""
    assert all(message in said for said in ranks(2).run(refused, what))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_settings_are_checked(bound: float) -> None:
    with pytest.raises(ValueError, match=r"`EventTriggeredSending\(bound\)` must be above 0"):
        EventTriggeredSending(bound)
    with pytest.raises(TypeError, match="must be a number above 0"):
        EventTriggeredSending("8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be at least 1"):
        EventTriggeredSending(1.0, at_most=0)
