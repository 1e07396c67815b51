"""Trainings of sharded models on the ranks that are there, and what the tests want to know of
them.
"""

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distributed.training import Module, State, Watch, loader, trainer_for
from lightning_dct import DCTFSDPStrategy


def network() -> nn.Module:
    """Rows that do not divide by the shards (33, 5, 1), and a buffer; the same weights on every
    rank.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(40, 33),
            nn.Tanh(),
            nn.BatchNorm1d(33),
            nn.Linear(33, 5),
            nn.Tanh(),
            nn.Linear(5, 1),
            nn.Linear(1, 8),
        )


class Plain(Module):
    """It shards nothing itself."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(network(), *arguments, **settings)


class Native(Plain):
    """Shards itself over two replicas as torch's HSDP does."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for module in (self.model[0], self.model[3], self):
            fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)


class Documented(Plain):
    """Shards itself as Lightning documents it, without a word of replicas."""

    def configure_model(self) -> None:
        for module in (self.model[0], self.model[3], self.model):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def hsdp() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)


def fsdp(**settings: Any) -> DCTFSDPStrategy:
    """Two replicas, the larger layer a unit of its own."""
    return DCTFSDPStrategy(**{"replicas": 2, "unit": 1000, **settings})


def train(strategy: Any, module: Module, batches: Any = 20, **settings: Any) -> dict[str, Any]:
    """Train, and say what came of it: whole weights, and what this rank holds."""
    watch = Watch(every=10**9)
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = trainer_for(strategy, callbacks=[watch, *settings.pop("callbacks", [])], **settings)
    data = loader(batches, 40, 8) if isinstance(batches, int) else batches
    trainer.fit(module, data, ckpt_path=ckpt_path)
    run = {"weights": whole_weights(module), "losses": watch.losses, "seen": watch.seen}
    if isinstance(strategy, DCTFSDPStrategy):
        run |= {"totals": strategy.traffic.totals, "state": strategy.synchronizer.state_dict()}
    return run


def whole_weights(module: nn.Module) -> State:
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
