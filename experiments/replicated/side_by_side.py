"""Many trainings of the same length side by side: all their replicas are one batch, which a GPU
repeats as graphs.

A *bank* stacks replicas of one module whose batches have one shape: those of all trainings with
``dct``, or the single models of dense training on one number of ranks. One graph has the gradients
of a whole bank and its optimizers' steps. The engine of each rank (:mod:`replicated.engines`) has
views of the stacks, and of the optimizer's state; each training has graphs of its exchanges. The
host starts graphs, and makes batches ahead.
"""

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dct.sync.updates import UpdateSynchronizer
from replicated.engines import Engines
from replicated.graphs import Graphs, RecordedUpdates
from replicated.training import (
    Batch,
    History,
    Job,
    Prepared,
    figures_of,
    gradients_of_all,
    mean_loss,
    rows_of_validation,
    validated_after,
)
from streams import rank_rows

# Steps whose batches and rates are on the GPU at once.
AHEAD = 50
# Steps, and exchanges of a kind, without a graph: optimizers make their state, and kernels are
# compiled.
EAGER = 3
# Optimizers whose step of stacked weights is that of each replica.
ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Training:
    """One training of a bank: its optimizer, the rates to come, and its exchanges.

    Args:
        prepared: What is trained.
        weights: Views of the bank's stacks, ``[replicas, ...]`` each, by name.
        device: Where they are.
    """

    def __init__(
        self, prepared: Prepared, weights: dict[str, Tensor], device: torch.device
    ) -> None:
        self.prepared = prepared
        self.weights = weights
        self._on_gpu = device.type == "cuda"
        # Exchanges of several trainings are on the GPU at once.
        self._beside = torch.cuda.Stream(device) if self._on_gpu else None
        exchanging = prepared.job.ranks if prepared.settings is not None else 0
        modules = [copy.deepcopy(prepared.module) for _ in range(exchanging)]
        self._schedule, self._scheduler = prepared.optimizer_of(prepared.module)
        names = {parameter: name for name, parameter in prepared.module.named_parameters()}
        groups = [
            {**group, "params": [weights[names[p]] for p in group["params"]]}
            for group in self._schedule.param_groups
        ]
        if not isinstance(self._schedule, ELEMENTWISE):
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"replicas on a GPU train with {known}, not with {type(self._schedule).__name__}"
            )
        self.optimizer = type(self._schedule)(groups)
        for group in self.optimizer.param_groups:
            if self._on_gpu:
                group |= {"fused": True, "foreach": False}
                group |= {"capturable": True} if "capturable" in group else {}
        self.engines: Engines | None = None
        self._graphs = Graphs()
        # What each rank sees of the weights and of the optimizer: parameters and state are views.
        self._ranks: list[dict[str, Tensor]] = []
        self._views: list[Optimizer] = []
        if modules:
            self._make_engines(prepared, modules)

    def _make_engines(self, prepared: Prepared, modules: Sequence[Module]) -> None:
        for rank, module in enumerate(modules):
            own = dict(module.named_parameters())
            for name, parameter in own.items():
                parameter.data = self.weights[name][rank]
            self._ranks.append(own)
            self._views.append(prepared.optimizer_of(module)[0])
        kind = RecordedUpdates if self._on_gpu else UpdateSynchronizer
        self.engines = Engines(prepared.settings, modules, self._views, prepared.job.steps, kind)
        for one in self.engines.synchronizers:
            if isinstance(one, RecordedUpdates):
                one.graphs = self._graphs
                one.eager = EAGER
                self._graphs.synchronizers.append(one)

    def rates(self) -> list[float]:
        """The rate of each group in the next step."""
        found = [group["lr"] for group in self._schedule.param_groups]
        if self._scheduler is not None:
            with warnings.catch_warnings():  # this optimizer never steps
                warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step()
        return found

    def step(self, gradients: dict[str, Tensor], rates: Sequence[Any]) -> None:
        """Step with rates as above, or with tensors of them on a GPU."""
        for name, weights in self.weights.items():
            weights.grad = gradients[name]
            for own, gradient in zip(self._ranks, gradients[name], strict=False):
                own[name].grad = gradient
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()

    def begin_step(self, rates: Sequence[float]) -> None:
        """Wait for the latest exchange, and have the engines begin a step with these rates."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        for view in self._views:
            for group, rate in zip(view.param_groups, rates, strict=True):
                group["lr"] = rate
        if self.engines is not None:
            self.engines.begin_step()

    def after_step(self) -> None:
        """Have the engines do what follows a step, beside those of other trainings."""
        if self.engines is None:
            return
        if not self._views[0].state:
            self._show_state()
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self.engines.after_step()

    def _show_state(self) -> None:
        """Let each rank see its part of the state that the optimizer's first step has made."""
        for name, stack in self.weights.items():
            for key, value in self.optimizer.state[stack].items():
                is_stacked = isinstance(value, Tensor) and value.shape == stack.shape
                for rank, (own, view) in enumerate(zip(self._ranks, self._views, strict=True)):
                    view.state[own[name]][key] = value[rank] if is_stacked else value

    def look(self) -> None:
        """Raise what the latest exchange has found wrong."""
        self._graphs.look()

    def shared_weights(self) -> dict[str, Tensor]:
        """The weights that all ranks share, or those of dense training."""
        if self.engines is None:
            return {name: own[0] for name, own in self.weights.items()}
        return self.engines.shared_weights()


class Bank:
    """Stacked replicas and their step; all have batches of one shape."""

    def __init__(self, trainings: Sequence[Prepared], device: torch.device) -> None:
        self.device = device
        named = [
            dict(one.module.named_parameters()) for one in trainings for _ in range(one.replicas)
        ]
        self._stacks = {
            name: torch.stack([own[name].detach() for own in named]).to(device) for name in named[0]
        }
        self._places = [0]
        for one in trainings:
            self._places.append(self._places[-1] + one.replicas)
        self.trainings = [
            Training(one, self._part(self._stacks, number), device)
            for number, one in enumerate(trainings)
        ]
        self._function = gradients_of_all(trainings[0].module.to(device))
        self.losses = torch.zeros(len(named), device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        # Of the steps ahead: which of them is next, and what each replica reads.
        self._next = torch.zeros(1, dtype=torch.long, device=device)
        self._batches: Batch = {}
        self._table: list[list[float]] = []
        self._rates = torch.empty(0)

    def _part(self, stacks: dict[str, Tensor], training: int) -> dict[str, Tensor]:
        start, stop = self._places[training : training + 2]
        return {name: stack[start:stop] for name, stack in stacks.items()}

    def _part_of_rates(self, rates: Sequence[Any], training: int) -> Sequence[Any]:
        count = len(rates) // len(self.trainings)
        return rates[training * count : (training + 1) * count]

    def prepare(self) -> None:
        """Prepare the batches and rates of the next steps."""
        streams: dict[tuple[int, str], Batch] = {}
        for one in self.trainings:
            job = one.prepared.job
            if (key := (job.ranks, one.prepared.data_settings)) not in streams:
                size = job.ranks * one.prepared.data.batch_size
                numbers = rank_rows(
                    self._steps // AHEAD, batch_size=AHEAD * size, rank=0, world_size=1
                )
                streams[key] = one.prepared.data.training_rows(numbers)
        rows: dict[str, list[Tensor]] = {}
        for one in self.trainings:
            for name, found in streams[one.prepared.job.ranks, one.prepared.data_settings].items():
                rows.setdefault(name, []).append(
                    found.view(AHEAD, one.prepared.replicas, -1, *found.shape[1:])
                )
        fresh = {name: torch.cat(parts, dim=1) for name, parts in rows.items()}
        # On a GPU fused optimizers read rates of this type.
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        self._table = [
            [rate for one in self.trainings for rate in one.rates()] for _ in range(AHEAD)
        ]
        rates = torch.tensor(self._table, dtype=dtype)
        if self.device.type == "cpu":
            self._batches = fresh
            self._rates = rates
        elif not self._batches:
            self._batches = {name: one.to(self.device) for name, one in fresh.items()}
            self._rates = rates.to(self.device)
        else:  # where the graph reads them
            for name, one in fresh.items():
                self._batches[name].copy_(one.pin_memory(), non_blocking=True)
            self._rates.copy_(rates.pin_memory(), non_blocking=True)
        self._next.zero_()

    def step(self) -> None:
        """A step of all replicas, and the start of the exchanges that are due."""
        with torch.cuda.stream(self._stream):
            self._step()

    def _step(self) -> None:
        if self._steps % AHEAD == 0:
            self.prepare()
        now = self._table[self._steps % AHEAD]
        for number, one in enumerate(self.trainings):
            one.begin_step(self._part_of_rates(now, number))
        if self._graph is not None:
            self._graph.replay()
        elif self.device.type == "cpu" or self._steps < EAGER:
            self._move()
        else:
            # Recording runs nothing.
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="relaxed"):
                self._move()
            self._graph.replay()
        self._steps += 1
        for one in self.trainings:
            one.after_step()

    def _move(self) -> None:
        batch = {
            name: ahead.index_select(0, self._next)[0] for name, ahead in self._batches.items()
        }
        gradients, losses = self._function(self._stacks, batch)
        # Fused optimizers want the layout of the weights.
        gradients = {name: gradient.contiguous() for name, gradient in gradients.items()}
        self.losses.copy_(losses)
        now = self._rates.index_select(0, self._next)[0]
        rates = now.tolist() if self.device.type == "cpu" else now.unbind()
        with torch.no_grad():
            for number, one in enumerate(self.trainings):
                one.step(self._part(gradients, number), self._part_of_rates(rates, number))
        self._next += 1


class SideBySide:
    """Trainings of the same number of steps."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        prepared = [Prepared(job) for job in jobs]
        device = torch.device(jobs[0].device)
        kinds: dict[tuple[str, int | None], list[Prepared]] = {}
        for one in prepared:
            kinds.setdefault(
                (one.shape, one.job.ranks if one.settings is None else None), []
            ).append(one)
        self.banks = [Bank(members, device) for members in kinds.values()]
        by_job = {id(one.prepared): one for bank in self.banks for one in bank.trainings}
        self.trainings = [by_job[id(one)] for one in prepared]
        data = {one.data_settings: one.data for one in prepared}
        self._validation = {
            settings: rows_of_validation(one, jobs[0]) for settings, one in data.items()
        }

    def step(self) -> None:
        """One step of all trainings."""
        for bank in self.banks:
            bank.step()

    def validate(self) -> list[float]:
        """The loss of each training's weights over rows of the validation part."""
        found = []
        for one in self.trainings:
            one.look()
            rows = self._validation[one.prepared.data_settings]
            found.append(mean_loss(one.prepared.module, one.shared_weights(), rows))
        return found


def train_side_by_side(
    jobs: Sequence[Job], report: Callable[[int, Sequence[float]], None]
) -> list[dict[str, Any]]:
    """Train jobs of one length, and return the figures of each; ``report`` gets the steps made and
    the latest losses.

    The time of a step is that of all jobs together.
    """
    together = SideBySide(jobs)
    steps = jobs[0].steps
    histories: list[History] = [[] for _ in jobs]
    checked = validated_after(steps)
    started = time.perf_counter()
    seconds = 0.0
    losses = list[float]()
    for step in range(1, steps + 1):
        together.step()
        if step in checked:
            if jobs[0].device == "cuda":
                torch.cuda.synchronize()
            seconds += time.perf_counter() - started
            losses = together.validate()
            for history, loss in zip(histories, losses, strict=True):
                history.append((step, loss))
            started = time.perf_counter()
        if step in checked or step % 50 == 0:
            report(step, losses)
    return [
        figures_of(job, history, seconds, one.prepared.module, one.engines)
        for job, history, one in zip(jobs, histories, together.trainings, strict=True)
    ]
