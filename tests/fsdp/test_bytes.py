"""The bytes of sharded runs, between nodes and inside them: counted, and as the plan says beforehand, to the byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from distributed.training import Module, on_two_nodes
from fsdp.training import train
from lightning_dct import DCTConfig, DCTFSDPStrategy
from lightning_dct.cost.forecast import Forecast, layout_of
from lightning_dct.cost.timing import Speed
from lightning_dct.cost.workload import workload_of
from lightning_dct.fsdp.wrapping import units_of
from lightning_dct.sync.setup import parameter_names
from lightning_dct.traffic import TrafficTotals

STEPS = 16
UNIT = 1000


class Uneven(Module):
    """Shards that differ from rank to rank: of 33 rows, of 5, and of 1, which the second rank has nothing of."""

    def __init__(self) -> None:
        layers = [nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 50), nn.Linear(50, 5), nn.Linear(5, 1), nn.Linear(1, 8)]
        super().__init__(nn.Sequential(*layers), torch.optim.Adam, lr=0.01)
        self.model[2].bias.requires_grad_(False)


def count(replicas: int, settings: dict[str, Any]) -> TrafficTotals:
    with on_two_nodes():
        strategy = DCTFSDPStrategy(replicas=replicas, unit=UNIT, lifelines=False, **settings)
        return train(strategy, Uneven(), STEPS, devices=2, num_nodes=2)["totals"]


@pytest.mark.parametrize(
    ("replicas", "exchange", "settings"),
    [
        (2, "all_gather", {"density": 0.2, "local_steps": 4, "warmup_steps": 0, "min_tensor_size": 20}),
        (4, "by_node", {"density": 0.1, "local_steps": 4, "warmup_steps": 0, "min_tensor_size": 100}),
    ],
)
def test_the_plan_says_what_each_rank_counts(
    ranks: Any, replicas: int, exchange: str, settings: dict[str, Any]
) -> None:
    totals = ranks(4).run(count, replicas, {"exchange": exchange, **settings})
    config, module = DCTConfig(**settings), Uneven()
    names = parameter_names(module)
    units = [[names[parameter] for parameter in own] for own in units_of(module, UNIT).values()]
    workload = replace(workload_of(module), units=units)
    plan = Forecast(config, workload, layout_of(4, 2), 1e9, Speed(0, 0, 0, ""), shards=4 // replicas)
    dense, row = plan.rows[0], plan.row(exchange)
    rounds = STEPS // row.local_steps
    assert [counted.bytes_sent for counted in totals] == [rounds * sent.between for sent in row.step.sent]
    assert [counted.bytes_inside_node for counted in totals] == [rounds * sent.inside for sent in row.step.sent]
    assert [counted.bytes_dense for counted in totals] == [STEPS * sent.between for sent in dense.step.sent]
    most = max(totals, key=lambda counted: counted.bytes_sent)
    assert row.ratio == pytest.approx(most.compression_ratio)
