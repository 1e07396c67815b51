"""An exchange: the sequence of collectives by which one bucket is averaged over the ranks.

Buckets without compressed tensors, and sparse gradients, are all-reduced in every exchange.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import (
    Bucket,
    BucketPlan,
    ExchangeContext,
    OwnedPiece,
    Received,
    gains_of_dense,
)
from lightning_dct.compress.codec import compress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.exchange.collectives import (
    Link,
    Segments,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_mean_sparse,
)
from lightning_dct.traffic import Traffic
from lightning_dct.wire.payload import BE_ALIKE
from lightning_dct.wire.positions import PayloadError


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Wait until it is done."""


# The collectives of one bucket. The generator starts a collective and yields it, the caller waits
# for it and resumes the generator, and so on. It returns payloads, or the mean of a bucket that is
# not compressed.
Collectives = Generator[Waitable, None, Received | Tensor]


class Exchange(ABC):
    """How compressed buckets are exchanged.

    Attributes:
        everyone: All ranks, for what is not compressed.
        link_traversals: See :func:`~lightning_dct.compress.bucket_plan.plan_bucket`.
        num_collectives: For a bucket.
        pieces: The pieces of the model that this rank owns, by label.
        sums_first: Whether buckets are summed before they are compressed, so a rank has no residual
            of its own.
        own_groups: Process groups that were made for this exchange.
    """

    everyone: Link
    link_traversals: float
    num_collectives = 1
    pieces: Mapping[str, OwnedPiece] = {}
    sums_first = False
    own_groups: Sequence[dist.ProcessGroup] = ()

    @abstractmethod
    def send(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        context: ExchangeContext,
    ) -> Collectives:
        """Exchange a bucket. Every rank calls this for the same buckets in the same order.

        Args:
            bucket: The tensors of this rank.
            plan: How each tensor is sent.
            deferred: Indices of tensors that this rank's backward did not use. Nothing is sent of
                them.
            feedback: This rank's residuals and thresholds.
            context: The tag, and factors.
        """

    def start(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        context: ExchangeContext,
        read: Callable[[Received], Tensor] | None = None,
        dense_dtype: torch.dtype | None = None,
    ) -> "Transfer":
        """Start exchanging a bucket, or averaging one without compressed tensors; for the arguments
        see :meth:`send`.

        ``read`` makes the result of received payloads. ``dense_dtype`` is that in which a mean is
        taken, by default the bucket's.
        """
        device = bucket.inputs[0].device
        if plan.is_dense:
            (buffer,) = bucket.inputs
            dtype = dense_dtype or buffer.dtype
            collectives = send_dense(
                buffer, plan, deferred, feedback, self.everyone, dtype, context
            )
            return Transfer(collectives, 1, device)
        collectives = self.send(bucket, plan, deferred, feedback, context)
        return Transfer(collectives, self.num_collectives, device, read)

    def start_sparse(self, gradient: Tensor) -> "Transfer":
        """Start averaging a sparse gradient, uncompressed."""
        return Transfer(send_sparse(gradient, self.everyone), 1, gradient.device)

    def compress(
        self,
        feedback: ErrorFeedback,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        context: ExchangeContext,
        due: int,
    ) -> Tensor:
        """Compress a bucket into a payload.

        Counts the ``due`` entries, and those that are sent: of a GPU once the host knows their
        number.
        """
        payload, entries = compress(feedback, bucket, plan, deferred, context)
        dense = sum(plan.sizes[index] for index in plan.dense if index not in deferred)
        traffic = self.everyone.traffic
        if isinstance(entries, Tensor):
            traffic.add(entries=due)
            feedback.awaited.on_ready(
                entries, lambda counts: traffic.add(entries_sent=sum(counts) + dense)
            )
        else:
            traffic.add(entries=due, entries_sent=entries + dense)
        return payload

    def close(self) -> None:
        """Destroy the process groups that were made for this exchange."""
        for group in self.own_groups:
            dist.destroy_process_group(group)
        self.own_groups = ()


class Transfer:
    """A bucket on its way: the handle that :meth:`Exchange.start` returns.

    Its first collective starts here.

    Attributes:
        result: What ``read`` makes of received payloads, or a mean; None before the bucket has
            arrived.
        collectives_left: Collectives that have not been waited for.
        finite: Whether the mean is finite, if :meth:`advance` has checked it.
    """

    def __init__(
        self,
        collectives: Collectives,
        num_collectives: int,
        device: torch.device,
        read: Callable[[Received], Any] | None = None,
    ) -> None:
        self.collectives_left = num_collectives
        self.result: Any = None
        self.finite = True
        self._read = read
        self._collectives = collectives
        self._device = device
        self._future: Future[Any] | None = None
        self._current = next(collectives)

    @classmethod
    def arrived(cls, mean: Tensor) -> "Transfer":
        """One that had arrived before a run was resumed."""
        transfer = cls.__new__(cls)
        transfer.collectives_left = 0
        transfer.result = mean
        return transfer

    @property
    def future(self) -> Future[Any]:
        """A future of the result, for DistributedDataParallel.

        Request it before the result is there.

        On a GPU torch pickles the result to find its tensors, which is too slow for an exchange of
        updates.
        """
        self._future = self._future or Future(
            devices=[] if self._device.type == "cpu" else [self._device]
        )
        return self._future

    def advance(self, traffic: Traffic, check_finite: bool) -> None:
        """Wait for the current collective, then start the next one or read the result.

        ``check_finite`` checks whether the mean is finite, which waits for a GPU.
        """
        with traffic.timed("exchange", "seconds_waiting"):
            self._current.wait()
        with traffic.timed("decompress"):
            self.collectives_left -= 1
            try:
                self._current = next(self._collectives)
            except StopIteration as finished:
                received = finished.value
                mean = (
                    received
                    if self._read is None or isinstance(received, Tensor)
                    else self._read(received)
                )
                if check_finite:
                    self.finite = bool(
                        (mean._values() if mean.is_sparse else mean).isfinite().all()
                    )
                self.result = mean
                if self._future is not None:
                    self._future.set_result(mean)


def finish_transfers(
    transfers: Iterable[Transfer], traffic: Traffic, check_finite: bool = False
) -> None:
    """Finish buckets in the order of sending, collective by collective, and read one while the next
    is in flight.

    A collective call for exchanges of several collectives. For ``check_finite`` see
    :meth:`Transfer.advance`.
    """
    while under_way := [transfer for transfer in transfers if transfer.collectives_left]:
        for transfer in under_way:
            transfer.advance(traffic, check_finite)


def send_sparse(gradient: Tensor, everyone: Link) -> Collectives:
    """Exchange a sparse gradient, uncompressed."""
    yield all_reduce_mean_sparse(gradient, everyone)
    return gradient


def send_dense(
    buffer: Tensor,
    plan: BucketPlan,
    deferred: set[int],
    feedback: ErrorFeedback,
    everyone: Link,
    dtype: torch.dtype,
    context: ExchangeContext,
) -> Collectives:
    """Average a bucket without compressed tensors in a dtype, residuals included. Ranks also
    compare the tags of updates.
    """
    feedback.send_out(buffer, plan, deferred, context.scale, owned=True)
    everyone.traffic.add(entries=buffer.numel(), entries_sent=buffer.numel())
    sent = buffer.to(dtype)
    tag = context.tag if feedback.of_updates else 0
    work = all_reduce_mean(sent, everyone)
    if tag:
        ends = torch.full((2,), tag, dtype=torch.int32, device=sent.device)
        ends[1:].neg_()
        yield Segments([work, all_reduce_max(ends, everyone)])
        if must_not_wait(sent.device):
            feedback.awaited.on_ready(ends, _check_tags)
        else:
            _check_tags(ends.tolist())
    else:
        yield work
    mean = buffer if sent is buffer else buffer.copy_(sent)
    factors = gains_of_dense(plan, context.gains, mean)
    return mean if factors is None else mean.mul_(factors)


def _check_tags(ends: list[int]) -> None:
    largest = ends[0]
    least = -ends[1]
    if largest != least:
        raise PayloadError(
            f"The ranks exchange whole updates of other tensors, or of another step: {BE_ALIKE}."
        )


def unused_tensors(gradients: Tensor, plan: BucketPlan) -> set[int]:
    """Indices of tensors whose gradients are all zero. This waits for a GPU, once.

    With ``find_unused_parameters`` DistributedDataParallel discards the mean of a parameter that no
    rank has used, so nothing of its residual may be sent.
    """
    used = [gradients[slice(*bounds)].any() for bounds in plan.bounds]
    return {
        index
        for index, is_used in enumerate(torch.stack(used).tolist() if used else [])
        if not is_used
    }
