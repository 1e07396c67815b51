"""An exchange: the sequence of collectives by which one bucket is averaged over the ranks.

Buckets without compressed tensors, and sparse gradients, are all-reduced in every exchange.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, OwnedPiece, Received, Sending
from lightning_dct.compress.codec import compress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.gains import gain_of
from lightning_dct.exchange.collectives import (
    Link,
    Segments,
    Travel,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_mean_sparse,
)
from lightning_dct.traffic import Traffic
from lightning_dct.wire.payload import BE_ALIKE
from lightning_dct.wire.positions import PayloadError

# The exchange of one bucket. It starts a collective and yields its work, the caller waits for that
# and resumes it, and so on. It returns what it has received: payloads, or the mean of a bucket that
# is not compressed.
Flow = Generator[dist.Work | Segments | Travel, None, Received | Tensor]


class Exchange(ABC):
    """How compressed buckets are exchanged.

    Attributes:
        everyone: All ranks, for what is not compressed.
        link_traversals: See :func:`~lightning_dct.compress.bucket_plan.plan_bucket`.
        num_collectives: For a bucket.
        pieces: The pieces of the model that this rank owns, by label.
        sums_first: Whether buckets are summed before they are compressed, so a rank has no residual
            of its own.
        made: Process groups that were made for this exchange.
    """

    everyone: Link
    link_traversals: float
    num_collectives = 1
    pieces: Mapping[str, OwnedPiece] = {}
    sums_first = False
    made: Sequence[dist.ProcessGroup] = ()

    @abstractmethod
    def send(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        how: Sending,
    ) -> Flow:
        """Exchange a bucket. Every rank calls this for the same buckets in the same order.

        Args:
            bucket: The tensors of this rank.
            plan: How each tensor is sent.
            deferred: Indices of tensors that this rank's backward did not use. Nothing is sent of
                them.
            feedback: This rank's residuals and thresholds.
            how: The tag, and factors.
        """

    def start(
        self,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        feedback: ErrorFeedback,
        how: Sending,
        read: Callable[[Received], Tensor] | None = None,
        dense_dtype: torch.dtype | None = None,
    ) -> "Message":
        """Start exchanging a bucket, or averaging one without compressed tensors; for the arguments
        see :meth:`send`.

        ``read`` makes the result of received payloads. ``dense_dtype`` is that in which a mean is
        taken, by default the bucket's.
        """
        device = bucket.news[0].device
        if plan.is_dense:
            (buffer,) = bucket.news
            flow = send_dense(
                buffer, plan, deferred, feedback, self.everyone, dense_dtype or buffer.dtype, how
            )
            return Message(flow, 1, device)
        return Message(
            self.send(bucket, plan, deferred, feedback, how), self.num_collectives, device, read
        )

    def pack(
        self,
        feedback: ErrorFeedback,
        bucket: Bucket,
        plan: BucketPlan,
        deferred: set[int],
        how: Sending,
        due: int,
    ) -> Tensor:
        """Compress a bucket into a payload.

        Counts the ``due`` and the sent entries; those of a GPU once it knows.
        """
        payload, entries, dense = compress(feedback, bucket, plan, deferred, how)
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
        for group in self.made:
            dist.destroy_process_group(group)
        self.made = ()


class Message:
    """A bucket on its way: the handle that :meth:`Exchange.start` returns.

    Its first collective starts here.

    Attributes:
        result: What ``read`` makes of received payloads, or a mean; None before the message has
            arrived.
        collectives_left: Collectives that have not been waited for.
        finite: Whether the mean is finite, if :meth:`advance` has checked it.
    """

    def __init__(
        self,
        flow: Flow,
        num_collectives: int,
        device: torch.device,
        read: Callable[[Received], Any] | None = None,
    ) -> None:
        self.collectives_left = num_collectives
        self.result: Any = None
        self.finite = True
        self._read = read
        self._flow = flow
        self._device = device
        self._future: Future[Any] | None = None
        self._work = next(flow)

    @classmethod
    def arrived(cls, mean: Tensor) -> "Message":
        """One that had arrived before a run was resumed."""
        message = cls.__new__(cls)
        message.collectives_left = 0
        message.result = mean
        return message

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
            self._work.wait()
        with traffic.timed("decompress"):
            self.collectives_left -= 1
            try:
                self._work = next(self._flow)
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


def finish(messages: Iterable[Message], traffic: Traffic, check_finite: bool = False) -> None:
    """Finish messages in the order of sending, collective by collective, and read one while the
    next is in flight.
    """
    while under_way := [message for message in messages if message.collectives_left]:
        for message in under_way:
            message.advance(traffic, check_finite)


def send_sparse(gradient: Tensor, everyone: Link) -> Flow:
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
    how: Sending,
) -> Flow:
    """Exchange a bucket without compressed tensors, with all of its residuals, in a dtype; updates
    with their tag.
    """
    feedback.send_out(buffer, plan, deferred, how.scale, owned=True)
    everyone.traffic.add(entries=buffer.numel(), entries_sent=buffer.numel())
    sent = buffer.to(dtype)
    tag = how.tag if feedback.of_updates else 0
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
    if how.gains:
        for index, part in enumerate(mean.split(plan.sizes)):
            part.mul_(gain_of(plan, index, how.gains, part))
    return mean


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
