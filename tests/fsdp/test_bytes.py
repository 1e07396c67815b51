"""The bytes of sharded runs, between nodes and inside them, are counted to the byte."""

from typing import Any

import pytest
import torch
from torch import nn

from distributed.training import Module, on_two_nodes
from fsdp.training import train
from lightning_dct import DCTConfig, DCTFSDPStrategy
from lightning_dct.cost.forecast import compressed_step, dense_step
from lightning_dct.cost.workload import Workload
from lightning_dct.exchange.factory import NodeLayout
from lightning_dct.traffic import TrafficTotals

STEPS = 16
UNIT = 1000


class Uneven(Module):
    """Shards that differ from rank to rank: of 33 rows, of 5, and of 1, which the second rank has
    nothing of.
    """

    def __init__(self) -> None:
        layers = [
            nn.Linear(40, 33),
            nn.Tanh(),
            nn.Linear(33, 50),
            nn.Linear(50, 5),
            nn.Linear(5, 1),
            nn.Linear(1, 8),
        ]
        super().__init__(nn.Sequential(*layers), torch.optim.Adam, lr=0.01)
        self.model[2].bias.requires_grad_(False)


def count(replicas: int, settings: dict[str, Any]) -> TrafficTotals:
    with on_two_nodes():
        strategy = DCTFSDPStrategy(replicas=replicas, unit=UNIT, lifelines=False, **settings)
        return train(strategy, Uneven(), STEPS, devices=2, num_nodes=2)["totals"]


def shard(parameter: nn.Parameter, shards: int, place: int) -> nn.Parameter:
    """FSDP2's rule, as of ``torch.chunk``: the last ranks may hold less, or nothing."""
    rows = -(-parameter.shape[0] // shards)
    return nn.Parameter(
        parameter.detach()[place * rows : (place + 1) * rows], parameter.requires_grad
    )


# Averages of second moments would be counted, too.
PLAIN = {"share_second_moments": False}


@pytest.mark.parametrize(
    ("replicas", "exchange", "settings"),
    [
        (
            2,
            "all_gather",
            {"density": 0.2, "local_steps": 4, "warmup_steps": 0, "min_tensor_size": 20, **PLAIN},
        ),
        (
            4,
            "hierarchical",
            {"density": 0.1, "local_steps": 4, "warmup_steps": 0, "min_tensor_size": 100, **PLAIN},
        ),
    ],
)
def test_each_rank_counts_its_shards(
    ranks: Any, replicas: int, exchange: str, settings: dict[str, Any]
) -> None:
    """Oracle: the plan's bytes for whole tensors of the size of shards, which ranks in the same
    place exchange.

    FSDP gathers each parameter twice and reduces its gradient, padded to the largest shard, inside
    a replica.
    """
    totals = ranks(4).run(count, replicas, {"exchange": exchange, **settings})
    config = DCTConfig(**settings)
    parameters = dict(Uneven().named_parameters())
    shards = 4 // replicas
    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    padded = [
        (shard(one, shards, 0).numel(), 3 if one.requires_grad else 2)
        for one in parameters.values()
    ]
    inside = STEPS * sum(4 * times * size * (shards - 1) for size, times in padded)
    for rank, counted in enumerate(totals):
        replica, place = divmod(rank, shards)
        own = Workload({name: shard(one, shards, place) for name, one in parameters.items()}, {})
        peers = NodeLayout(places[place::shards])
        between_nodes, on_node = compressed_step(exchange, config, own, peers).sent[replica]
        assert counted.bytes_sent == STEPS // 4 * between_nodes
        assert counted.bytes_inside_node == STEPS // 4 * on_node + inside
        assert counted.bytes_dense == STEPS * dense_step(own, peers).sent[replica, 0]
