"""Methods of others between the replicas of one training: in a step the replicas take turns.

A method (:mod:`rivals.apart`) hangs on the steps of an optimizer and calls collectives there, which
wait for all ranks.
"""

from collections.abc import Sequence
from typing import Any

import hydra
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dct.traffic import Traffic, all_reduce_bytes
from replicated.engines import figures_of_traffic
from replicated.in_memory import Group, Ranks
from rivals.apart import Replica

MODULES = ("rivals.sparse_loco", "rivals.with_torchft")
"""Whose methods replicas follow: those that call no collectives but over the group that they are
given, or a manager's.
"""


class Done:
    """A collective that has come to its end."""

    def wait(self) -> bool:
        """Return at once."""
        return True


class Manager:
    """What torchft's algorithms ask of its Manager, where no replica leaves, joins or fails."""

    _use_async_quorum = False

    def __init__(self, group: Group, traffic: Traffic) -> None:
        self._group = group
        self._traffic = traffic
        self._commits = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Done:
        """Make a tensor the mean over the replicas, and count it as an all-reduce."""
        sent = all_reduce_bytes(tensor.nbytes, self._group.size())
        self._traffic.add(bytes_sent=sent, entries_sent=tensor.numel())
        dist.all_reduce(tensor, group=self._group)
        tensor /= self._group.size()
        return Done()

    def should_commit(self) -> bool:
        self._commits += 1
        return True

    def current_step(self) -> int:
        return self._commits

    def start_quorum(self) -> None:
        """All replicas are there."""

    def allow_state_dict_read(self) -> None:
        """No replica reads the state of another."""

    def disallow_state_dict_read(self) -> None:
        """No replica reads the state of another."""

    def register_state_dict_fn(self, *_: Any) -> None:
        """No replica reads the state of another."""


class Apart:
    """The replicas of one training and the method that brings them together.

    Args:
        method: Its settings, as in ``conf/strategy``.
        modules: One of each replica.
        optimizers: One of each replica.

    Attributes:
        traffic: The bytes of each replica.
    """

    def __init__(
        self, method: Any, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self.traffic = [Traffic() for _ in modules]
        self._ranks = Ranks(len(modules))
        self._optimizers = optimizers
        self._modules = modules
        self._methods = [hydra.utils.instantiate(method) for _ in modules]
        for rank, (own, module, optimizer) in enumerate(
            zip(self._methods, modules, optimizers, strict=True)
        ):
            group = self._ranks.groups[rank]
            manager = Manager(group, self.traffic[rank])
            replica = Replica(module, optimizer, group, self.traffic[rank], manager)
            replica.count_steps(own.attach(replica))

    def step(self) -> None:
        """Make a step of each optimizer; the method acts in it.

        Raises:
            Exception: What a replica has raised. The others do not wait for it.
        """
        self._ranks.run(lambda rank: self._optimizers[rank].step())

    def figures(self) -> dict[str, Any]:
        """What was sent, and by which method."""
        return {
            **figures_of_traffic(self.traffic),
            "exchange": type(self._methods[0]).__name__,
            "settings": None,
        }

    def shared_weights(self) -> dict[str, Tensor]:
        """The mean of all replicas by name, which :class:`~rivals.apart.ApartStrategy` leaves after
        fit.
        """
        own = [dict(module.named_parameters()) for module in self._modules]
        return {name: torch.stack([one[name].detach() for one in own]).mean(0) for name in own[0]}
