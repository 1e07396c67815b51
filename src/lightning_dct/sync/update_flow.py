"""The flow of updates: from the weights of a rank to all ranks, and what arrives into the weights."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import (
    Bucket,
    BucketPlan,
    ExchangeContext,
    Plans,
    Received,
    real_dtype,
)
from lightning_dct.compress.codec import apply, counting, decompress, decompress_own
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.exchange.base import Exchange, finish_transfers
from lightning_dct.sync.optimizer_clock import InFlight, OptimizerClock
from lightning_dct.sync.optimizer_state import bytes_of_average, is_averaged
from lightning_dct.sync.shared_weights import SharedWeights


class UpdateFlow:
    """Sends buckets of updates, and applies what all ranks have sent.

    Args:
        plans: What is sent of each bucket, by the settings.
        weights: This rank's own and the shared ones.
        exchange: Between whom.
        feedback: The thresholds, and residuals of what is not read from the weights in place.
    """

    def __init__(
        self, plans: Plans, weights: SharedWeights, exchange: Exchange, feedback: ErrorFeedback
    ) -> None:
        self._plans = plans
        self._weights = weights
        self._exchange = exchange
        self._feedback = feedback
        self._traffic = exchange.everyone.traffic

    def plan(self, names: Sequence[str], length: int) -> BucketPlan:
        """How some parameters are sent, so many steps after the last time."""
        sizes = [self._weights.sizes[name] for name in names]
        dtype = real_dtype(self._weights.parameters[names[0]])
        return self._plans.of(names, sizes, dtype, length / self._plans.config.local_steps)

    def averages_squares(
        self,
        step: int,
        length: int,
        states: Sequence[Tensor],
        buckets: Sequence[Sequence[str]],
    ) -> bool:
        """Whether states of the optimizer are averaged after an exchange, by their share of its
        bytes.
        """
        sent = sum(self.plan(names, length).num_bytes for names in buckets)
        sent_a_step = sent * self._exchange.link_traversals / length
        averaged = bytes_of_average(states, self._exchange.everyone.size)
        return is_averaged(step, length, averaged, sent_a_step)

    def send(
        self, names: Sequence[str], clock: OptimizerClock, length: int, context: ExchangeContext
    ) -> InFlight:
        """Start sending the updates of some parameters, ``length`` steps after the last time; a
        collective call.
        """
        with self._traffic.timed("compress"):
            config = self._plans.config
            plan = self.plan(names, length)
            self._weights.take_back(names)
            is_summed = plan.is_dense or self._exchange.sums_first
            bucket = None if is_summed else self._weights.bucket(names)
            sent = bucket
            own = None
            left = list[Tensor]()
            if sent is None:  # updates are not read from the weights in place
                moved = self._weights.movement(names, plan.residual_dtype)
                own = moved.clone() if is_summed else None
                left = [] if is_summed else [self._feedback.residual_of(plan, moved.device)]
                sent = Bucket([moved], left, 1.0)
            transfer = self._exchange.start(sent, plan, set(), self._feedback, context)
            # What is not sent stays in the weights, and the residual is not needed any more.
            if left:
                if context.dropped:
                    self._weights.add_own(names, left[0].mul_(context.dropped), -1.0)
                for name in names:
                    self._feedback.residuals.drop(name)
            due = clock.steps + min(config.overlap_steps, length)
            # While training goes on the weights may come to lie elsewhere.
            return InFlight(
                names, sum(plan.sizes), due, transfer, own, None if config.overlap_steps else bucket
            )

    def apply(self, clock: OptimizerClock, items: list[InFlight]) -> None:
        """Add the mean to the shared weights, and replace what this rank has sent by the mean in
        its own.
        """
        self.finish(items)
        with self._traffic.timed("apply"):
            for item in items:
                bucket = item.bucket or self._weights.bucket(item.names)
                received = item.transfer.result
                if isinstance(received, Received) and item.own is None and bucket is not None:
                    apply(self._feedback, received, bucket)
                else:
                    self._weights.move(item.names, *self.read(item))
                if clock.holds_back:
                    self._weights.hold_back(item.names)
        clock.in_flight = [item for item in clock.in_flight if item not in items]

    def finish(self, items: Iterable[InFlight]) -> None:
        """Wait for updates in flight; a collective call for exchanges of several collectives."""
        finish_transfers([item.transfer for item in items], self._traffic)
        self._feedback.commit()

    def read(self, item: InFlight) -> tuple[Tensor, Tensor]:
        """The mean of what all ranks have sent, and what this rank has sent, of updates that
        arrived: ``[n]`` each.
        """
        received = item.transfer.result
        if not isinstance(received, Received):
            return received, item.own  # type: ignore[return-value]
        mean = received.payloads.new_empty(item.entries, dtype=received.plan.residual_dtype)
        mean, sent = (
            decompress(self._feedback, received, mean),
            decompress_own(self._feedback, received, mean),
        )
        # A node sends for its ranks, which keep what it does not send.
        return mean, sent if item.own is None else torch.where(
            counting(sent, received.plan), item.own, 0.0
        )
