"""What every synchronizer has: thresholds, residuals, plans, an exchange and counters, and how they are saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.exchanges import Bucket, Exchange
from lightning_dct.gradients.exchanges.base import send_dense
from lightning_dct.gradients.memory import Memory
from lightning_dct.gradients.pending import Pending
from lightning_dct.gradients.plan import BucketPlan, real_dtype, real_numel
from lightning_dct.gradients.plans import Plans


class Synchronizer:
    """One rank's side of an exchange of compressed tensors with all others.

    Two kinds exist. :class:`~lightning_dct.gradients.GradientSynchronizer` exchanges gradients in every backward, and
    :class:`~lightning_dct.updates.UpdateSynchronizer` exchanges what weights have moved, every so many optimizer steps.
    Everything remembered from one exchange to the next is kept by parameter name.

    Args:
        config: The settings.
        parameter_names: The name of every parameter that may take part.
        exchange: How payloads get to the other ranks; its ranks are the ones that take part.
        undoable: Keep what an exchange changes, so that it can be undone.

    Attributes:
        synchronisations: Optimizer steps that count, of all optimizers together.
        steps_since_refresh: The same since the thresholds were last selected.
        refresh_every: After how many of those steps it asks for a refresh itself; infinite where a callback asks.
    """

    def __init__(
        self, config: DCTConfig, parameter_names: Mapping[Tensor, str], exchange: Exchange, undoable: bool = False
    ) -> None:
        self.plans = Plans(config, exchange.link_traversals)
        self.exchange = exchange
        self.traffic = exchange.everyone.traffic
        self.memory = Memory(exchange.pieces, config.guard, undoable, config.kernel)
        self.thresholds, self.residuals = self.memory.thresholds, self.memory.residuals
        self.synchronisations = 0
        self.steps_since_refresh = 0
        self.parameter_names = parameter_names
        self.refresh_requested = False
        self.refresh_every = math.inf

    @property
    def config(self) -> DCTConfig:
        """The settings of the moment."""
        return self.plans.config

    def request_refresh(self) -> None:
        """Select all thresholds anew in the next exchange."""
        self.refresh_requested = True

    def request_refresh_when_due(self) -> None:
        """Ask for a refresh where no callback does."""
        if self.steps_since_refresh >= self.refresh_every:
            self.request_refresh()

    def set_density(self, density: float) -> None:
        """Send another share of the entries from the next exchange on, where no other setting names a parameter.

        Every rank has to do so between the same two exchanges. Thresholds that no longer apply are selected anew. It is
        not saved: who changes the density does so again after a restart, as the callbacks do.

        Args:
            density: As ``DCTConfig.density``.
        """
        self.check_idle()
        self.plans.change(replace(self.config, density=density))

    def density_of(self, parameter: Tensor) -> float:
        """The share of a parameter's entries that the next exchange sends, in (0, 1]."""
        size = real_numel(parameter)
        plan = self._plan_of([parameter], [size], real_dtype(parameter))
        return plan.targets[0] / size if plan.targets[0] else 1.0

    def norms(self) -> dict[str, float]:
        """Euclidean norm of what this rank holds back of each parameter, by name."""
        return self.memory.norms()

    def norm(self) -> float:
        """Euclidean norm over all entries that this rank holds back."""
        return float(sum(norm**2 for norm in self.norms().values()) ** 0.5)

    def flush(self) -> None:
        """Wait for what GPUs have still to tell: then all sent entries are counted and all payloads were sound.

        Raises:
            PayloadError: Something that has arrived was not what a rank can have sent; the message names the rank.
        """
        self.memory.awaited.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain numbers, dicts and CPU tensors. Flushes first."""
        self.flush()
        return {
            "synchronisations": self.synchronisations,
            "steps_since_refresh": self.steps_since_refresh,
            **self.memory.state_dict(),
            "traffic": self.traffic.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: A saved residual has another size than the parameter of its name.
        """
        self.flush()
        self.memory.load_state_dict(state, {name: real_numel(p) for p, name in self.parameter_names.items()})
        self.synchronisations = int(state["synchronisations"])
        self.steps_since_refresh = int(state["steps_since_refresh"])
        self.traffic.load_state_dict(state["traffic"])

    def check_idle(self) -> None:
        """Refuse changes in the middle of an exchange, where an exchange has one.

        Raises:
            RuntimeError: One is under way.
        """

    def _plan_of(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype, share: float = 1.0
    ) -> BucketPlan:
        """What becomes of some parameters of this many real entries each, at a share of their densities.

        Raises:
            ValueError: One of them was not there when synchronisation was set up.
        """
        self._refuse([tensor for tensor in tensors if tensor not in self.parameter_names])
        return self.plans.of([self.parameter_names[tensor] for tensor in tensors], sizes, dtype, share)

    def _refuse(self, unknown: Sequence[Tensor]) -> None:
        if unknown:
            raise ValueError(
                f"A parameter of shape {list(unknown[0].shape)} was made after DCTStrategy had set up synchronisation,"
                " so it has no name to be kept by. Make all parameters in `__init__` or `configure_model`."
            )

    def _start(self, buffer: Tensor, plan: BucketPlan, deferred: set[int]) -> Pending:
        """Start sending a bucket."""
        ready = Bucket(buffer, plan, deferred)
        if plan.is_dense:
            dtype = torch.bfloat16 if self.config.halves and buffer.dtype == torch.float32 else buffer.dtype
            return Pending(send_dense(ready, self.memory, self.exchange.everyone, dtype), 1, buffer)
        return Pending(self.exchange.send(ready, self.memory), self.exchange.rounds, buffer)
