"""Methods of others between the replicas of one training: the replicas' steps run side by side, a
thread for each.

A method (:mod:`rivals.apart`) hangs on the steps of an optimizer and calls collectives there, which
wait for all ranks.
"""

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import hydra
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dct.traffic import Traffic, all_reduce_bytes
from replicated.lockstep import Collectives, figures_of_traffic
from replicated.threads import ThreadGroup, Threads, Work
from rivals.apart import Replica

MODULES = ("rivals.sparse_loco", "rivals.with_torchft")
"""Whose methods replicas follow: those that call no collectives but ``dist`` of their own module,
or a manager's.
"""


class Manager:
    """What torchft's algorithms ask of its Manager, where no replica leaves, joins or fails."""

    _use_async_quorum = False

    def __init__(self, group: ThreadGroup, traffic: Traffic) -> None:
        self._group = group
        self._traffic = traffic
        self._commits = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Work:
        """Make a tensor the mean over the replicas, and count it as an all-reduce."""
        sent = all_reduce_bytes(tensor.nbytes, self._group.size())
        self._traffic.add(bytes_sent=sent, entries_sent=tensor.numel())
        Collectives.all_reduce(tensor, self._group)
        tensor /= self._group.size()
        return Work(lambda: True)

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
        self._threads = Threads(len(modules))
        self._optimizers = optimizers
        self._modules = modules
        self._methods = [hydra.utils.instantiate(method) for _ in modules]
        self._module = sys.modules[type(self._methods[0]).__module__]
        for rank, (own, module, optimizer) in enumerate(
            zip(self._methods, modules, optimizers, strict=True)
        ):
            group = self._threads.groups[rank]
            manager = Manager(group, self.traffic[rank])
            replica = Replica(module, optimizer, group, self.traffic[rank], manager)  # type: ignore[arg-type]
            replica.count_steps(own.attach(replica))

    def step(self) -> None:
        """Make a step of each optimizer; the method acts in it.

        Raises:
            Exception: What a replica has raised. The others do not wait for it.
        """
        with mock.patch.object(self._module, "dist", Collectives):
            self._threads.run(lambda rank: self._optimizers[rank].step())

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
