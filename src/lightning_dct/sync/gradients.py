"""Exchanges gradients in every backward, as DDP's communication hook."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's
# annotations with classes.

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, ExchangeContext, real_numel
from lightning_dct.compress.codec import decompress
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.base import Exchange, Transfer, finish_transfers, unused_tensors
from lightning_dct.failures.collective_order import EXCHANGE
from lightning_dct.sync.synchronizer import Synchronizer
from lightning_dct.traffic import FP32_BYTES, Clock, all_reduce_bytes
from lightning_dct.wire.payload import tag_of


class GradientSynchronizer(Synchronizer):
    """Averages the gradients of all ranks, as the paper does.

    A *synchronisation* is one pass over all buckets: one for each optimizer step, whatever the
    number of micro-batches.

    Args:
        config, parameter_names, exchange: See :class:`Synchronizer`.
        defer_unused: Send nothing of a tensor that this rank's backward did not use. With
            ``find_unused_parameters`` DDP discards the mean of a parameter that no rank has used,
            and what was sent would be lost.
        loss_scale: Gives the loss scale of mixed-precision training; None if there is none. With
            it, a synchronisation that ends in an infinite or NaN gradient is undone, because the
            scaler skips that optimizer step.
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
        # Of the current synchronisation.
        self._transfers: list[Transfer] = []
        self._context = ExchangeContext()
        # A second stream of each GPU.
        self._beside: dict[torch.device, torch.cuda.Stream] = {}

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook for ``DistributedDataParallel.register_comm_hook``.

        DDP passes the buckets in the same order on every rank, each as soon as backward has filled
        it. So communication overlaps with backward.

        On a GPU all work is queued on a second stream. On backward's own, the rest of backward
        would wait for the network together with a bucket that is sent in several rounds.

        Returns:
            A future of the bucket's averaged gradients.

        Raises:
            RuntimeError: Backward is captured as a CUDA graph.
        """
        device = bucket.buffer().device
        if device.type == "cpu":
            return self._take(bucket)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A CUDA graph cannot hold an exchange of gradients: replaying it would send the"
                " same entries again. Leave backward out of the graph, or use `compress='updates'`,"
                " which exchanges after the optimizer's step."
            )
        backward = torch.cuda.current_stream(device)
        if device not in self._beside:
            self._beside[device] = torch.cuda.Stream(device)
        beside = self._beside[device]
        beside.wait_stream(backward)
        # Backward loses the time of its host now, and at the end the time until the second stream
        # is done.
        clock = self.traffic.clock
        self.traffic.clock = Clock()
        try:
            with torch.cuda.stream(beside):
                future = self._take(bucket)
        finally:
            self.traffic.clock = clock
        if bucket.is_last():
            with self.traffic.timed(total="seconds_waiting"):
                backward.wait_stream(beside)
        return future

    def _take(self, bucket: GradBucket) -> Future[Tensor]:
        if not self._transfers:
            self._begin()
        earlier = [transfer for transfer in self._transfers if transfer.collectives_left > 1]
        with self.traffic.timed("compress"):
            self._transfers.append(self._send(bucket))
        future = self._transfers[-1].future
        # The buckets before this one start their next collective now. This must not depend on what
        # has arrived: every rank has to start the same collectives in the same order.
        for transfer in earlier:
            transfer.advance(self.traffic, self._loss_scale is not None)
        if bucket.is_last():
            self._finish()
        return future

    def _begin(self) -> None:
        self.check_order(
            EXCHANGE, f"an exchange of gradients for optimizer step {self.synchronisations + 1}"
        )
        self.request_refresh_when_due()
        self.feedback.begin(self.refresh_requested)
        scale = 1.0 if self._loss_scale is None else 1.0 / self._loss_scale()
        self._context = ExchangeContext(tag_of(self.synchronisations, self.epoch), scale)

    def _finish(self) -> None:
        """Complete all buckets and count the synchronisation."""
        # In backward's thread and not in callbacks of the futures: gloo would run those in its own
        # threads, which compete with backward for the interpreter and can abort the process when it
        # ends.
        finish_transfers(self._transfers, self.traffic, self._loss_scale is not None)
        self.feedback.awaited.poll()
        # The scaler checks the same. The means are the same on all ranks, and so is the result.
        nonfinite = self._loss_scale is not None and not all(
            transfer.finite for transfer in self._transfers
        )
        self.traffic.add(steps=1)
        if nonfinite:
            # The scaler skips this optimizer step. A requested refresh stays requested.
            self.feedback.roll_back()
        else:
            self.synchronisations += 1
            self.steps_since_refresh = 1 if self.refresh_requested else self.steps_since_refresh + 1
            self.traffic.add(refreshes=int(self.feedback.selected))
            self.refresh_requested = False
            self.feedback.commit()
        self._transfers = []

    def _send(self, bucket: GradBucket) -> Transfer:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self.exchange.start_sparse(buffer)
        # DDP passes complex parameters as real numbers of twice their size, and
        # `bucket.gradients()` does not.
        sizes = [real_numel(parameter) for parameter in bucket.parameters()]
        plan = self._plan_of(bucket.parameters(), sizes, buffer.dtype)
        everyone = self.exchange.everyone
        everyone.count_dense(all_reduce_bytes(FP32_BYTES * buffer.numel(), everyone.size))
        return self._start(buffer, plan, self._deferred(bucket, plan))

    def _deferred(self, bucket: GradBucket, plan: BucketPlan) -> set[int]:
        """The tensors of a bucket that this rank's backward did not use."""
        if not self._defer_unused:
            return set()
        # DDP passes zeros for them, but for parameters that `toggle_optimizer` has frozen, the
        # gradient of an earlier backward.
        parameters = enumerate(bucket.parameters())
        return unused_tensors(bucket.buffer(), plan) | {
            index for index, p in parameters if not p.requires_grad
        }

    def _start(self, buffer: Tensor, plan: BucketPlan, deferred: set[int]) -> Transfer:
        """Start sending a flattened bucket, which takes the mean."""
        in_bf16 = self.config.averages_in_bf16 and buffer.dtype == torch.float32
        has_none = plan.is_dense or self.exchange.sums_first
        residuals = [] if has_none else [self.feedback.residual_of(plan, buffer.device)]
        bucket = Bucket([buffer], residuals, self._context.scale)
        read = partial(decompress, self.feedback, buffer=buffer)
        dtype = torch.bfloat16 if in_bf16 else None
        return self.exchange.start(
            bucket, plan, deferred, self.feedback, self._context, read, dtype
        )
