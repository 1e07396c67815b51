"""The base of synchronizers: thresholds, residuals, plans, an exchange and counters, and their
state.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.compress.bucket_plan import BucketPlan, Plans, real_dtype, real_numel
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.base import Exchange
from lightning_dct.failures.lifeline import Lifeline


class TensorFigures(NamedTuple):
    """Figures of one tensor on one rank.

    Attributes:
        name: The parameter.
        entries: Its number of entries.
        density: Share of them that the next synchronisation may send, in (0, 1].
        threshold: The magnitude at or above which an entry is sent; the median if pieces of the
            tensor have a threshold each, as with ``exchange="two_phase"``. None for a tensor sent
            dense.
        residual_norm: Euclidean norm of this rank's residual.
    """

    name: str
    entries: int
    density: float
    threshold: float | None
    residual_norm: float


class Synchronizer:
    """Exchanges compressed tensors of one rank with the other ranks.

    :class:`~lightning_dct.sync.gradients.GradientSynchronizer` exchanges gradients in every
    backward, and :class:`~lightning_dct.sync.updates.UpdateSynchronizer` the updates of weights
    after every ``local_steps`` optimizer steps. All state is kept by parameter name.

    Args:
        config: The settings.
        parameter_names: The name of every parameter that may take part.
        exchange: Sends payloads to the other ranks.
        undoable: Keep what an exchange changes, so that it can be undone.
        of_updates: Whether updates are exchanged.

    Attributes:
        synchronisations: Optimizer steps that count, of all optimizers together.
        unclocked: Those of them from before a state without the optimizers' clocks, which began
            anew.
        steps_since_refresh: Synchronisations since the thresholds were last selected.
        refresh_every: The number of those steps after which the synchronizer requests a refresh
            itself; infinite if a callback requests it.
        given_density: The share of entries that was set in mid-run; None if none was.
        epoch: This rank's epoch, as far as it is known; payloads of another epoch are refused.
        batch: The number of this rank's batch since training began, and a name for it; None if
            batches are not known.
        lifeline: Compares what the ranks do; None if there is none.
        peers: The ranks of the job that do the same as this one.
        group: Their process group; None if that is of all ranks, or there is none.
    """

    def __init__(
        self,
        config: DCTConfig,
        parameter_names: Mapping[Tensor, str],
        exchange: Exchange,
        undoable: bool = False,
        of_updates: bool = False,
    ) -> None:
        self.plans = Plans(config, exchange.link_traversals)
        self._first_config = config
        self.exchange = exchange
        self.traffic = exchange.everyone.traffic
        self.feedback = ErrorFeedback(
            exchange.pieces, config.adapt_threshold, undoable, config.kernel, of_updates
        )
        self.thresholds = self.feedback.thresholds
        self.residuals = self.feedback.residuals
        self.synchronisations = self.unclocked = self.steps_since_refresh = 0
        self.parameter_names = parameter_names
        self.refresh_requested = False
        self.refresh_every = math.inf
        self.given_density: float | None = None
        self.epoch = 0
        self.batch: tuple[int, str] | None = None
        self.lifeline: Lifeline | None = None
        self.peers: Sequence[int] = ()
        self.group: dist.ProcessGroup | None = None

    def compare_places(self, lifeline: Lifeline | None, group: dist.ProcessGroup) -> None:
        """Have a lifeline compare what the ranks of a group do, which hold the same parameters."""
        self.lifeline = lifeline
        self.group = group
        self.peers = dist.get_process_group_ranks(group)

    def check_order(self, name: str, description: str) -> None:
        """Check that all ranks do the same here; see
        :meth:`lightning_dct.failures.lifeline.Lifeline.check_order`.

        Raises:
            RuntimeError: They do not, which the message explains.
        """
        if self.lifeline is not None:
            self.lifeline.check_order(name, description, self.peers, batch=self.batch)

    @property
    def config(self) -> DCTConfig:
        """The current settings."""
        return self.plans.config

    @property
    def delays_gradients(self) -> bool:
        """Whether gradients are exchanged, and those below a threshold later."""
        return (
            self.config.compress == "gradients"
            and self.config.density < 1.0
            and self.exchange.everyone.size > 1
        )

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps parameters that are synchronised."""
        return any(
            one in self.parameter_names
            for group in optimizer.param_groups
            for one in group["params"]
        )

    def set_density(self, density: float) -> None:
        """Send this share of each tensor's entries from the next exchange on; all ranks do this at
        the same place.
        """
        if density != self.config.density:
            steps = self.synchronisations
            rank_zero_info(
                f"After {steps:,} optimizer steps DCT takes density={density:g}, which was set."
            )
        self.given_density = density
        self.plans.change(self._with_density(self.config))

    def _with_density(self, config: DCTConfig) -> DCTConfig:
        """The settings with the density that was set in mid-run."""
        return config if self.given_density is None else replace(config, density=self.given_density)

    def request_refresh(self) -> None:
        """Select all thresholds anew in the next exchange."""
        self.refresh_requested = True

    def request_refresh_when_due(self) -> None:
        """Request a refresh after ``refresh_every`` steps."""
        if self.steps_since_refresh >= self.refresh_every:
            self.request_refresh()

    def density_of(self, parameter: Tensor) -> float:
        """The share of a parameter's entries that the next exchange sends, in (0, 1]."""
        size = real_numel(parameter)
        plan = self._plan_of([parameter], [size], real_dtype(parameter))
        return plan.targets[0] / size if plan.targets[0] else 1.0

    @property
    def sparse(self) -> Collection[Tensor]:
        """Parameters whose gradients have turned out to be sparse, as far as that is known."""
        return ()

    def entries_under_ddp(self) -> int:
        """Entries that DistributedDataParallel all-reduces in a step: not those of parameters with
        sparse gradients.
        """
        sparse = self.sparse
        return sum(
            real_numel(one)
            for one in self.parameter_names
            if one.requires_grad and one not in sparse
        )

    def norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's residual of each parameter, by name."""
        return self.feedback.norms()

    def norm(self) -> float:
        """Euclidean norm over all entries of this rank's residuals."""
        return float(sum(norm**2 for norm in self.norms().values()) ** 0.5)

    def figures_by_tensor(self) -> list[TensorFigures]:
        """The figures of all synchronised tensors, in the model's order; no communication.

        Tensors that have not been compressed yet are left out, and those with sparse gradients.
        """
        thresholds: dict[str, list[float]] = {name: [] for name in self.parameter_names.values()}
        for label, value in self.thresholds.by_label().items():
            # A piece's label is the parameter's name and a range. Thresholds of sums have other
            # labels.
            name = label if label in thresholds else label.rpartition("[")[0]
            if name in thresholds:
                thresholds[name].append(value)
        norms = self.norms()
        figures = []
        for parameter, name in self.parameter_names.items():
            density = self.density_of(parameter)
            if parameter.requires_grad and (thresholds[name] or density == 1.0):
                threshold = statistics.median(thresholds[name]) if density < 1.0 else None
                figures.append(
                    TensorFigures(
                        name, real_numel(parameter), density, threshold, norms.get(name, 0.0)
                    )
                )
        return figures

    def flush(self) -> None:
        """Wait for GPUs until all sent entries and times are counted and all payloads are checked.

        Raises:
            PayloadError: A payload is corrupt; the message names its sender.
        """
        self.feedback.awaited.synchronize()
        self.traffic.read_clocks()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain numbers, dicts and CPU tensors. Flushes first."""
        self.flush()
        return {
            "synchronisations": self.synchronisations,
            "steps_since_refresh": self.steps_since_refresh,
            **({} if self.given_density is None else {"density": self.given_density}),
            **self.feedback.state_dict(),
            "traffic": self.traffic.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: A saved residual has another size than the parameter of its name.
        """
        self.flush()
        self.feedback.load_state_dict(
            state, {name: real_numel(p) for p, name in self.parameter_names.items()}
        )
        self.synchronisations = int(state["synchronisations"])
        self.steps_since_refresh = int(state["steps_since_refresh"])
        self.traffic.load_state_dict(state["traffic"])
        self.refresh_requested = False  # until the loaded steps request one
        if "density" in state:
            self.set_density(state["density"])
        elif self.given_density is not None:  # it was set after the save
            self.given_density = None
            self.plans.change(self._first_config)

    def shared_state(self) -> dict[str, Any]:
        """The part of the state that is equal on all ranks of the exchange, by name: numbers and
        tensors.
        """
        steps = {
            "synchronisations": self.synchronisations,
            "steps_since_refresh": self.steps_since_refresh,
        }
        return {**steps, "density": self.config.density}

    def _plan_of(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype
    ) -> BucketPlan:
        """The plan of some parameters with these sizes (in real numbers)."""
        self._refuse([tensor for tensor in tensors if tensor not in self.parameter_names])
        return self.plans.of([self.parameter_names[tensor] for tensor in tensors], sizes, dtype)

    def _refuse(self, unknown: Sequence[Tensor]) -> None:
        if unknown:
            raise ValueError(
                f"A parameter of shape {list(unknown[0].shape)} was made after synchronisation had"
                " been set up, so its state would have no name. Make all parameters before that:"
                " those of a LightningModule in `__init__` or `configure_model`."
            )
