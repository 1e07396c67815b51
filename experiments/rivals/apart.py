"""Replicas that train apart, and another method that brings them together."""

import math
import os
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_dct.traffic import FP32_BYTES, Traffic, all_reduce_bytes


@dataclass
class Replica:
    """What a method works on: this rank's model and optimizer, the group of all ranks, and the
    counter of bytes.

    ``manager`` takes the place of torchft's, which needs a process for each rank.
    """

    module: nn.Module
    optimizer: Optimizer
    group: dist.ProcessGroup
    traffic: Traffic
    manager: Any = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def count_steps(self, optimizer: Optimizer) -> None:
        """Count the steps of an optimizer, and the bytes that DistributedDataParallel would have
        sent for them.
        """
        entries = sum(parameter.numel() for parameter in self.parameters)
        dense = all_reduce_bytes(FP32_BYTES * entries, self.group.size())
        optimizer.register_step_post_hook(
            lambda *_: self.traffic.add(steps=1, bytes_dense=dense, entries=entries)
        )


class Method(ABC):
    """A way to bring replicas together; its constructor takes settings only, because ranks are not
    there yet.
    """

    @abstractmethod
    def attach(self, replica: Replica) -> Optimizer:
        """Act from now on after steps of the optimizer; returns the optimizer to train with, most
        often the same.
        """

    def detach(self) -> None:  # noqa: B027
        """Let go of what ``attach`` has taken; nothing, unless a method says otherwise."""

    @abstractmethod
    def their_ratio(self) -> float:
        """The ratio of bytes as the method's authors count it."""


class ApartStrategy(DDPStrategy):
    """Trains a replica on each rank, without DistributedDataParallel, and leaves the exchange to a
    method.

    After the last step, the weights become the mean of all replicas: these are what is validated,
    tested and saved. That mean is not counted, because methods that have just exchanged do not need
    it. Lightning's broadcast before every batch is left out, as ``DCTStrategy`` does it, so that a
    step without an exchange does not wait.

    Args:
        method: What brings the replicas together.
        **kwargs: As DDPStrategy takes them.

    Attributes:
        traffic: What was sent so far.
    """

    def __init__(self, method: Method, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.method = method
        self.traffic = Traffic()
        self.strategy_name = type(method).__name__

    @property
    def their_ratio(self) -> float:
        return self.method.their_ratio()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        (optimizer,) = self.optimizers
        replica = Replica(self.lightning_module, optimizer, dist.group.WORLD, self.traffic)
        replaced = self.method.attach(replica)
        if replaced is not optimizer:
            self.optimizers = [replaced]
            for config in self.lr_scheduler_configs:
                _drive(config.scheduler, replaced)
        replica.count_steps(replaced)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_end(self) -> None:
        self.method.detach()
        for parameter in self.lightning_module.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= self.world_size

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def _register_ddp_hooks(self) -> None:
        """There is no DistributedDataParallel to hook into."""


def _drive(scheduler: Any, optimizer: Optimizer) -> None:
    """Let a schedule of factors set the rates of another optimizer, from where it is."""
    factors = [
        now / base for now, base in zip(scheduler.get_last_lr(), scheduler.base_lrs, strict=True)
    ]
    scheduler.optimizer = optimizer
    scheduler.base_lrs = [group["lr"] for group in optimizer.param_groups]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group["initial_lr"] = group["lr"]
        group["lr"] *= factor


def in_fragments(modules: list[nn.Module], count: int) -> list[nn.ModuleList]:
    """Modules in a row as so many groups of about as many modules each.

    Raises:
        ValueError: There are fewer modules than groups.
    """
    if not 1 <= count <= len(modules):
        raise ValueError(
            f"strategy.method.fragments={count}: the model has {len(modules)} parts; give 1 to as"
            " many"
        )
    size = math.ceil(len(modules) / count)
    groups = [
        nn.ModuleList(modules[start : start + size]) for start in range(0, len(modules), size)
    ]
    if len(groups) != count:
        raise ValueError(
            f"strategy.method.fragments={count}: {len(modules)} parts make no {count} equal groups"
        )
    return groups


def own_address() -> str:
    """The address at which other ranks reach this one: that of the interface towards rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])
