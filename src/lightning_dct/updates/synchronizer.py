"""Exchanges what weights have moved, after every so many steps of an optimizer that nobody touches.

    rank r         w_r <- user's optimizer (w_r)                      ``local_steps`` times
                   a_r  = w_r - S                                     moved, or not sent yet
                   c_r  = the entries of a_r that reach a threshold, in few bits
    every rank     m    = 1 / sqrt(W n) * sum over ranks of c_r       any exchange
                   S   += m,   w_r  = S + decay * (a_r - c_r)

``S`` are the shared weights. A rank replaces what it has sent by the mean of what all have sent, and keeps what it has
not sent in its own weights: it trains on with that, as in *Step-Ahead Error Feedback* (Xu and Huang, AAAI 2021). So
``w_r - S`` is the residual. ``decay`` keeps the ranks from drifting apart while training warms up; then it is 1.

``n`` is the number of ranks that have sent an entry. Where all have, ``m`` is their mean. The fewer there are, the less
the ranks agree on where that entry should go. Then their gradients are mostly noise, and the steps of an optimizer that
divides by the size of gradients, as Adam does, are too short by up to ``sqrt(W)``: noise makes the gradients of one
rank larger than their mean over all. The square root makes up for that.

Sources: SPARQ-SGD (Singh et al., arXiv 1910.14280) and DiLoCo (Douillard et al., arXiv 2311.08105) for compressed
local steps, Streaming DiLoCo (Douillard et al., arXiv 2501.18512) for tensors that take turns,
and travel while training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.collectives import Link, all_reduce_mean
from lightning_dct.gradients.exchanges import Exchange
from lightning_dct.gradients.exchanges.base import complete
from lightning_dct.gradients.plan import local_of, real_dtype, real_numel
from lightning_dct.gradients.synchronizer import Synchronizer
from lightning_dct.traffic import FP32_BYTES, all_gather_bytes, all_reduce_bytes, bytes_between_nodes
from lightning_dct.updates.rounds import MOST_TRAVELLING, buckets_of, is_due, round_length
from lightning_dct.updates.shared_weights import SharedWeights, as_real
from lightning_dct.updates.turns import Travelling, Turns, load_turns, save_turns


class UpdateSynchronizer(Synchronizer):
    """Exchanges what one rank's weights have moved with the others.

    Every optimizer has a clock of its own, which counts its steps, skipped ones included. Parameters take part from the
    first step of their optimizer that finds them trainable.

    Args:
        config: The settings.
        parameter_names: The name of every parameter that may take part. All ranks have the same values in them.
        exchange: How payloads get to the other ranks; its ranks are the ones that take part.
        buffers: The model's floating-point buffers by name, which are averaged, uncompressed.
        optimizers: Gives all optimizers that step, the same in the same order on every rank.
        parameters: Gives all parameters of the model, those that are not to take part among them.
        weights: The shared weights, where the model is to be shown them in another way than by pointers.
        inside: The ranks over which this rank's replica is spread, where it is; they too have buffers of their own.
    """

    def __init__(
        self,
        config: DCTConfig,
        parameter_names: Mapping[Tensor, str],
        exchange: Exchange,
        buffers: Callable[[], Mapping[str, Tensor]],
        optimizers: Callable[[], Sequence[Optimizer]],
        parameters: Callable[[], Collection[Tensor]],
        weights: SharedWeights | None = None,
        inside: Link | None = None,
    ) -> None:
        super().__init__(config, parameter_names, exchange)
        self.memory.what, self.memory.by_senders = "Updates", True
        self.weights = weights or SharedWeights()
        self._average_over = [exchange.everyone] if inside is None else [inside, exchange.everyone]
        self._buffers = buffers
        self._optimizers = optimizers
        self._parameters = parameters
        # Parameters of which it is known whether they take part.
        self._settled = self._left_alone()
        self._turns: dict[int, Turns] = {}
        self._to_refresh: set[str] = set()
        # Nobody to exchange anything with: then a rank's own weights are all there is.
        self._alone = exchange.everyone.size == 1

    def before_step(self, optimizer: Optimizer) -> None:
        """Take in the parameters that an optimizer is about to step for the first time."""
        turns = self._turns.setdefault(self._number_of(optimizer), Turns())
        unsettled = {p for group in optimizer.param_groups for p in group["params"] if p not in self._settled}
        if not unsettled:
            return
        strangers = unsettled - self.parameter_names.keys()
        # Those that are no part of the model are their optimizer's own affair, as under DistributedDataParallel.
        self._refuse([parameter for parameter in self._parameters() if parameter in strangers])
        new = {parameter for parameter in unsettled - strangers if parameter.requires_grad}
        self._settled |= strangers | new
        if not new or self._alone:
            return
        known = set(turns.names)
        parameters = {name: parameter for parameter, name in self.parameter_names.items()}
        # In the model's order, which is the same on every rank.
        turns.names = [name for name, parameter in parameters.items() if name in known or parameter in new]
        for name in turns.names:
            self.weights.adopt(name, parameters[name])
        turns.buckets = buckets_of(
            [(name, parameters[name]) for name in turns.names], self.config.round_length if self.config.delay else 1
        )
        turns.dense_bytes = 0

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step, apply what is due, and exchange what is due; a collective call."""
        number = self._number_of(optimizer)
        turns = self._turns[number]
        self.request_refresh_when_due()
        turns.steps += 1
        self.synchronisations += 1
        self.steps_since_refresh += 1
        self._count_dense(turns)
        if arrived := [item for item in turns.travelling if item.due <= turns.steps]:
            self._apply(turns, arrived)
        if sending := self._due(turns):
            self._forget_thresholds(sending)
            self.memory.begin(1.0, refresh=False)
            for bucket in sending:
                turns.travelling.append(self._send(bucket, turns))
                if not self.config.delay and sum(item.own.numel() for item in turns.travelling) >= MOST_TRAVELLING:
                    self._apply(turns, turns.travelling[:1])
            self.traffic.add(refreshes=int(self.memory.selected))
            if not self.config.delay:
                self._apply(turns, turns.travelling)
            # Statistics of a BatchNorm say nothing to training, so the shorter rounds of the warm-up spare them.
            if number == min(self._turns) and turns.steps % self.config.round_length == 0:
                self.average_buffers()
        self.memory.awaited.poll()

    def average_buffers(self) -> None:
        """Give every rank the mean of the floating-point buffers; a collective call."""
        buffers = list(self._buffers().values())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            some = [buffer for buffer in buffers if buffer.dtype == dtype]
            together = torch.cat([buffer.reshape(-1) for buffer in some])
            for link in self._average_over:
                all_reduce_mean(together, link).wait()
            for buffer, mean in zip(some, together.split([buffer.numel() for buffer in some]), strict=True):
                buffer.copy_(mean.view(buffer.shape))

    def norms(self) -> dict[str, float]:
        """Euclidean norm of what this rank has not sent of each parameter, or not passed on."""
        norms = self.weights.norms()
        for name, norm in self.memory.norms().items():
            norms[name] = math.hypot(norms.get(name, 0.0), norm)
        return norms

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain numbers, dicts and CPU tensors. Waits for what travels, but does not apply it."""
        for turns in self._turns.values():
            self._bring_home(turns.travelling)
        state = super().state_dict()
        clocks, in_flight = save_turns(self._turns, self.weights.parameters, self._to_refresh)
        own = {name: self.weights.own(name) for name in self.weights.parameters} | dict(self._buffers())
        return {
            **state,
            "residuals": {},
            "weights": {name: weights.detach().to("cpu", copy=True) for name, weights in own.items()},
            "exchange_clocks": clocks,
            "in_flight": in_flight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the model has the shared weights of the checkpoint.

        Raises:
            ValueError: Something saved has another size than the parameter of its name.
        """
        super().load_state_dict(state)
        parameters = {name: parameter for parameter, name in self.parameter_names.items()}
        buffers = self._buffers()
        for name, weights in state.get("weights", {}).items():
            if name in parameters and self._alone:
                local_of(parameters[name]).data.copy_(weights)
            elif name in parameters:
                self.weights.adopt(name, parameters[name])
                self.weights.set_own(name, weights)
            elif name in buffers:
                buffers[name].copy_(weights)
        # What owners of sums held back under another exchange, or with another number of ranks.
        for name, left in self.memory.take_residuals().items():
            if name in self.weights.parameters:
                own = as_real(self.weights.own(name))
                own.add_(left.view(own.shape).to(own.device))
        saved = state.get("exchange_clocks", {}), state.get("in_flight", {})
        self._turns, self._to_refresh = load_turns(*saved, parameters)
        self._settled = self._left_alone()

    def _left_alone(self) -> set[Tensor]:
        """Parameters of the model that are not to take part."""
        return set(self._parameters()) - self.parameter_names.keys()

    def _due(self, turns: Turns) -> list[list[str]]:
        """The buckets that are exchanged after this step, less what is still on its way since a short first round."""
        config = self.config
        length = self._length(turns)
        if not config.delay:
            return turns.buckets if is_due(turns.steps, length) else []
        on_their_way = {name for item in turns.travelling for name in item.names}
        return [
            bucket
            for place, bucket in enumerate(turns.buckets)
            if is_due(turns.steps, length, place, len(turns.buckets)) and on_their_way.isdisjoint(bucket)
        ]

    def _length(self, turns: Turns) -> int:
        return round_length(turns.steps, self.config.round_length, self.config.warmup_steps)

    def _forget_thresholds(self, buckets: Iterable[Sequence[str]]) -> None:
        """Select the thresholds of what is about to be sent anew, where that has been asked for since it was sent last.

        Those of what is travelling are still in use.
        """
        if self.refresh_requested:
            self._to_refresh = {name for turns in self._turns.values() for name in turns.names}
            self.refresh_requested, self.steps_since_refresh = False, 1
        names = self._to_refresh & {name for bucket in buckets for name in bucket}
        self.thresholds.forget_those_of(names)
        self._to_refresh -= names

    def _number_of(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._optimizers()):
            if known is optimizer:
                return number
        raise ValueError(
            f"A {type(optimizer).__name__} steps that is not among the optimizers that `configure_optimizers` returned."
            " Return it there too, so that all ranks know when it steps."
        )

    def _send(self, names: Sequence[str], turns: Turns) -> Travelling:
        """Start sending what some of the parameters that take turns have moved."""
        with self.traffic.timed("compress"):
            parameters, length = [self.weights.parameters[name] for name in names], self._length(turns)
            share = length / self.config.round_length
            plan = self._plan_of(parameters, self._sizes(names), real_dtype(parameters[0]), share)
            moved = self.weights.movement(names, plan.residual_dtype)
            own = moved.clone() if plan.is_dense or self.exchange.sums_first else None
            pending = self._start(moved, plan, set())
            if own is None:
                # What is not sent stays in the weights. The residual is only where it has been worked out.
                is_warming_up = turns.steps <= self.config.warmup_steps
                kept = self.config.residual_decay if is_warming_up else 1.0
                left = self.memory.residual_of(plan, moved.device)
                own = torch.sub(moved, left, alpha=kept, out=left)
                for name in names:
                    self.memory.residuals.drop(name)
            return Travelling(names, turns.steps + min(self.config.delay, length), pending, moved, own)

    def _apply(self, turns: Turns, items: list[Travelling]) -> None:
        """Replace what this rank has sent by the mean of what all have sent, and move the shared weights by that."""
        self._bring_home(items)
        with self.traffic.timed("apply"):
            for item in items:
                self.weights.move(item.names, item.mean, item.own)
        turns.travelling = [item for item in turns.travelling if item not in items]

    def _bring_home(self, items: Iterable[Travelling]) -> None:
        travelling = [item for item in items if item.pending is not None]
        complete([item.pending for item in travelling if item.pending is not None], self.traffic)
        self.memory.commit()
        for item in travelling:
            assert item.pending is not None
            item.mean, item.pending = item.pending.future.wait(), None

    def _sizes(self, names: Sequence[str]) -> list[int]:
        return [real_numel(self.weights.parameters[name]) for name in names]

    def _count_dense(self, turns: Turns) -> None:
        """Count what DistributedDataParallel would have sent for a step."""
        everyone = self.exchange.everyone
        if not turns.dense_bytes:
            parameters = [self.weights.parameters[name] for name in turns.names]
            turns.sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
            rows = sum(real_numel(parameter) for parameter in turns.sparse)
            entries = sum(real_numel(parameter) for parameter in parameters) - rows
            turns.dense_bytes = all_reduce_bytes(FP32_BYTES * entries, everyone.size)
        num_bytes = turns.dense_bytes
        for gradient in (parameter.grad for parameter in turns.sparse if parameter.grad is not None):
            parts = (gradient._indices(), gradient._values())
            num_bytes += all_gather_bytes(sum(part.numel() * part.element_size() for part in parts), everyone.size)
        self.traffic.add(steps=1, bytes_dense=bytes_between_nodes(num_bytes, everyone.size, everyone.ranks_per_node))
