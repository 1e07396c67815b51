"""Oracle: the state that a rank saves."""

import statistics
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from distributed.training import Module, Watch, fit
from lightning_dct import DCTStrategy
from lightning_dct.sync.synchronizer import TensorFigures

SIZES = {"model.gain": 1, "model.first.weight": 960, "model.first.bias": 24}
SIZES |= {"model.second.weight": 192, "model.second.bias": 8}
# At 10%, which is enough to cut the larger one into pieces for two owners.
SENT = {"model.first.weight": 96, "model.second.weight": 20}


def look(trainer: Trainer) -> list[TensorFigures]:
    return trainer.strategy.synchronizer.figures_by_tensor()


def train(exchange: str) -> Any:
    return fit(
        DCTStrategy(
            compress="gradients",
            density=0.1,
            value_format="bf16",
            exchange=exchange,
            min_tensor_size=128,
        ),
        Module(),
        4,
        watch=Watch(look=look),
    )


@pytest.mark.parametrize("exchange", ["all_gather", "two_phase"])
def test_figures_are_those_of_the_state(ranks: Any, exchange: str) -> None:
    cut = False
    for run in ranks(2).run(train, exchange):
        figures = {figure.name: figure for figure in run.seen[-1]}
        assert {name: figure.entries for name, figure in figures.items()} == SIZES
        thresholds = run.state["thresholds"]["values"]
        for name, size in SIZES.items():
            assert figures[name].density == SENT.get(name, size) / size
            own = [
                value
                for label, value in thresholds.items()
                if label == name or label.startswith(f"{name}[")
            ]
            cut |= len(own) > 1
            assert figures[name].threshold == (statistics.median(own) if name in SENT else None)
            held = [run.residuals[name]] if name in run.residuals else []
            held += list(run.state["owned"].get(name, {}).values())
            norm = float(torch.cat(held).norm()) if held else 0.0
            assert figures[name].residual_norm == pytest.approx(norm, rel=1e-5)
        assert figures["model.first.weight"].residual_norm > 0
    assert cut == (exchange == "two_phase")
