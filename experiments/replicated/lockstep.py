"""The exchanges of all ranks of one training, in one thread: each rank starts a collective before
the first waits.

Plans, memories, exchanges, weights and flows are the package's. Here is what
``UpdateSynchronizer.after_step`` does, for all ranks at once, so that a GPU can repeat it as a
graph. What ranks do seldom, they do in a thread each (:mod:`replicated.threads`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct import DCTConfig
from lightning_dct.compress.awaited import Awaited
from lightning_dct.compress.bucket_plan import ExchangeContext, Plans
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.exchange import collectives
from lightning_dct.exchange.base import Exchange
from lightning_dct.exchange.collectives import Link
from lightning_dct.exchange.compressed import AllGather, TwoPhase, link_traversals
from lightning_dct.exchange.factory import NodeLayout, choose_for_model, share_model
from lightning_dct.law import RunSettings, UserSettings
from lightning_dct.sync.coherence import measure_all
from lightning_dct.sync.decision import Decision, decide
from lightning_dct.sync.optimizer_clock import OptimizerClock, buckets_of
from lightning_dct.sync.optimizer_state import Squares, may_be_averaged
from lightning_dct.sync.optimizer_trial import Trial
from lightning_dct.sync.shared_weights import SharedWeights
from lightning_dct.sync.update_flow import UpdateFlow
from lightning_dct.traffic import FP32_BYTES, Traffic, all_reduce_bytes
from lightning_dct.wire.payload import tag_of
from replicated.threads import Arrive, Threads, Work


class Group:
    """The process group of one rank of several in this thread."""

    def __init__(
        self, rank: int, meetings: list[dict[int, tuple[Tensor, Any]]], ranks: int
    ) -> None:
        self._rank = rank
        self._meetings = meetings
        self._ranks = ranks
        self._calls = 0

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank

    def bring(self, tensor: Tensor, sizes: Any, arrive: Arrive) -> Work:
        """Start a collective; its work has what arrives, once all ranks have brought theirs."""
        if self._calls == len(self._meetings):
            self._meetings.append({})
        meeting = self._meetings[self._calls]
        meeting[self._rank] = tensor, sizes
        self._calls += 1
        return Work(lambda: arrive([meeting[rank] for rank in range(self._ranks)]))


class Collectives:
    """Those of ``torch.distributed`` that exchanges of updates call."""

    ReduceOp = dist.ReduceOp

    @staticmethod
    def get_backend(group: Group) -> str:
        return "lockstep"

    @staticmethod
    def all_gather_single(
        output: Tensor, mine: Tensor, group: Group, async_op: bool = False
    ) -> Work:
        return group.bring(
            mine, None, lambda all_ranks: torch.cat([theirs for theirs, _ in all_ranks], out=output)
        )

    @staticmethod
    def all_gather(outputs: list[Tensor], mine: Tensor, group: Group, async_op: bool) -> Work:
        def arrive(all_ranks: list[tuple[Tensor, Any]]) -> None:
            for output, (theirs, _) in zip(outputs, all_ranks, strict=True):
                output.copy_(theirs)

        return group.bring(mine, None, arrive)

    @staticmethod
    def all_to_all_single(
        output: Tensor,
        mine: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        group: Group,
        async_op: bool,
    ) -> Work:
        def arrive(all_ranks: list[tuple[Tensor, Any]]) -> None:
            torch.cat(
                [theirs.split(sizes)[group.rank()] for theirs, sizes in all_ranks], out=output
            )

        return group.bring(mine, input_sizes, arrive)

    @staticmethod
    def all_reduce(buffer: Tensor, group: Group, async_op: bool = False, op: Any = None) -> Work:
        def arrive(all_ranks: list[tuple[Tensor, Any]]) -> None:
            brought = torch.stack([theirs for theirs, _ in all_ranks])
            buffer.copy_(brought.sum(0) if op is None else brought.amax(0))

        return group.bring(buffer.clone(), None, arrive)


class Rank:
    """What one rank has besides its own weights."""

    def __init__(self, config: DCTConfig, parameters: Mapping[str, Tensor], link: Link) -> None:
        self.exchange = _exchange(config, parameters, link)
        pieces = self.exchange.pieces
        self.feedback = ErrorFeedback(
            pieces, config.adapt_threshold, undoable=False, kernel=config.kernel, of_updates=True
        )
        self.weights = SharedWeights()
        self.clock = OptimizerClock()
        for name, parameter in parameters.items():
            self.weights.adopt(name, parameter)
        plans = Plans(config, self.exchange.link_traversals)
        self.flow = UpdateFlow(plans, self.weights, self.exchange, self.feedback)


def _exchange(config: DCTConfig, parameters: Mapping[str, Tensor], link: Link) -> Exchange:
    name = config.exchange
    if name == "auto":  # each rank on a node of its own
        name = choose_for_model(
            config, parameters, NodeLayout(tuple((rank, 0) for rank in range(link.size)))
        ).name  # type: ignore[assignment]
    if name == "two_phase":
        pieces = share_model(config, parameters, link_traversals(name, link.size), link.size)
        return TwoPhase(link, pieces, defer_unused=False)
    if name != "all_gather" or config.overlap_steps:
        raise ValueError(
            "replicas exchange with all_gather or two_phase, and without overlap_steps"
        )
    return AllGather(link)


def figures_of_traffic(traffic: Sequence[Traffic]) -> dict[str, float]:
    """The ratio of bytes, and those that a rank sends in a step."""
    totals = [own.totals for own in traffic]
    # All ranks send as much, but for `two_phase`, whose owners differ a little.
    sent, dense, steps = (
        sum(getattr(one, name) for one in totals) for name in ("bytes_sent", "bytes_dense", "steps")
    )
    return {"ratio": dense / sent, "bytes_sent_per_step": sent / steps}


class Exchanges:
    """The exchanges of all ranks of one training.

    Args:
        settings: Of :class:`~lightning_dct.Updates`; those that are left out follow from the length
            of the run.
        models: The weights of each rank by name, in the model's order, all alike. After a step they
            have its gradients.
        steps: Of the run.
        trial: How the optimizer's steps depend on gradients and weight decay.
        keys: By parameter, those of its optimizer's state that grow with the square of gradients,
            and their memories.
        squares: Gives each rank's state of that kind of some parameters.

    Attributes:
        config: The settings of the whole run.
        ranks: What each rank has. The first one's coherence is that of all.
        traffic: The bytes of each rank.
        start: Calls :meth:`exchange`, or does the same in another way.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        models: Sequence[Mapping[str, Tensor]],
        steps: int,
        trial: Trial,
        keys: Mapping[str, Mapping[str, float]],
        squares: Callable[[Sequence[str]], Sequence[Mapping[str, Squares]]],
    ) -> None:
        self._run = RunSettings(UserSettings.of(settings), len(models), steps)
        self.config = self._run.config_after(0)
        meetings: list[dict[int, tuple[Tensor, Any]]] = []
        self.traffic = [Traffic() for _ in models]
        self._meetings = meetings
        self._trial = trial
        self._keys = keys
        self._squares = squares
        self.start: Callable[[int, ExchangeContext, bool], None] = self.exchange
        links = [
            Link(Group(rank, meetings, len(models)), own) for rank, own in enumerate(self.traffic)
        ]  # type: ignore[arg-type]
        self.ranks = [Rank(self.config, own, link) for own, link in zip(models, links, strict=True)]
        self._threads = Threads(len(models))
        groups = zip(self._threads.groups, self.traffic, strict=True)
        self._thread_links = [Link(group, own) for group, own in groups]  # type: ignore[arg-type]
        self._models = models
        self._step = 0
        self._since_refresh = 0
        self._wants_refresh = False
        self._buckets = buckets_of(list(models[0].items()), 1)
        self._entries = sum(weights.numel() for weights in models[0].values())
        self._coherence = self.ranks[0].clock.coherence
        self._awaited = Awaited()

    def shared(self, names: Sequence[str]) -> list[Tensor]:
        """The shared weights of some parameters on all ranks."""
        return [rank.weights.shared(name) for rank in self.ranks for name in names]

    def figures(self) -> dict[str, Any]:
        """What was sent, and with which settings."""
        settings = {
            name: getattr(self.config, name) for name in ("local_steps", "density", "exchange")
        }
        return {
            **figures_of_traffic(self.traffic),
            "exchange": type(self.ranks[0].exchange).__name__,
            "settings": settings,
        }

    def before_step(self) -> None:
        """Begin an optimizer step after which the ranks measure how far their gradients agree."""
        step = self._step + 1
        if self._decide(step).measures:
            by_step = [name for name in self._models[0] if not self._keys.get(name)]
            for rank in self.ranks:
                rank.clock.coherence.begin(step, {name: rank.weights.own(name) for name in by_step})

    def let_decay(self, rank: Rank, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        """Let a rank's shared weights decay after a step of its optimizer."""
        if self._trial.is_scale_invariant:
            rank.clock.decay.after_step(optimizer, self._trial.decays, names, rank.weights)

    def after_step(self) -> None:
        """Exchange after an optimizer step, if that is due."""
        ranks = len(self.ranks)
        self._wants_refresh |= self._since_refresh >= self.config.refresh_every
        self._step += 1
        self._since_refresh += 1
        for own in self.traffic:
            own.add(steps=1, bytes_dense=all_reduce_bytes(FP32_BYTES * self._entries, ranks))
        length, is_exchanged, *_ = self._decide(self._step)
        if not is_exchanged:
            return
        if self._coherence.has_begun(self._step):
            self._measure()
        refreshes = self._wants_refresh
        if refreshes:
            self._since_refresh = 1
            self._wants_refresh = False
        decision = self._decide(self._step)
        tag = tag_of("replicas", self._step, 0)
        for rank in self.ranks:
            rank.clock.holds_back = decision.holds_back
        context = ExchangeContext(
            tag, dropped=1.0 - decision.kept, gains=decision.gains(self._coherence)
        )
        self.start(length, context, refreshes)
        if self.config.share_second_moments:
            self._average_squares(length)

    def _decide(self, step: int) -> Decision:
        return decide(
            step,
            self.config,
            is_scale_invariant=self._trial.is_scale_invariant,
            is_ending=self._run.is_ending(step),
            are_opposed=self._coherence.are_opposed,
        )

    def _measure(self) -> None:
        samples = [
            {
                name: rank.clock.coherence.sample(
                    name, rank.weights.own(name), parameter.grad, self._memory(name)
                )
                for name, parameter in rank.weights.parameters.items()
            }
            for rank in self.ranks
        ]

        def measure(rank: int) -> None:
            if rank:
                measure_all(
                    [sample.entries for sample in samples[rank].values()], self._thread_links[rank]
                )
            else:
                self._coherence.measure(samples[0], self._thread_links[0], self._awaited)

        self._side_by_side(measure)
        self._awaited.poll()

    def _memory(self, name: str) -> float | None:
        return next(iter(self._keys.get(name, {}).values()), None)

    def _average_squares(self, length: int) -> None:
        first = self.ranks[0]
        having = [name for name in self._models[0] if self._keys.get(name)]
        if not having or not may_be_averaged(self._step, length):
            return
        states = [first.weights.parameters[name] for name in having for _ in self._keys[name]]
        if first.flow.averages_squares(self._step, length, states, self._buckets):
            squares = self._squares(having)
            device = self._models[0][having[0]].device
            average = [rank.clock.squares.average for rank in self.ranks]
            self._side_by_side(
                lambda rank: average[rank](squares[rank], self._thread_links[rank], device)
            )

    def _side_by_side(self, function: Callable[[int], object]) -> None:
        """Call a function with each rank; its collectives wait for all of them."""
        with mock.patch.object(collectives, "dist", Collectives):
            self._threads.run(function)

    def exchange(self, length: int, context: ExchangeContext, refreshes: bool) -> None:
        """Exchange all buckets, rank by rank, ``length`` steps after the last time."""
        if refreshes:
            for rank in self.ranks:
                rank.feedback.thresholds.forget_those_of(self._models[0].keys())
        with mock.patch.object(collectives, "dist", Collectives):
            for names in self._buckets:
                items = [rank.flow.send(names, rank.clock, length, context) for rank in self.ranks]
                while items[0].transfer.collectives_left:
                    for rank, item in zip(self.ranks, items, strict=True):
                        item.transfer.advance(rank.exchange.everyone.traffic, check_finite=False)
                for rank, item in zip(self.ranks, items, strict=True):
                    rank.flow.apply(rank.clock, [item])
        self._meetings.clear()
        for rank in self.ranks:
            rank.exchange.everyone.group._calls = 0
