"""Many trainings of the same length side by side: all their replicas are one batch, which a GPU
repeats as graphs.

A *bank* stacks replicas of one module whose batches have one shape: those of all trainings with
``dct``, or the single models of dense training on one number of ranks. One graph has the gradients
of a whole bank, its optimizers' steps and the decay of shared weights; each training has graphs of
its exchanges. The host starts graphs, and makes batches ahead.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import ExchangeContext
from lightning_dct.sync.optimizer_state import Squares, squares_of
from lightning_dct.sync.optimizer_trial import try_out
from replicated.graphs import ExchangeGraph, Unread
from replicated.lockstep import Exchanges
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
# What exchanges of one kind have in common: steps since the last one, the share that own weights
# lose, whether thresholds are selected, and whether there are gains; None if these go by senders.
Kind = tuple[int, float, bool, bool | None]


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
        self._trial = try_out(self._schedule)
        for group in self.optimizer.param_groups:
            if self._on_gpu:
                group |= {"fused": True, "foreach": False}
                group |= {"capturable": True} if "capturable" in group else {}
        self.exchanges: Exchanges | None = None
        self._shared: list[list[Tensor]] = []
        self._graphs: dict[Kind, ExchangeGraph] = {}
        self._latest: ExchangeGraph | None = None
        self._made: dict[Kind, int] = {}
        self._ranks: list[dict[str, Tensor]] = []
        if prepared.settings is not None:
            self._ranks = [
                {name: own[rank] for name, own in weights.items()}
                for rank in range(prepared.job.ranks)
            ]
            keys = {
                names[p]: own for p, own in self._trial.squares_by_parameter(self._schedule).items()
            }
            given = prepared.settings, self._ranks, prepared.job.steps, self._trial, keys
            self.exchanges = Exchanges(*given, self._squares)
            self.exchanges.start = self._exchange
            for rank in self.exchanges.ranks:
                rank.feedback.awaited = Unread()
            self._shared = [
                self.exchanges.shared([names[p] for p in group["params"]])
                for group in self._schedule.param_groups
            ]

    def numbers(self) -> list[float]:
        """The rate of each group in the next step, and the factor on its shared weights."""
        found = [
            (group["lr"], 1 - group["lr"] * group["weight_decay"])
            for group in self._schedule.param_groups
        ]
        if self._scheduler is not None:
            with warnings.catch_warnings():  # this optimizer never steps
                warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step()
        return [number for pair in found for number in pair]

    def step(self, gradients: dict[str, Tensor], numbers: Sequence[Any]) -> None:
        """Step, and let shared weights decay; ``numbers`` as above, or tensors of them on a GPU."""
        for name, weights in self.weights.items():
            weights.grad = gradients[name]
            for own, gradient in zip(self._ranks, gradients[name], strict=False):
                own[name].grad = gradient
        for place, group in enumerate(self.optimizer.param_groups):
            group["lr"] = numbers[2 * place]
        self.optimizer.step()
        for place, (shared, decays) in enumerate(
            zip(self._shared, self._trial.decays, strict=False)
        ):
            if (
                self._trial.is_scale_invariant
                and decays
                and self.optimizer.param_groups[place]["weight_decay"]
            ):
                torch._foreach_mul_(shared, numbers[2 * place + 1])

    def _squares(self, names: Sequence[str]) -> list[dict[str, Squares]]:
        """Each rank's part of what the optimizer keeps of all."""
        keys = self._trial.squares_by_parameter(self.optimizer)
        stacked = squares_of(self.optimizer, {name: self.weights[name] for name in names}, keys)
        return [
            {
                name: Squares(None if values is None else values[rank], bias)
                for name, (values, bias) in stacked.items()
            }
            for rank in range(len(self._ranks))
        ]

    def _exchange(self, length: int, context: ExchangeContext, refreshes: bool) -> None:
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._exchange_here(length, context, refreshes)

    def _exchange_here(self, length: int, context: ExchangeContext, refreshes: bool) -> None:
        """Exchange as a graph, once exchanges of this kind have been made without one."""
        # A mean whose gains go by senders is computed otherwise, and so is one without any.
        exchanges = self.exchanges
        kind = (
            length,
            context.dropped,
            refreshes,
            context.gains if context.gains is None else bool(context.gains),
        )
        assert exchanges is not None
        # Residuals that are held back lie elsewhere after each exchange, so a graph would not find
        # them.
        holds_back = exchanges.ranks[0].clock.holds_back
        if (graph := self._graphs.get(kind)) is not None and not holds_back:
            if self._latest is not graph:
                graph.take_over()
            graph.replay(context.gains)
            for own, more in zip(exchanges.traffic, graph.sent, strict=True):
                own.add(bytes_sent=more)
            self._latest = graph
            return
        feedbacks = [rank.feedback for rank in exchanges.ranks]
        for feedback in feedbacks:
            feedback.awaited.latest.clear()
        self._made[kind] = self._made.get(kind, 0) + 1
        if not self._on_gpu or holds_back or self._made[kind] <= (1 if refreshes else EAGER):
            exchanges.exchange(length, context, refreshes)
            self._latest = None
            return
        exchange = partial(exchanges.exchange, length, context, refreshes)
        self._latest = self._graphs[kind] = ExchangeGraph(
            exchange, feedbacks, exchanges.traffic, context.gains
        )
        self._latest.replay(context.gains)

    def end_exchange(self) -> None:
        """Have the current stream wait for the latest exchange."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def look(self) -> None:
        """Raise what the latest exchange has found wrong."""
        for rank in self.exchanges.ranks if self.exchanges is not None else ():
            rank.feedback.awaited.look()

    def shared_weights(self) -> dict[str, Tensor]:
        """The weights that all ranks share, or those of dense training."""
        if self.exchanges is None:
            return {name: own[0] for name, own in self.weights.items()}
        return {name: self.exchanges.ranks[0].weights.shared(name) for name in self.weights}


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
        self._numbers = torch.empty(0)

    def _part(self, stacks: dict[str, Tensor], training: int) -> dict[str, Tensor]:
        start, stop = self._places[training : training + 2]
        return {name: stack[start:stop] for name, stack in stacks.items()}

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
        table = [
            [number for one in self.trainings for number in one.numbers()] for _ in range(AHEAD)
        ]
        numbers = torch.tensor(table, dtype=dtype)
        if self.device.type == "cpu":
            self._batches = fresh
            self._numbers = numbers
        elif not self._batches:
            self._batches = {name: one.to(self.device) for name, one in fresh.items()}
            self._numbers = numbers.to(self.device)
        else:  # where the graph reads them
            for name, one in fresh.items():
                self._batches[name].copy_(one.pin_memory(), non_blocking=True)
            self._numbers.copy_(numbers.pin_memory(), non_blocking=True)
        self._next.zero_()

    def step(self) -> None:
        """A step of all replicas, and the start of the exchanges that are due."""
        with torch.cuda.stream(self._stream):
            self._step()

    def _step(self) -> None:
        if self._steps % AHEAD == 0:
            self.prepare()
        for one in self.trainings:
            one.end_exchange()
            if one.exchanges is not None:
                one.exchanges.before_step()
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
            if one.exchanges is not None:
                one.exchanges.after_step()

    def _move(self) -> None:
        batch = {
            name: ahead.index_select(0, self._next)[0] for name, ahead in self._batches.items()
        }
        gradients, losses = self._function(self._stacks, batch)
        # Fused optimizers want the layout of the weights.
        gradients = {name: gradient.contiguous() for name, gradient in gradients.items()}
        self.losses.copy_(losses)
        numbers = self._numbers.index_select(0, self._next)[0]
        given = numbers.tolist() if self.device.type == "cpu" else numbers.unbind()
        with torch.no_grad():
            for number, one in enumerate(self.trainings):
                count = len(given) // len(self.trainings)
                one.step(
                    self._part(gradients, number), given[number * count : (number + 1) * count]
                )
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
        figures_of(job, history, seconds, one.prepared.module, one.exchanges)
        for job, history, one in zip(jobs, histories, together.trainings, strict=True)
    ]
