"""A pipeline trains as one process does that runs the same split points, for every schedule and
format.
"""

from typing import Any

import pytest
import torch

from distributed.training import trainer_for
from lightning_dct import SplitPoint
from lightning_dct.traffic import Traffic
from pipeline.split_models import (
    DENSE,
    SplitModule,
    batches,
    strategy_for,
    train,
    train_alone,
    worst,
)

BF16 = {"density": 0.2}
INT8 = {"density": 0.1, "forward_format": "int8", "backward_format": "int8", "refresh_every": 2}
INT4 = {"density": 0.3, "forward_format": "int4", "backward_format": "int4"}
FP32 = {"density": 0.25, "forward_format": "fp32", "backward_format": "fp32"}
RANDOM = {"kind": "random", "density": 0.3, "forward_format": "int8"}
SUBSPACE = {"kind": "subspace", "rank": 7, "num_tokens": 2}
MEAN = {"kind": "subspace", "rank": 7, "forward_format": "int4", "backward_format": "bf16"}
LEARNED = {"kind": "autoencoder", "density": 0.3, "forward_format": "int8"}
MIXED = {"density": 0.5, "forward_format": "int8", "backward_format": "fp32"}

CASES = [
    (2, 2, "gpipe", 2, DENSE),
    (2, 2, "1f1b", 2, BF16),
    (2, 2, "interleaved_1f1b", 4, INT4),
    (3, 3, "gpipe", 3, FP32),
    (4, 2, "1f1b", 2, INT8),
    (4, 4, "1f1b", 4, MIXED),
    (2, 2, "gpipe", 2, RANDOM),
    (4, 2, "interleaved_1f1b", 4, SUBSPACE),
    (3, 3, "1f1b", 3, MEAN),
    (2, 2, "1f1b", 2, LEARNED),
]


@pytest.mark.parametrize(("world", "stages", "schedule", "pieces", "split"), CASES)
def test_pipeline_equals_one_process(
    ranks: Any, world: int, stages: int, schedule: str, pieces: int, split: dict[str, Any]
) -> None:
    """Oracle: the Sequential in one process, micro-batch by micro-batch, its split points masking
    and rounding.
    """
    runs = ranks(world).run(train, stages, schedule, pieces, split)
    losses, weights = train_alone(pieces, split, width=world // stages)
    for rank, run in enumerate(runs):
        assert run.losses == pytest.approx(losses[rank // stages], abs=1e-6)
        assert worst(run.weights, weights) < 1e-6
        assert run.traffic.steps == 6


def train_clipped() -> Any:
    settings = {
        "gradient_clip_val": 0.05,
        "gradient_clip_algorithm": "norm",
        "accumulate_grad_batches": 2,
    }
    return train(
        2, "1f1b", 2, BF16, optimizer=torch.optim.Adam, optimizer_settings={"lr": 0.01}, **settings
    )


def test_clipping_and_accumulation_span_the_stages(ranks: Any) -> None:
    """Oracle: one process that clips the norm of all its gradients, after two batches."""
    runs = ranks(4).run(train_clipped)
    settings = {"optimizer": torch.optim.Adam, "optimizer_settings": {"lr": 0.01}}
    _, weights = train_alone(2, BF16, width=2, accumulate=2, clip=0.05, **settings)
    _, unclipped = train_alone(2, BF16, width=2, accumulate=2, **settings)
    assert worst(runs[0].weights, weights) < 1e-5 < worst(unclipped, weights)
    assert all(worst(run.weights, runs[0].weights) == 0.0 for run in runs)


def traffic_of(split: dict[str, Any]) -> Any:
    return train(2, "1f1b", 2, split, count=3).traffic


@pytest.mark.parametrize("split", [MIXED, RANDOM, SUBSPACE])
def test_one_process_counts_what_a_pipeline_sends(ranks: Any, split: dict[str, Any]) -> None:
    """Oracle: the sum over the pipeline's two ranks."""
    module = SplitModule(2, split)
    counted = Traffic()
    for child in module.network:
        if isinstance(child, SplitPoint):
            child.traffic = counted
    for step in range(3):
        for child in module.network:
            if isinstance(child, SplitPoint):
                child.advance(step)
        for part in range(4):
            module.loss(
                (
                    torch.randn(2, 40, generator=torch.Generator().manual_seed(part)),
                    torch.zeros(2, 8),
                )
            ).backward()
    totals = ranks(2).run(traffic_of, split)
    for name in ("bytes_sent", "bytes_dense", "entries"):
        assert getattr(counted.totals, name) == sum(getattr(one, name) for one in totals), name


def bytes_per_step() -> tuple[int, int]:
    """Bytes that a rank's payloads take and the dense ones would, a training batch."""
    totals = train(2, "1f1b", 2, BF16, count=3).traffic
    return totals.bytes_sent // 3, totals.bytes_dense // 3


def test_bytes_between_stages_are_counted(ranks: Any) -> None:
    """Oracle: the layout's sizes times micro-batches; positions go forward only, and dense is
    fp32.
    """
    first, last = ranks(2).run(bytes_per_step)
    layout = SplitPoint(**BF16).layout((2, 24))
    words, tail = layout.on_the_wire
    assert first == (4 * (4 * words + tail), 4 * 4 * 2 * 24)
    assert last == (4 * 4 * words, 4 * 4 * 2 * 24)


def synchronise_compressed() -> tuple[list[str], float, float, float]:
    strategy = strategy_for(2, density=0.1, min_tensor_size=1)
    module = SplitModule(2, BF16)
    trainer = trainer_for(strategy)
    trainer.fit(module, batches(6, 2))
    totals = strategy.traffic.totals
    names = sorted(strategy.synchronizer.residuals.state_dict())
    return (
        names,
        totals.bytes_dense / totals.bytes_sent,
        strategy.synchronizer.norm(),
        float(sum(parameter.double().sum() for parameter in module.parameters())),
    )


def test_gradients_of_each_stage_are_compressed(ranks: Any) -> None:
    """Oracle: residuals of this stage's parameters on its ranks, a ratio above 1, and equal weights
    everywhere.
    """
    told = ranks(4).run(synchronise_compressed)
    first = ["network.0.bias", "network.0.weight"]
    last = ["network.3.bias", "network.3.weight"]
    assert [names for names, *_ in told] == [first, last, first, last]
    assert all(ratio > 3 and norm > 0 for _, ratio, norm, _ in told)
    assert len({total for *_, total in told}) == 1
