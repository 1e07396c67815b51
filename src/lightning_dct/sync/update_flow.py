"""One bucket of updates on its way: read from the weights, exchanged, and applied to both kinds of them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, Plans, Received, Sending, real_dtype
from lightning_dct.compress.codec import apply, counting, decompress, decompress_own
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.exchange.base import Exchange, Message, finish
from lightning_dct.sync.rounds import InFlight, Rounds
from lightning_dct.sync.shared_weights import SharedWeights


class UpdateFlow:
    """Sends buckets of updates, and applies what all ranks have sent.

    Args:
        plans: What is sent of each bucket, by the settings.
        weights: This rank's own and the shared ones.
        exchange: Between whom.
        feedback: The thresholds, and residuals of what is not read from the weights in place.
    """

    def __init__(self, plans: Plans, weights: SharedWeights, exchange: Exchange, feedback: ErrorFeedback) -> None:
        self._plans, self._weights, self._exchange, self._feedback = plans, weights, exchange, feedback
        self._traffic = exchange.everyone.traffic

    def plan(self, names: Sequence[str], length: int) -> BucketPlan:
        """How some parameters are sent, so many steps after the last time."""
        sizes, dtype = [self._weights.sizes[name] for name in names], real_dtype(self._weights.parameters[names[0]])
        return self._plans.of(names, sizes, dtype, length / self._plans.config.local_steps)

    def send(self, names: Sequence[str], rounds: Rounds, length: int, how: Sending) -> InFlight:
        """Start sending the updates of some parameters, ``length`` steps after the last time; a collective call."""
        with self._traffic.timed("compress"):
            config, plan = self._plans.config, self.plan(names, length)
            own = bucket = None
            if plan.is_dense or self._exchange.sums_first:
                moved = self._weights.movement(names, plan.residual_dtype)
                own = moved.clone()
                message = self._exchange.start(Bucket([moved], [], 1.0), plan, set(), self._feedback, how)
            elif (bucket := self._weights.bucket(names)) is not None:
                message = self._exchange.start(bucket, plan, set(), self._feedback, how)
            else:
                message = self._send_movement(names, plan, how)
            due = rounds.steps + min(config.overlap_steps, length)
            # While training goes on the weights may come to lie elsewhere.
            return InFlight(names, sum(plan.sizes), due, message, own, None if config.overlap_steps else bucket)

    def apply(self, rounds: Rounds, items: list[InFlight]) -> None:
        """Add the mean to the shared weights, and replace what this rank has sent by the mean in its own."""
        self.finish(items)
        with self._traffic.timed("apply"):
            for item in items:
                bucket, received = item.bucket or self._weights.bucket(item.names), item.message.result
                if isinstance(received, Received) and item.own is None and bucket is not None:
                    apply(self._feedback, received, bucket)
                else:
                    self._weights.move(item.names, *self.read(item))
        rounds.in_flight = [item for item in rounds.in_flight if item not in items]

    def finish(self, items: Iterable[InFlight]) -> None:
        """Wait for updates in flight; a collective call for exchanges of several collectives."""
        finish([item.message for item in items], self._traffic)
        self._feedback.commit()

    def read(self, item: InFlight) -> tuple[Tensor, Tensor]:
        """The mean of what all ranks have sent, and what this rank has sent, of updates that arrived: ``[n]`` each."""
        received = item.message.result
        if not isinstance(received, Received):
            return received, item.own  # type: ignore[return-value]
        mean = received.payloads.new_empty(item.entries, dtype=received.plan.residual_dtype)
        mean, sent = decompress(self._feedback, received, mean), decompress_own(self._feedback, received, mean)
        # A node sends for its ranks, which keep what it does not send.
        return mean, sent if item.own is None else torch.where(counting(sent, received.plan), item.own, 0.0)

    def _send_movement(self, names: Sequence[str], plan: BucketPlan, how: Sending) -> Message:
        """Start sending updates that are not read from the weights in place."""
        moved = self._weights.movement(names, plan.residual_dtype)
        left = self._feedback.residual_of(plan, moved.device)
        message = self._exchange.start(Bucket([moved], [left], 1.0), plan, set(), self._feedback, how)
        # What is not sent stays in the weights, and the residual is not needed any more.
        if how.lost:
            self._weights.add_own(names, left.mul_(how.lost), -1.0)
        for name in names:
            self._feedback.residuals.drop(name)
        return message
