"""Parameters of which each rank holds a part are refused by name, wherever ranks would exchange
them as replicas.
"""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from distributed.training import Module, fit, launched, message_of, perceptron
from lightning_dct import DCTStrategy, Updates
from lightning_dct.fabric import DCTStrategy as FabricDCTStrategy


def by_fully_shard() -> nn.Module:
    model = perceptron()
    model.gain = None
    model.forward = lambda inputs: model.second(torch.tanh(model.first(inputs)))  # type: ignore[method-assign]
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def in_a_plain_loop() -> Any:
    model = by_fully_shard()
    return Updates(model, optim.SGD(model.parameters(), lr=0.1))


def with_fabric() -> Any:
    return launched(FabricDCTStrategy()).setup_module(by_fully_shard())


class ShardsItself(Module):
    def configure_model(self) -> None:
        if not isinstance(self.model, nn.Identity):
            self.model = by_fully_shard()


def with_the_trainer() -> Any:
    fit(DCTStrategy(), ShardsItself(), 4)


GRADIENTS: dict[str, Any] = {"compress": "gradients", "density": 0.2}


def gradients_with_fabric() -> Any:
    return launched(FabricDCTStrategy(**GRADIENTS)).setup_module(by_fully_shard())


def gradients_with_the_trainer() -> Any:
    fit(DCTStrategy(**GRADIENTS), ShardsItself(), 4)


MAKERS = [
    in_a_plain_loop,
    with_fabric,
    with_the_trainer,
    gradients_with_fabric,
    gradients_with_the_trainer,
]


def in_fsdp1() -> Any:
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    return Updates(model, optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("make", MAKERS)
def test_a_sharded_model_is_refused_by_name(ranks: Any, make: Any) -> None:
    for said in ranks(2).run(message_of, make):
        assert "first.weight' is spread over the ranks [0, 1]" in said
        assert "Trainer(strategy='dct_fsdp')" in said


def test_a_model_in_the_older_fsdp_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(message_of, in_fsdp1):
        assert said.startswith("The model is in `FullyShardedDataParallel`")
        assert "Trainer(strategy='dct_fsdp')" in said
