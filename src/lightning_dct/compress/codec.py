"""One bucket: select entries, pack them into a payload, and add received payloads.

No communication.

    gradients   a = e + g        e = a - read(payload)                 e: the residual
    updates     a = w - S        nothing to write                      w: own weights, S: the shared ones

    rank r      flag |a| >= tau      pack ---+
                                             |  payloads as bytes, by any exchange
                                             v
    gradients   g = (1 / W) * sum over ranks of read(payload)
    updates     S += m,  w += m - read(own payload)                    m = (f / W) * the same sum

This is the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021,
section 3.1), with a threshold for each tensor. Two functions do the work, ``compress_bucket`` and
``add_payloads``: those below in plain torch or numba, and those of
:mod:`~lightning_dct.compress.on_gpu` in Triton. All give the same bits.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import (
    NO_CONTEXT,
    Bucket,
    BucketPlan,
    ExchangeContext,
    Received,
    gains_of,
    gains_of_dense,
)
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.threshold import GUARD_RESELECT, nudge, sample_of, threshold_from
from lightning_dct.kernels import cpu_kernel, weights_by_senders
from lightning_dct.kernels.plain import Sent
from lightning_dct.wire import payload as wire
from lightning_dct.wire.positions import PayloadError, reading


def compress(
    feedback: ErrorFeedback,
    bucket: Bucket,
    plan: BucketPlan,
    deferred: set[int],
    context: ExchangeContext = NO_CONTEXT,
) -> tuple[Tensor, int | Tensor]:
    """Pack the entries that reach their threshold, except of tensors with ``deferred`` indices.

    The rest of gradients stays in the residual: ``decoded(payload) + residual`` equals the earlier
    ``residual + scale * gradient``. Infinite and NaN entries go into the payload, and the residual
    keeps its old value. Weights do not change. Thresholds that are missing are selected from this
    bucket.

    Returns:
        The payload: shape ``[plan.num_bytes]``, uint8; for a plan with parts, their payloads one
        after the other. And the number of its compressed entries; for a GPU a tensor on it, int64,
        with those of each part.
    """
    used = (
        tuple([index for index in plan.compressed if index not in deferred])
        if deferred
        else plan.compressed
    )
    tensors = plan.of_tensors(used)
    missing = feedback.thresholds.missing(tensors.names, tensors.targets)
    for number in missing:
        size = tensors.sizes[number]
        target = tensors.targets[number]
        sampled = bucket.entries(tensors.bounds[number], sample_of(size, target))
        threshold = threshold_from(sampled, size, target)
        feedback.thresholds.set(tensors.names[number], target, threshold)
    feedback.selected |= bool(missing)
    if must_not_wait(bucket.references[0].device):
        code_for_gpus = _code_for_gpus()
        return code_for_gpus.compress_bucket(feedback, bucket, plan, used, deferred, context)
    return compress_bucket(feedback, bucket, plan, used, deferred, context)


def _code_for_gpus() -> Any:
    # Triton is there only with torch for CUDA.
    return import_module("lightning_dct.compress.on_gpu")


def decompress(feedback: ErrorFeedback, received: Received, buffer: Tensor) -> Tensor:
    """Overwrite a bucket with the weighted sum of all ranks' payloads.

    Every rank adds the same payloads in the same order, so replicas stay bitwise identical. Each
    entry's weight follows from its gain, or from the number of ranks that have sent it; see
    :func:`~lightning_dct.kernels.weights_by_senders`. ``buffer``, shape ``[n]``, is overwritten
    where the plan's tensors lie.

    Raises:
        PayloadError: A payload is corrupt or has another plan; the message names the rank. On a GPU
            ``feedback.awaited`` raises it later.
    """
    plan = received.plan
    total = buffer if buffer.dtype == plan.residual_dtype else buffer.to(plan.residual_dtype)
    if plan.starts is None:
        total[: sum(plan.sizes)].zero_()
    elif plan.bounds:
        torch._foreach_zero_([total[start:stop] for start, stop in plan.bounds])
    apply(feedback, received, Bucket([], [total], None))
    return total if total is buffer else buffer.copy_(total)


def decompress_own(feedback: ErrorFeedback, received: Received, mean: Tensor) -> Tensor:
    """What this rank has sent of a bucket, as far as it counts: shape ``[n]``, like the
    ``mean``.
    """
    own = received.own
    assert own is not None
    alone = (
        own
        if isinstance(own, Received)
        else received._replace(payloads=received.payloads[own].unsqueeze(0))
    )
    alone = alone._replace(
        factor=1.0,
        own=None,
        label=received.label or "This rank's own updates",
        context=received.context.without_gains(),
    )
    sent = decompress(feedback, alone, torch.empty_like(mean))
    return torch.where(counting(mean, alone.plan), sent, 0.0) if isinstance(own, Received) else sent


def counting(sums: Tensor, plan: BucketPlan) -> Tensor:
    """Which entries of a sum have been sent: all of a dense tensor, else those that are not zero.

    Bool, ``[n]``.
    """
    sent = sums != 0
    for index in plan.dense:
        sent[slice(*plan.bounds[index])] = True
    return sent


def apply(feedback: ErrorFeedback, received: Received, bucket: Bucket) -> None:
    """Add the weighted sum of all ranks' payloads to the references of a bucket.

    Own weights, if the bucket has any, change by as much, less what this rank has sent, if it has.
    :func:`decompress` describes the arguments and errors.
    """
    payloads = received.payloads
    plan = received.plan
    label = received.label or feedback.label
    if payloads.shape[1] != plan.num_bytes:
        raise PayloadError(
            f"{label} from rank 0 of the process group: a payload has {payloads.shape[1]} bytes"
            f" where its layout has {plan.num_bytes}: use the same model, settings and version of"
            " lightning_dct on every rank."
        )
    if must_not_wait(payloads.device):
        _code_for_gpus().add_payloads(feedback, received, bucket, label)
    else:
        add_payloads(feedback, received, bucket, label)


def compress_bucket(
    feedback: ErrorFeedback,
    bucket: Bucket,
    plan: BucketPlan,
    used: tuple[int, ...],
    deferred: set[int],
    context: ExchangeContext,
) -> tuple[Tensor, int]:
    """Pack the payloads of a bucket on a CPU, and count the entries; see :func:`compress`.

    ``used`` are the indices of the compressed tensors that send something.
    """
    thresholds = feedback.thresholds
    kernel = cpu_kernel(feedback.kernel)
    tensors = plan.of_tensors(used)
    inputs, references = bucket.parts(tensors.bounds)
    taus = thresholds.of(tensors.names)
    flags = torch.zeros(sum(plan.flag_bytes), dtype=torch.uint8)
    before = [base.clone() for base in references if bucket.ranks_keep_unsent]
    first = tensors.first
    values, reached = kernel.select(inputs, references, first, taus, bucket.scale, flags)
    # The capacity is fixed, because collectives need equal sizes.
    values, kept, limits = kernel.fit(flags, first, tensors.sizes, values, reached, tensors.targets)
    if feedback.adapt_threshold:
        for name, target, size, tau, count, limit in zip(
            tensors.names, tensors.targets, tensors.sizes, taus, reached, limits, strict=True
        ):
            if limit < math.inf:
                is_far = count > GUARD_RESELECT * target
                thresholds.set(name, target, limit if is_far else nudge(tau, count, target, size))
    counts = kept
    if deferred:
        counts = [0] * len(plan.compressed)
        for index, count in zip(used, kept, strict=True):
            counts[plan.compressed.index(index)] = count
    parts = plan.parts or (plan,)
    each = iter(counts)
    of_parts = [list(islice(each, len(part.compressed))) for part in parts]
    sums = [sum(of_part) for of_part in of_parts]
    before_part = 0
    sent = []
    for part, of_part, own_flags, own in zip(
        parts, of_parts, divided(flags, plan.flag_bytes), divided(values, sums), strict=True
    ):
        dense = take_dense(bucket, part, {index - before_part for index in deferred})
        sent.append(
            wire.pack_payload(
                part.layout, own_flags, own, of_part, dense, context.tag, feedback.kernel
            )
        )
        before_part += len(part.names)
    if bucket.scale is not None or context.dropped:
        # In the memory of the values, which are not needed any more.
        read = values if values.dtype == torch.float32 else values.to(torch.float32)
        for part, of_part, payload, out in zip(
            parts, of_parts, sent, divided(read, sums), strict=True
        ):
            wire.unpack_values(part.layout, payload, of_part, out, feedback.kernel)
        as_read = Sent(flags[None], read, [values.numel()])
        if bucket.scale is not None:
            kernel.subtract(references, first, as_read)
        else:
            kernel.decay(inputs, references, first, as_read, context.dropped)
        if before:
            counted = [torch.zeros_like(old) for old in before]
            kernel.add_sums(
                counted,
                None,
                first,
                as_read,
                weights_by_senders(1, 1.0, 1.0, plan.residual_dtype),
            )
            for base, old, one in zip(references, before, counted, strict=True):
                base.copy_(torch.where(one != 0, base, old))
    return torch.cat(sent) if plan.parts else sent[0], values.numel()


def divided(entries: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Parts of a flat tensor, one after the other; itself if it is one."""
    return [entries] if len(sizes) == 1 else entries.split_with_sizes(list(sizes))


def take_dense(bucket: Bucket, plan: BucketPlan, deferred: set[int]) -> Tensor:
    """The tensors sent dense (shape ``[dense bytes]``, uint8), zeros for deferred ones; rounding
    stays in residuals.
    """
    if not plan.dense:
        return bucket.references[0].new_empty(0, dtype=torch.uint8)
    tensors = plan.of_tensors(tuple([one for one in plan.dense if one not in deferred]))
    sizes = list(tensors.sizes)
    if not sizes:
        whole = sum(plan.of_tensors(plan.dense).sizes)
        return bucket.references[0].new_zeros(whole, dtype=plan.dtype).view(torch.uint8)
    inputs, residuals = bucket.parts(tensors.bounds)
    if bucket.scale is None:
        sent = torch.cat(torch._foreach_sub(inputs, residuals))
    else:
        before = torch.cat(residuals)
        new = torch.cat(inputs)
        accumulated = before + new.to(before.dtype) * bucket.scale
        sent = accumulated.to(plan.dtype)
        left = accumulated - sent
        torch._foreach_copy_(
            residuals, torch.where(left.abs() < math.inf, left, before).split(sizes)
        )
    if len(sizes) < len(plan.dense):
        parts = iter(sent.split(sizes))
        sent = torch.cat(
            [
                sent.new_zeros(plan.sizes[index]) if index in deferred else next(parts)
                for index in plan.dense
            ]
        )
    return sent.view(torch.uint8)


def add_payloads(feedback: ErrorFeedback, received: Received, bucket: Bucket, label: str) -> None:
    """Add the payloads of all senders to a bucket on a CPU; see :func:`apply`."""
    payloads, plan, factor, own, _, context = received
    parts = plan.parts or (plan,)
    ranks = len(payloads)
    sources = [(plan, row) for row in payloads.unbind()]
    mine = -1
    if bucket.inputs and own is not None:
        mine = own if isinstance(own, int) else ranks
        sources += [(own.plan, own.payloads[0])] if isinstance(own, Received) else []
    flags = torch.zeros(len(sources), sum(plan.flag_bytes), dtype=torch.uint8)
    most = sum(sum(source_plan.targets) for source_plan, _ in sources)
    values = torch.empty(most, dtype=torch.float32)
    counts = []
    end = 0
    # What each sender has sent dense, by part; one rank's payload after the other in each row.
    dense: list[list[Tensor]] = [[] for _ in parts]
    for row, ((source_plan, payload_of_all), own_flags) in enumerate(
        zip(sources, flags.unbind(), strict=True)
    ):
        begin = end
        for number, ((part, payload), room) in enumerate(
            zip(
                source_plan.divide(payload_of_all),
                divided(own_flags, plan.flag_bytes),
                strict=True,
            )
        ):
            sender = "This rank's own payload"
            if row < ranks:
                sender = f"{label} from rank {row * len(parts) + number}"
            with reading(f"{sender} of the process group"):
                count, finite = wire.read_payload(
                    part.layout, payload, room, values[end:], context.tag, feedback.kernel
                )
            end += count
            if part.dense:
                # In memory of its own, because a view as another dtype has to be aligned.
                one = wire.read_dense(part.layout, payload).clone().view(plan.dtype)
                dense[number].append(one)
                finite = finite and wire.is_finite(one)
            if not finite:
                name_broken_sender(sender)
        counts.append(end - begin)
    tensors = plan.of_tensors(plan.compressed)
    owns, totals = bucket.parts(tensors.bounds)
    weights = weights_by_senders(ranks, factor, context.gain, plan.residual_dtype)
    gains = gains_of(plan, context.gains_of_compressed, payloads.device)
    sent = Sent(flags, values[:end], counts)
    cpu_kernel(feedback.kernel).add_sums(
        totals, owns or None, tensors.first, sent, weights, mine, gains
    )
    for part, of_senders in zip(parts, dense, strict=True):
        if of_senders:
            add_dense(part, bucket, of_senders, received, mine)


def add_dense(
    plan: BucketPlan, bucket: Bucket, sent: Sequence[Tensor], received: Received, mine: int
) -> None:
    """Add the mean of tensors that are sent dense (all of a sender's, flattened), as
    :func:`add_payloads`, on any device.

    ``plan`` is that of the received payloads, or of a part of them. This rank's own payload may
    follow those that are summed; ``mine`` is its number, -1 if there is none.
    """
    tensors = plan.of_tensors(plan.dense)
    sizes = list(tensors.sizes)
    ranks = len(received.payloads)
    gains = received.context.gains
    summed = [dense.to(plan.residual_dtype) for dense in sent[:ranks]]
    total = sum(summed[1:], start=summed[0])
    mean = total * received.factor
    if (factors := gains_of_dense(plan, gains, mean)) is not None:
        mean *= factors
    means = mean.split_with_sizes(sizes)
    owns, totals = bucket.parts(tensors.bounds)
    torch._foreach_add_(totals, means)
    if owns:
        if mine >= 0:
            own = sent[mine].to(plan.residual_dtype)
            torch._foreach_sub_(owns, own.split_with_sizes(sizes))
        torch._foreach_add_(owns, means)


@lru_cache(maxsize=256)
def name_broken_sender(sender: str) -> None:
    """Warn once, on rank 0, that a rank has sent infinite or NaN numbers."""
    rank_zero_warn(
        f"{sender} of the process group are infinite or NaN: the weights of all ranks are so from"
        " now on. Stop the run, and look at the loss and the data of that rank. A loss scaler skips"
        " such a step by itself."
    )
