"""Gradients, exchanged in every backward: the state behind DDP's communication hook."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's annotations with classes.

from collections.abc import Callable, Mapping

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from lightning_dct.config import DCTConfig
from lightning_dct.gradients.exchanges import Exchange
from lightning_dct.gradients.exchanges.base import Pending, complete, send_sparse, unused_tensors
from lightning_dct.gradients.plan import BucketPlan, real_numel
from lightning_dct.gradients.synchronizer import Synchronizer
from lightning_dct.traffic import FP32_BYTES, all_reduce_bytes, bytes_between_nodes


class GradientSynchronizer(Synchronizer):
    """Synchronises the gradients of one rank with the others', as the paper does.

    A *synchronisation* is one pass over all buckets, one for each optimizer step whatever the number of
    micro-batches.

    Args:
        config: The settings.
        parameter_names: The name of every parameter that may be in a bucket.
        exchange: How compressed gradients reach the other ranks; its ranks are the ones that take part.
        defer_unused: Keep the residual of a tensor that this rank's backward did not use instead of sending from it.
            With ``find_unused_parameters`` DDP discards the result for a globally unused parameter, and what had been
            sent for it would be lost.
        loss_scale: Gives the factor by which mixed-precision training has scaled the gradients; None when it does
            not. With it, a synchronisation that ends in an infinite or NaN gradient is undone, because the scaler
            skips that optimizer step.
    """

    def __init__(
        self,
        config: DCTConfig,
        parameter_names: Mapping[Tensor, str],
        exchange: Exchange,
        defer_unused: bool = False,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(config, parameter_names, exchange, undoable=loss_scale is not None)
        self._defer_unused = defer_unused
        self._loss_scale = loss_scale
        # The rest belongs to the synchronisation under way.
        self._pending: list[Pending] = []
        self._refreshing = False

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook for ``DistributedDataParallel.register_comm_hook``.

        DDP hands the buckets over in the same order on every rank, each as soon as backward has filled it, so its bytes
        travel while backward goes on.

        Returns:
            A future of the bucket's averaged gradients.
        """
        if not self._pending:
            self._begin()
        earlier = [pending for pending in self._pending if pending.rounds_left > 1]
        with self.traffic.timed("compress"):
            self._pending.append(self._send(bucket))
        future = self._pending[-1].future
        # Now the buckets before this one begin their next round. A count decides that, and never what has arrived:
        # every rank has to start the same collectives in the same order.
        for pending in earlier:
            pending.advance(self.traffic, self._loss_scale is not None)
        if bucket.is_last():
            self._finish()
        return future

    def check_idle(self) -> None:
        """See :meth:`Synchronizer.check_idle`."""
        if self._pending:
            raise RuntimeError("A synchronisation is under way: change its settings before backward or after it.")

    def _begin(self) -> None:
        self.request_refresh_when_due()
        self._refreshing = self.refresh_requested
        self.memory.begin(1.0 if self._loss_scale is None else 1.0 / self._loss_scale(), self._refreshing)

    def _finish(self) -> None:
        """Complete all buckets and count the synchronisation.

        This runs in the thread that runs backward, not in callbacks of the futures: gloo would run those in its own
        threads, which compete with backward for the interpreter and can abort the process when it ends.
        """
        complete(self._pending, self.traffic, self._loss_scale is not None)
        self.memory.awaited.poll()
        # The scaler will check the same. All ranks hold the same means, so all come to the same answer.
        nonfinite = self._loss_scale is not None and not all(pending.finite for pending in self._pending)
        self.traffic.add(steps=1)
        if nonfinite:
            # The scaler skips this optimizer step, and so do we. A refresh that was due is due again.
            self.memory.roll_back()
        else:
            self.synchronisations += 1
            self.steps_since_refresh = 1 if self._refreshing else self.steps_since_refresh + 1
            self.traffic.add(refreshes=int(self.memory.selected))
            self.refresh_requested = False
            self.memory.commit()
        self._pending = []

    def _send(self, bucket: GradBucket) -> Pending:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return Pending(send_sparse(buffer, self.exchange.everyone), 1, buffer)
        plan = self._plan_of_bucket(bucket)
        self._count_dense(buffer)
        return self._start(buffer, plan, self._deferred(bucket, plan))

    def _plan_of_bucket(self, bucket: GradBucket) -> BucketPlan:
        # DDP hands a complex parameter over as real numbers of twice its size; `bucket.gradients()` does not know it.
        sizes = [real_numel(parameter) for parameter in bucket.parameters()]
        return self._plan_of(bucket.parameters(), sizes, bucket.buffer().dtype)

    def _count_dense(self, buffer: Tensor) -> None:
        everyone = self.exchange.everyone
        dense_bytes = all_reduce_bytes(FP32_BYTES * buffer.numel(), everyone.size)
        self.traffic.add(bytes_dense=bytes_between_nodes(dense_bytes, everyone.size, everyone.ranks_per_node))

    def _deferred(self, bucket: GradBucket, plan: BucketPlan) -> set[int]:
        """The tensors of a bucket that this rank's backward did not use.

        DDP fills in zeros for them, or, for parameters switched off as ``toggle_optimizer`` does, any gradient that an
        earlier backward has left.
        """
        if not self._defer_unused:
            return set()
        parameters = enumerate(bucket.parameters())
        switched_off = {index for index, parameter in parameters if not parameter.requires_grad}
        return switched_off | unused_tensors(bucket.buffer(), plan)
