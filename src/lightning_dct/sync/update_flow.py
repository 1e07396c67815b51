"""One bucket of updates on its way: read from the weights, exchanged, and applied to both kinds of them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, Plans, Received, Sending, real_dtype
from lightning_dct.compress.codec import apply, counting, decompress, decompress_own
from lightning_dct.compress.memory import Memory
from lightning_dct.exchange.base import Exchange, Pending, complete, send_dense
from lightning_dct.sync.rounds import InFlight, Rounds
from lightning_dct.sync.shared_weights import SharedWeights


class UpdateFlow:
    """Sends buckets of updates, and applies what all ranks have sent.

    Args:
        plans: What is sent of each bucket, by the settings.
        weights: This rank's own and the shared ones.
        exchange: Between whom.
        memory: The thresholds, and residuals of what is not read from the weights in place.
    """

    def __init__(self, plans: Plans, weights: SharedWeights, exchange: Exchange, memory: Memory) -> None:
        self._plans, self._weights, self._exchange, self._memory = plans, weights, exchange, memory
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
                if plan.is_dense:
                    dense = send_dense(moved, plan, set(), self._memory, self._exchange.everyone, moved.dtype, how)
                    pending = Pending(dense, 1, moved.device)
                else:
                    pending = self._start(Bucket([moved], [], 1.0), plan, how)
            elif (bucket := self._weights.bucket(names)) is not None:
                pending = self._start(bucket, plan, how)
            else:
                pending = self._send_movement(names, plan, how)
            due = rounds.steps + min(config.overlap_steps, length)
            # While training goes on the weights may come to lie elsewhere.
            return InFlight(names, sum(plan.sizes), due, pending, None, own, None if config.overlap_steps else bucket)

    def apply(self, rounds: Rounds, items: list[InFlight]) -> None:
        """Add the mean to the shared weights, and replace what this rank has sent by the mean in its own."""
        self.complete(items)
        with self._traffic.timed("apply"):
            for item in items:
                bucket = item.bucket or self._weights.bucket(item.names)
                if isinstance(item.arrived, Received) and item.own is None and bucket is not None:
                    apply(self._memory, item.arrived, bucket)
                else:
                    self._weights.move(item.names, *self.read(item))
        rounds.in_flight = [item for item in rounds.in_flight if item not in items]

    def complete(self, items: Iterable[InFlight]) -> None:
        """Wait for updates in flight; a collective call for exchanges of several collectives."""
        pending = [(item, item.pending) for item in items if item.pending is not None]
        complete([exchange for _, exchange in pending], self._traffic)
        self._memory.commit()
        for item, exchange in pending:
            item.arrived, item.pending = exchange.result, None

    def read(self, item: InFlight) -> tuple[Tensor, Tensor]:
        """The mean of what all ranks have sent, and what this rank has sent, of completed updates: ``[n]`` each."""
        arrived = item.arrived
        if not isinstance(arrived, Received):
            return arrived, item.own  # type: ignore[return-value]
        mean = arrived.payloads.new_empty(item.entries, dtype=arrived.plan.residual_dtype)
        mean, sent = decompress(self._memory, arrived, mean), decompress_own(self._memory, arrived, mean)
        # A node sends for its ranks, which keep what it does not send.
        return mean, sent if item.own is None else torch.where(counting(sent, arrived.plan), item.own, 0.0)

    def _start(self, bucket: Bucket, plan: BucketPlan, how: Sending) -> Pending:
        flow = self._exchange.send(bucket, plan, set(), self._memory, how)
        return Pending(flow, self._exchange.num_collectives, bucket.news[0].device)

    def _send_movement(self, names: Sequence[str], plan: BucketPlan, how: Sending) -> Pending:
        """Start sending updates that are not read from the weights in place."""
        moved = self._weights.movement(names, plan.residual_dtype)
        left = self._memory.residual_of(plan, moved.device)
        pending = self._start(Bucket([moved], [left], 1.0), plan, how)
        # What is not sent stays in the weights, and the residual is not needed any more.
        if how.lost:
            self._weights.add_own(names, left.mul_(how.lost), -1.0)
        for name in names:
            self._memory.residuals.drop(name)
        return pending
